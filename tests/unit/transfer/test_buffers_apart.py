"""A peer's file that is read and written at once: no buffer carries bytes of two transfers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.schema import FileConfig
from tests.support.engines import engine_pair, offer
from tests.support.waits import eventually
from transfer import RegionKey, TransferEngine
from transfer.backends.file import FileSlab
from transfer.memory.region import OfferTable
from transfer.pieces import Pieces, copy_pieces
from transfer.storage.bounce import BUFFER_BYTES, Bounces
from transfer.storage.read_ahead import BUFFERS
from transfer.storage.staging import THREADS

READ_BYTES = THREADS * BUFFERS * BUFFER_BYTES  # each thread takes all of its buffers
NBYTES = READ_BYTES + BUFFER_BYTES
SOON_S = 60.0
BACKENDS = ("shared_memory", "tcp")
AREA_BYTES = 2 << 20
ROUNDS = 60


@pytest.fixture
def slab(tmp_path: Path) -> Iterator[FileSlab]:
    with FileSlab(tmp_path / "slab", NBYTES, FileConfig(threads=4)) as slab:
        slab.write(torch.randint(0, 256, (NBYTES,), dtype=torch.uint8), 0, 0, NBYTES)
        yield slab


def content(slab: FileSlab) -> np.ndarray:
    return np.fromfile(slab.path, dtype=np.uint8)[:NBYTES]


class HeldCopies:
    """Copies out of buffers that wait until their thread may go on."""

    def __init__(self) -> None:
        self.go_on = [threading.Event() for _ in range(THREADS)]
        self.held: set[int] = set()

    def __call__(self, target: np.ndarray, source: np.ndarray, pieces: Pieces) -> None:
        lane = int(threading.current_thread().name.rpartition("-")[2])
        self.held.add(lane)
        assert self.go_on[lane].wait(SOON_S)
        copy_pieces(target, source, pieces)

    def let_all_go(self) -> None:
        for event in self.go_on:
            event.set()


@pytest.mark.parametrize("lane", range(THREADS))
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_write_beside_a_read_of_all_buffers(backend: str, lane: int, slab: FileSlab) -> None:
    copies, held = HeldCopies(), content(slab)
    with engine_pair(backend) as (a, b):
        # Memory that the peer cannot map: it is written by way of a buffer.
        target = a.register(torch.zeros(READ_BYTES, dtype=torch.uint8))
        source = a.register(torch.randint(0, 256, (BUFFER_BYTES,), dtype=torch.uint8))
        key = offer(b, b.register(slab), a)
        asked = a._staging._asking._open
        try:
            read = a.read(b.name, target, key, 0, 0, READ_BYTES, copy=copies)
            eventually(lambda: len(copies.held) == THREADS, "all threads have a full buffer")
            # The first of each is answered and waited for no more.
            eventually(
                lambda: (
                    len(asked) == THREADS * (BUFFERS - 1)
                    and all(one.answered.is_set() for one in list(asked.values()))
                ),
                "all buffers are full",
            )
            copies.go_on[lane].set()  # this thread is the only one that can take the write
            a.write(b.name, source, key, 0, READ_BYTES, BUFFER_BYTES).wait(SOON_S)
            assert not read.done(), "they were not under way at once"
        finally:
            copies.let_all_go()
        read.wait(SOON_S)
        assert np.array_equal(target.array, held[:READ_BYTES])
        assert np.array_equal(content(slab)[READ_BYTES:], source.array)


class Owner(threading.Thread):
    """Writes and reads an area of a peer's slab that nobody else touches; pieces of any size."""

    def __init__(self, engine: TransferEngine, peer: str, key: RegionKey, start: int) -> None:
        super().__init__(daemon=True)
        self._engine, self._peer, self._key, self._start = engine, peer, key, start
        self._random = np.random.default_rng()
        self.expected = np.zeros(AREA_BYTES, dtype=np.uint8)
        self.wrong = self.num_writes = self.num_reads = 0
        self.ended = False

    def run(self) -> None:
        engine = self._engine
        region = engine.register(torch.zeros(AREA_BYTES, dtype=torch.uint8))
        for number in range(ROUNDS):
            count, nbytes = self._random.choice([1, 3, 30]), self._random.integers(1, 50_000)
            rows = self._random.permutation(AREA_BYTES // nbytes)[:count]
            there, here = rows * nbytes, np.arange(len(rows)) * nbytes
            window, total = there + self._start, len(rows) * nbytes
            places = (there[:, None] + np.arange(nbytes)).reshape(-1)
            if number and self._random.random() < 0.5:
                engine.read(self._peer, region, self._key, here, window, nbytes).wait(SOON_S)
                self.num_reads += 1
                self.wrong += int((region.array[:total] != self.expected[places]).sum())
            else:
                region.array[:total] = self._random.integers(0, 256, total, dtype=np.uint8)
                engine.write(self._peer, region, self._key, here, window, nbytes).wait(SOON_S)
                self.num_writes += 1
                self.expected[places] = region.array[:total]
        self.ended = True


@pytest.mark.parametrize("backend", BACKENDS)
def test_neighbours_that_read_and_write_at_once(backend: str, slab: FileSlab) -> None:
    count = THREADS
    nothing = torch.zeros(count * AREA_BYTES, dtype=torch.uint8)
    slab.write(nothing, 0, 0, len(nothing))
    with engine_pair(backend) as (a, b):
        key = offer(b, b.register(slab), a)
        owners = [Owner(a, b.name, key, i * AREA_BYTES) for i in range(count)]
        for owner in owners:
            owner.start()
        for owner in owners:
            owner.join(2 * SOON_S)
    assert all(owner.ended and owner.num_reads and owner.num_writes for owner in owners)
    assert [owner.wrong for owner in owners] == [0] * count
    expected = np.concatenate([owner.expected for owner in owners])
    assert np.array_equal(content(slab)[: count * AREA_BYTES], expected)


def test_a_buffer_is_lent_to_one_at_a_time() -> None:
    bounces = Bounces(OfferTable("somebody"))
    with bounces.borrow(1, "peer") as first:
        with bounces.borrow(1, "peer", 1) as second, bounces.borrow(2, "peer") as third:
            assert len({id(one) for one in (first, second, third)}) == 3
        with pytest.raises(AssertionError, match="has a user"), bounces.borrow(1, "peer"):
            pass
    with bounces.borrow(1, "peer") as again:
        assert again is first
    with pytest.raises(OSError, match="broken"), bounces.borrow(1, "peer"):
        raise OSError("broken")
    with bounces.borrow(1, "peer") as fresh:
        assert fresh is not first
    bounces.close()
    assert not bounces._buffers
