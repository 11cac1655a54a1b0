"""Slabs over DeepNVMe handles: with stand-ins for the handles, and with DeepSpeed where it is."""

from __future__ import annotations

import importlib.util
import os
import secrets
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from configs.files import FileConfig
from configs.kvstore_segments import SegmentConfig
from kvstore.node.segment import make_segments
from moe_runtime.integrations import deepnvme
from moe_runtime.integrations.deepnvme import DeepNvmeSlab
from transfer import StorageFailed
from transfer.backends.direct_io import AlignedBuffer

SIZE = 4 << 20
CONFIG = FileConfig(threads=2, io_bytes=1 << 16)


class FakeHandle:
    """Moves bytes as a handle does, dies as one does, and fails when told to."""

    calls: list[tuple[str, int, int]] = []
    failing = False

    def __init__(self, block_size, queue_depth, single_submit, overlap_events, parallelism):
        assert parallelism == 1

    def sync_pread(self, buffer, filename, file_offset):
        assert file_offset + buffer.nbytes <= os.stat(filename).st_size, "a real one aborts here"
        return self._move("read", buffer, filename, file_offset)

    def sync_pwrite(self, buffer, filename, file_offset):
        return self._move("write", buffer, filename, file_offset)

    def _move(self, what, buffer, filename, at):
        assert buffer.data_ptr() % 512 == 0
        assert at % 4096 == 0
        assert buffer.nbytes % 4096 == 0
        if FakeHandle.failing:
            return -1
        FakeHandle.calls.append((what, at, buffer.nbytes))
        fd = os.open(filename, os.O_RDWR)
        try:
            if what == "read":
                buffer.numpy()[:] = np.frombuffer(os.pread(fd, buffer.nbytes, at), dtype=np.uint8)
            else:
                os.pwrite(fd, buffer.numpy(), at)
        finally:
            os.close(fd)
        return 1


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(FakeHandle, "calls", [])
    monkeypatch.setattr(FakeHandle, "failing", False)
    monkeypatch.setattr(deepnvme, "load_module", lambda: SimpleNamespace(aio_handle=FakeHandle))
    return FakeHandle


def random_bytes(nbytes=SIZE):
    memory = torch.from_numpy(AlignedBuffer(nbytes).array)
    memory.numpy()[:] = np.frombuffer(secrets.token_bytes(nbytes), dtype=np.uint8)
    return memory


def round_trip(slab):
    data, found = random_bytes(), torch.from_numpy(AlignedBuffer(SIZE).array)
    slab.write(data, 0, 0, SIZE)
    slab.read(found, 0, 0, SIZE)
    assert torch.equal(data, found)
    slab.write(data, 100, 7777, 50_000)  # what is not aligned
    slab.read(found, 3, 7777, 50_000)
    assert torch.equal(data[100:50_100], found[3:50_003])


def test_aligned_bytes_go_through_handles(tmp_path, fake):
    with DeepNvmeSlab(tmp_path / "slab", SIZE, CONFIG) as slab:
        if not slab.alignment.direct:
            pytest.skip(slab.alignment.why_buffered)
        round_trip(slab)
    assert sum(n for what, _, n in fake.calls if what == "write") >= SIZE
    assert sum(n for what, _, n in fake.calls if what == "read") >= SIZE


def test_what_a_handle_does_not_do_is_done_otherwise(tmp_path, fake):
    with DeepNvmeSlab(tmp_path / "slab", SIZE, CONFIG) as slab:
        fake.failing = True
        round_trip(slab)
        assert fake.calls == []


def test_a_file_that_was_cut_never_reaches_a_handle(tmp_path, fake):
    with DeepNvmeSlab(tmp_path / "slab", SIZE, CONFIG) as slab:
        round_trip(slab)
        os.truncate(slab.path, SIZE // 2)
        with pytest.raises(StorageFailed, match="cut short"):
            slab.read(random_bytes(), 0, 0, SIZE)


def test_segments_use_it_when_they_are_told_to(tmp_path, fake, caplog):
    made = []

    def maker(*arguments):
        made.append(arguments)
        return DeepNvmeSlab(*arguments)

    configs = [
        SegmentConfig(medium="ssd", path=tmp_path / "a", reader="deepnvme"),
        SegmentConfig(medium="ssd", path=tmp_path / "b"),
    ]
    make_segments(configs, verify_bytes=0, make_slab=maker)
    assert [path for path, *_ in made] == [tmp_path / "a"]
    make_segments(configs, verify_bytes=0)
    assert "read by threads" in caplog.text


def test_without_deepspeed_there_is_none(monkeypatch, caplog):
    if importlib.util.find_spec("deepspeed") is not None:
        pytest.skip("DeepSpeed is installed")
    deepnvme.load_module.cache_clear()
    assert deepnvme.deepnvme_slab() is None
    assert "DeepNVMe is not to be had" in caplog.text
    deepnvme.load_module.cache_clear()


def test_with_deepspeed(tmp_path):
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    maker = deepnvme.deepnvme_slab()
    if maker is None:
        pytest.skip("DeepSpeed's async_io extension cannot be built")
    with maker(tmp_path / "slab", SIZE, CONFIG) as slab:
        round_trip(slab)
        os.truncate(slab.path, SIZE // 2)
        with pytest.raises(StorageFailed, match="cut short"):
            slab.read(random_bytes(), 0, 0, SIZE)


@pytest.mark.parametrize("reader", ["threads", "deepnvme"])
def test_it_is_looked_for_only_where_a_segment_asks_for_it(monkeypatch, tmp_path, reader):
    asked: list[bool] = []
    monkeypatch.setattr(deepnvme, "load_module", lambda: asked.append(True))
    disk = SegmentConfig(medium="ssd", bytes=SIZE, path=tmp_path / "slab", reader=reader)
    assert deepnvme.slab_for([SegmentConfig(bytes=SIZE), disk]) is None
    assert asked == [True] * (reader == "deepnvme")
