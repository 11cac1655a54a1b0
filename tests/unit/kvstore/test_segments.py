"""Segments of each medium: what is written is read, what is wrong is not offered."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import xxhash

from configs.files import DirectIO
from configs.kvstore_segments import SegmentConfig
from configs.schema import KVStoreConfig, TransferConfig
from kvstore.checksum import part_table, table_checksum
from kvstore.errors import SegmentUnusable, StoreClosed
from kvstore.node import ssd_segment
from kvstore.node.segment import Segment, make_segments
from kvstore.wire.messages import HeldBlocks, Medium
from tests.support.waits import eventually
from transfer import StorageBusy, StorageFailed, TransferEngine, allocate
from transfer.pieces import make_pieces

SIZE = 1 << 20
WAIT_S = 30.0
MEDIA = ("dram", "dram_small_pages", "cxl_file", "cxl_node", "ssd")


def config_of(medium: str, folder: Path, nbytes: int = SIZE) -> SegmentConfig:
    if medium == "ssd":
        return SegmentConfig(medium="ssd", bytes=nbytes, path=folder / "slab", threads=2)
    if medium == "cxl_file":
        path = folder / "dax"
        path.touch()
        os.truncate(path, nbytes)
        return SegmentConfig(medium="cxl", bytes=nbytes, path=path)
    if medium == "cxl_node":
        return SegmentConfig(medium="cxl", bytes=nbytes, numa_node=0)
    return SegmentConfig(bytes=nbytes, hugepages=medium == "dram")


def segment_of(config: SegmentConfig, verify_bytes: int = 1 << 30) -> Segment:
    (segment,) = make_segments([config], verify_bytes=verify_bytes)
    return segment


@pytest.fixture
def engine(stack):
    engine = TransferEngine(TransferConfig(), name=secrets.token_hex(8), secret=b"s")
    return stack.enter_context(engine)


def write(segment: Segment, offset: int, data: np.ndarray) -> None:
    segment.memory.write(data, make_pieces(0, offset, len(data)), time.monotonic() + WAIT_S)


def read(segment: Segment, offset: int, nbytes: int) -> np.ndarray:
    target = np.zeros(nbytes, dtype=np.uint8)
    segment.memory.read(target, make_pieces(offset, 0, nbytes), time.monotonic() + WAIT_S)
    return target


def put(segment: Segment, offset: int, nbytes: int, *, chunk_bytes: int = 0) -> bytes:
    """Write a block as a client does; return its key."""
    payload = np.frombuffer(secrets.token_bytes(nbytes), dtype=np.uint8)
    stored, checksum = payload, xxhash.xxh3_64_intdigest(payload)
    if chunk_bytes:
        table = part_table([payload], chunk_bytes)
        stored, checksum = np.concatenate([payload, table]), table_checksum(table)
    write(segment, offset, stored)
    key = secrets.token_bytes(16)
    columns = HeldBlocks([key], [offset], [nbytes], [checksum], [False], [chunk_bytes])
    assert segment.record(columns) == 1
    return key


@pytest.mark.parametrize("medium", MEDIA)
def test_bytes_and_blocks(medium, tmp_path, stack, engine):
    segment = segment_of(config_of(medium, tmp_path))
    with pytest.raises(StoreClosed):
        segment.offer_to("nobody")
    segment.open(engine)
    stack.callback(segment.close)
    assert (segment.nbytes, segment.untouched) == (SIZE, True)
    assert segment.medium is Medium(medium.partition("_")[0])
    data = np.frombuffer(secrets.token_bytes(SIZE), dtype=np.uint8)
    write(segment, 0, data)
    assert np.array_equal(read(segment, 0, SIZE), data)
    assert np.array_equal(read(segment, 12_345, 54_321), data[12_345:66_666])
    keys = [
        put(segment, 100_000 * i, 50_000, chunk_bytes=1 << 12 if i % 2 else 0) for i in range(9)
    ]
    assert segment.held().keys == keys
    for i, place in ((2, 25_000), (3, 0), (5, 50_004)):  # a payload, the first byte, a table
        damaged = read(segment, 100_000 * i + place, 1) ^ 1
        if segment.memory.array is None:  # below the segment, which would know that it was written
            slab = segment.memory._slab
            slab.write(torch.from_numpy(damaged), 0, 100_000 * i + place, 1)
        else:
            write(segment, 100_000 * i + place, damaged)
    left = [key for i, key in enumerate(keys) if i not in (2, 3, 5)]
    assert segment.held().keys == left
    assert segment.figures().blocks == len(left), "what is wrong is forgotten"


@pytest.mark.parametrize("medium", MEDIA)
def test_a_peer_reaches_it_one_sided(medium, tmp_path, stack, engine):
    segment = segment_of(config_of(medium, tmp_path))
    segment.open(engine)
    stack.callback(segment.close)
    peer = TransferEngine(TransferConfig(), name=secrets.token_hex(8), secret=b"s")
    stack.enter_context(peer)
    peer.connect(engine.address)
    own = peer.register(allocate(SIZE))
    own.array[:] = np.frombuffer(secrets.token_bytes(SIZE), dtype=np.uint8)
    first, key = segment.offer_to(peer.name), segment.offer_to(peer.name, for_copies=True)
    assert not segment.untouched
    assert key.nbytes == SIZE
    peer.write(engine.name, own, key, 0, 77, 300_000).wait()
    assert np.array_equal(read(segment, 77, 300_000), own.array[:300_000])
    peer.read(engine.name, own, key, 500_000, 77, 300_000).wait()
    assert np.array_equal(own.array[500_000:800_000], own.array[:300_000])
    peer.read(engine.name, own, first, 0, 0, 10).wait()  # a key of its own
    with pytest.raises(Exception, match="not inside"):
        peer.write(engine.name, own, key, 0, SIZE - 10, 11).wait()


def test_what_is_not_within_the_budget_is_told_unverified(tmp_path, stack, engine):
    segment = segment_of(config_of("dram", tmp_path), verify_bytes=120_000)
    segment.open(engine)
    stack.callback(segment.close)
    keys = [put(segment, 100_000 * i, 50_000) for i in range(6)]
    segment.memory.array[[0, 500_000]] ^= 1
    assert segment.held().keys == keys[1:], "the first is wrong, the last nobody looked at"
    assert segment.held().keys == keys[1:], "two more are known to be right"
    assert segment.held().keys == keys[1:5]


def test_a_restarted_node_has_what_it_had(tmp_path, stack, engine):
    config = config_of("ssd", tmp_path)
    segment = segment_of(config)
    segment.open(engine)
    keys = [put(segment, 70_000 * i, 65_536) for i in range(8)]
    # Half overwritten, by a writer that never said what it wrote.
    write(segment, 70_000 * 3 - 100, np.zeros(200, dtype=np.uint8))
    segment.close()
    segment.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["slab", "slab.index"]
    segment = segment_of(config, verify_bytes=0)
    segment.open(engine)
    stack.callback(segment.close)
    assert segment.untouched
    expected = keys[:3] + keys[4:]
    assert segment.held().keys == expected, "even without looking at the bytes"
    segment.verify(segment.index.blocks())
    assert segment.held().keys == expected


def test_a_large_block_is_verified_in_parts(tmp_path, stack, engine):
    segment = segment_of(config_of("ssd", tmp_path, nbytes=24 << 20))
    segment.open(engine)
    stack.callback(segment.close)
    keys = [put(segment, 100, 10 << 20), put(segment, 11 << 20, 9_000_001, chunk_bytes=100_003)]
    assert segment.held().keys == keys
    slab = segment.memory._slab
    for at in (100 + (9 << 20), (11 << 20) + 9_000_001 + 9):
        slab.write(torch.full((2,), 9, dtype=torch.uint8), 0, at, 2)
    slab.sync()
    assert segment.held().keys == []


def refused(config, engine, kind=SegmentUnusable):
    descriptors = psutil.Process().num_fds()
    segment = segment_of(config)
    with pytest.raises(kind) as caught:
        segment.open(engine)
    segment.close()
    # Fewer, where something of an earlier test was closed meanwhile.
    eventually(lambda: psutil.Process().num_fds() <= descriptors, "no descriptor is left")
    return caught.value


def test_a_file_of_somebody_else_is_left_alone(tmp_path, engine):
    config = config_of("ssd", tmp_path)
    block = ssd_segment.BLOCK_BYTES
    config.path.write_bytes(content := secrets.token_bytes(SIZE + block))
    config.path.chmod(0o600)
    error = refused(config, engine)
    assert "no header" in error.seen
    assert config.path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [config.path]
    config.path.write_bytes(bytes(SIZE + block))
    refused(config, engine)  # all zeros, but nothing says that they are ours
    config.path.write_bytes(content[:-1])
    assert "bytes" in refused(config, engine, StorageFailed).reason  # another size
    assert list(tmp_path.iterdir()) == [config.path]


def test_a_slab_of_another_size_or_version(tmp_path, stack, engine, monkeypatch):
    config = config_of("ssd", tmp_path)
    segment = segment_of(config)
    segment.open(engine)
    put(segment, 0, 1000)
    segment.close()
    error = refused(config.model_copy(update={"bytes": SIZE - 1}), engine)
    assert str(SIZE) in error.seen
    refused(config.model_copy(update={"bytes": 2 * SIZE}), engine, StorageFailed)
    monkeypatch.setattr(ssd_segment, "VERSION", 2)
    error = refused(config, engine)
    assert "version 1" in error.seen
    monkeypatch.undo()
    segment = segment_of(config)
    segment.open(engine)
    stack.callback(segment.close)
    assert len(segment.held().keys) == 1, "all of them left it as it was"


@pytest.mark.parametrize("left", ["nothing", "header", "index", "other_index"])
def test_a_slab_and_an_index_that_do_not_belong_together(tmp_path, stack, engine, left):
    config = config_of("ssd", tmp_path)
    segment = segment_of(config)
    segment.open(engine)
    put(segment, 0, 1000)
    segment.close()
    index = config.path.with_name("slab.index")
    if left == "index":  # the slab was deleted
        config.path.unlink()
    elif left == "other_index":
        other = segment_of(config.model_copy(update={"path": tmp_path / "other"}))
        other.open(engine)
        put(other, 0, 1000)
        other.close()
        (tmp_path / "other.index").rename(index)
    elif left == "header":
        os.truncate(index, 64)
    else:
        index.unlink()
    for _ in range(2):
        segment = segment_of(config)
        segment.open(engine)
        assert segment.held().keys == []
        segment.close()
    segment.open(engine)
    stack.callback(segment.close)
    key = put(segment, 0, 1000)
    assert segment.held().keys == [key]


def test_killed_between_slab_and_header(tmp_path, stack, engine, monkeypatch):
    config = config_of("ssd", tmp_path)
    segment = segment_of(config)
    monkeypatch.setattr(ssd_segment.SsdSegment, "_write_header", lambda self, slab_id: None)
    segment.open(engine)
    segment.close()
    monkeypatch.undo()
    segment = segment_of(config)
    segment.open(engine)
    stack.callback(segment.close)
    key = put(segment, 0, 1000)
    assert segment.held().keys == [key]


@pytest.mark.parametrize("medium", ["ssd", "cxl_file"])
def test_two_nodes_on_one_file(medium, tmp_path, stack, engine):
    config = config_of(medium, tmp_path)
    segment = segment_of(config)
    segment.open(engine)
    stack.callback(segment.close)
    before = sorted(tmp_path.iterdir())
    error = refused(config, engine, StorageBusy)
    assert error.retryable
    assert sorted(tmp_path.iterdir()) == before
    write(segment, 0, np.ones(10, dtype=np.uint8))


def test_what_cannot_be_mapped(tmp_path, engine):
    config = config_of("cxl_file", tmp_path)
    os.truncate(config.path, SIZE - 1)
    assert str(SIZE - 1) in refused(config, engine).seen
    refused(config.model_copy(update={"path": Path("/dev/null")}), engine)
    refused(config.model_copy(update={"path": tmp_path / "none"}), engine, StorageFailed)


def test_a_folder_that_is_not_there(tmp_path, engine):
    refused(config_of("ssd", tmp_path / "none"), engine, StorageFailed)


def test_configuration():
    assert KVStoreConfig(segment_bytes=1 << 20).lent == (SegmentConfig(bytes=1 << 20),)
    several = ({"bytes": SIZE}, {"medium": "ssd", "bytes": SIZE, "path": "/x"})
    assert [s.medium for s in KVStoreConfig(segments=several).lent] == ["dram", "ssd"]
    slotted = ({"medium": "ssd", "path": "/x/{slot}-{slot}"}, {"bytes": SIZE})
    (mine, plain) = KVStoreConfig(segments=slotted).for_slot(3).lent
    assert (str(mine.path), plain.path) == ("/x/3-3", None)
    for bad in (
        [{"medium": "ssd"}],
        [{"medium": "cxl"}],
        [{"medium": "cxl", "path": "/x", "numa_node": 1}],
        [{"path": "/x"}],
        [several[1], several[1]],
        [{"bytes": 1}],
        [{"medium": "tape"}],
    ):
        with pytest.raises(ValueError):
            KVStoreConfig(segments=bad)
    assert SegmentConfig(direct="require").file.direct is DirectIO.REQUIRE


@pytest.mark.parametrize(
    ("config", "seen"),
    [(SegmentConfig(bytes=SIZE, numa_node=4097), "no NUMA node 4097"),
     (SegmentConfig(bytes=1 << 60), "are available")],
)  # fmt: skip
def test_memory_that_is_not_there_says_what_was_asked_for(engine, config, seen):
    segment = segment_of(config)
    with pytest.raises(SegmentUnusable) as caught:
        segment.open(engine)
    assert seen in caught.value.seen
    assert "dram segment" in str(caught.value)
