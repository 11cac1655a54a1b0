"""A write to a peer's file that one ask can tell: no thread waits for it, and it ends anyhow."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.schema import FileConfig
from tests.support.disk_calls import replace
from tests.support.engines import engine_pair, offer
from tests.support.hanging_disk import HangingDisk
from tests.support.waits import eventually
from transfer import EngineClosed, Memory, PeerLost, StorageFailed, TransferTimeout, allocate
from transfer.backends.file import FileSlab
from transfer.storage import staging
from transfer.storage.messages import ASK_BYTES_MAX

NBYTES = 20 << 20
CALL = 1 << 20
SOON_S = 60.0
Shared = Callable[[int], Memory]


@pytest.fixture
def slab(tmp_path: Path) -> Iterator[FileSlab]:
    with FileSlab(tmp_path / "slab", NBYTES, FileConfig(threads=2)) as slab:
        yield slab


@pytest.fixture
def shared() -> Iterator[Shared]:
    with ExitStack() as stack:

        def make(nbytes: int) -> Memory:
            memory = allocate(nbytes)
            stack.callback(memory.close)
            memory.tensor.random_()
            return memory

        yield make


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[HangingDisk]:
    disk = HangingDisk(monkeypatch)
    yield disk
    disk.let_go()


def content(slab: FileSlab) -> np.ndarray:
    return np.fromfile(slab.path, dtype=np.uint8)[:NBYTES]


def test_no_thread_waits_for_a_single_ask(slab: FileSlab, shared: Shared) -> None:
    with engine_pair("shared_memory") as (a, b):
        region, key = a.register(shared(NBYTES)), offer(b, b.register(slab), a)
        places = torch.randperm(8).numpy() * 2 * CALL
        a.write(b.name, region, key, np.arange(8) * CALL, places, CALL).wait(SOON_S)
        assert a._staging._own is None, "a queue was started"
        assert not a._staging._asking._open
        found, wanted = content(slab), region.array
        for i, place in enumerate(places.tolist()):
            assert np.array_equal(found[place : place + CALL], wanted[i * CALL : (i + 1) * CALL])
        # What one ask cannot tell has threads, and so has what is followed by an immediate.
        a.write(b.name, region, key, 0, 0, ASK_BYTES_MAX + CALL).wait(SOON_S)
        assert a._staging._own is not None
        a.write(b.name, region, key, 0, 0, CALL, immediate=7).wait(SOON_S)
        b.expect({(a.name, 7): 1}, timeout_s=SOON_S)
        assert not a._staging.is_busy


def test_a_disk_that_fails(slab: FileSlab, shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*arguments: object) -> None:
        raise StorageFailed("the slab", "write", "Input/output error")

    replace(monkeypatch, failing, writes=True)
    with engine_pair("shared_memory") as (a, b):
        region, key = a.register(shared(CALL)), offer(b, b.register(slab), a)
        with pytest.raises(StorageFailed, match="Input/output"):
            a.write(b.name, region, key, 0, 0, CALL).wait(SOON_S)
        assert a._staging._own is None
        assert not a._staging._asking._open


def test_a_disk_that_hangs_beyond_the_deadline(
    slab: FileSlab, shared: Shared, hanging: HangingDisk
) -> None:
    with engine_pair("shared_memory") as (a, b):
        region, key = a.register(shared(CALL)), offer(b, b.register(slab), a)
        write = a.write(b.name, region, key, 0, 0, CALL, timeout_s=3.0)
        assert hanging.entered.wait(SOON_S)
        with pytest.raises(TransferTimeout):
            write.wait(SOON_S)
        eventually(lambda: not a._staging._asking._open, "it is forgotten")
        hanging.let_go()
        a.write(b.name, region, key, 0, 0, CALL).wait(SOON_S)


def test_a_peer_that_is_lost_meanwhile(
    slab: FileSlab, shared: Shared, hanging: HangingDisk
) -> None:
    with engine_pair("shared_memory") as (a, b):
        region, key = a.register(shared(CALL)), offer(b, b.register(slab), a)
        write = a.write(b.name, region, key, 0, 0, CALL)
        assert hanging.entered.wait(SOON_S)
        started = time.monotonic()
        a.disconnect(b.name, reason="fenced")
        with pytest.raises(PeerLost):
            write.wait(SOON_S)
        assert time.monotonic() - started < SOON_S
        assert not a._staging._asking._open
        hanging.let_go()


def test_an_engine_that_is_closed_meanwhile(
    slab: FileSlab, shared: Shared, hanging: HangingDisk
) -> None:
    with engine_pair("shared_memory") as (a, b):
        region, key = a.register(shared(CALL)), offer(b, b.register(slab), a)
        write = a.write(b.name, region, key, 0, 0, CALL)
        assert hanging.entered.wait(SOON_S)
        a.close()
        with pytest.raises((EngineClosed, PeerLost)):
            write.wait(SOON_S)
        assert not a._staging._asking._open
        hanging.let_go()


def test_a_busy_owner_is_asked_again(
    tmp_path: Path, shared: Shared, hanging: HangingDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "QUEUED_MAX", 1)
    config = FileConfig(threads=1, queued_max=1)
    with (
        FileSlab(tmp_path / "slab", NBYTES, config) as slab,
        engine_pair("shared_memory") as (a, b),
    ):
        region, key = a.register(shared(8 * CALL)), offer(b, b.register(slab), a)
        a._staging._own_queue()._queued_max = 8  # the owner's alone is short
        writes = [a.write(b.name, region, key, i * CALL, i * CALL, CALL) for i in range(8)]
        assert hanging.entered.wait(SOON_S)
        queue = a._staging._own_queue()
        eventually(lambda: queue.num_alive > 0, "those that were refused wait in threads")
        hanging.let_go()
        for write in writes:
            write.wait(SOON_S)
        assert np.array_equal(content(slab)[: 8 * CALL], region.array)
        assert not b._staging._service._used
        assert not a._staging._asking._open


@pytest.mark.parametrize("backend", ["shared_memory", "tcp"])
def test_a_withdrawn_key_is_in_use_for_as_long_as_the_disk_is_at_it(
    slab: FileSlab, shared: Shared, hanging: HangingDisk, backend: str
) -> None:
    with engine_pair(backend) as (a, b):
        region, key = a.register(shared(CALL)), offer(b, b.register(slab), a)
        transfer = a.write(b.name, region, key, 0, 0, CALL, timeout_s=4.0)
        assert hanging.entered.wait(SOON_S)
        assert not b.withdraw(key)
        with pytest.raises((TransferTimeout, StorageFailed)):
            transfer.wait(SOON_S)
        time.sleep(5.0)  # whoever serves it has given up by now, too
        assert not b.withdraw(key), "what hangs may still be written"
        hanging.let_go()
        eventually(lambda: b.withdraw(key), timeout_s=SOON_S)
        assert np.array_equal(content(slab)[:CALL], region.array)
