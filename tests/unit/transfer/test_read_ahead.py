"""Reads of a peer's file by way of buffers: more is asked for before one of them is copied."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.schema import FileConfig
from tests.support.disk_calls import replace
from tests.support.engines import engine_pair, offer
from tests.support.waits import eventually
from transfer import PeerLost, StorageFailed, TransferEngine
from transfer.backends import direct_io
from transfer.backends.file import FileSlab
from transfer.pieces import Pieces, copy_pieces
from transfer.storage.bounce import BUFFER_BYTES
from transfer.storage.messages import AskKind, parse_ask
from transfer.storage.read_ahead import BUFFERS, TURN_STEPS
from transfer.storage.service import StorageService
from transfer.storage.staging import THREADS

STEPS = 12
NBYTES = STEPS * BUFFER_BYTES
SOON_S = 60.0
BACKENDS = ("shared_memory", "tcp")


@pytest.fixture
def slab(tmp_path: Path) -> Iterator[FileSlab]:
    with FileSlab(tmp_path / "slab", NBYTES, FileConfig(threads=4)) as slab:
        slab.write(torch.randint(0, 256, (NBYTES,), dtype=torch.uint8), 0, 0, NBYTES)
        yield slab


def content(slab: FileSlab) -> np.ndarray:
    return np.fromfile(slab.path, dtype=np.uint8)[:NBYTES]


class Asks:
    """Reads that a peer has asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num = 0
        plain = StorageService.on_ask

        def on_ask(service: StorageService, link: object, data: bytes) -> None:
            self.num += parse_ask(data).kind is AskKind.READ
            plain(service, link, data)  # type: ignore[arg-type]

        monkeypatch.setattr(StorageService, "on_ask", on_ask)


def is_clean(engine: TransferEngine) -> bool:
    return not engine._staging._asking._open and not engine._staging.is_busy


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_is_asked_for_while_all_threads_copy(
    slab: FileSlab, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    asks, go_on = Asks(monkeypatch), threading.Event()

    def copy(target: np.ndarray, source: np.ndarray, pieces: Pieces) -> None:
        assert go_on.wait(SOON_S)
        copy_pieces(target, source, pieces)

    with engine_pair(backend) as (a, b):
        region = a.register(torch.zeros(NBYTES, dtype=torch.uint8))
        key = offer(b, b.register(slab), a)
        transfer = a.read(b.name, region, key, 0, 0, NBYTES, copy=copy)
        eventually(lambda: asks.num == BUFFERS * THREADS, "all buffers are asked for")
        go_on.set()
        transfer.wait(SOON_S)
        assert asks.num == STEPS
        assert np.array_equal(region.array, content(slab))
        assert is_clean(a)


def test_several_reads_take_turns(slab: FileSlab) -> None:
    with engine_pair("shared_memory") as (a, b):
        key = offer(b, b.register(slab), a)
        regions = [a.register(torch.zeros(NBYTES, dtype=torch.uint8)) for _ in range(6)]
        assert len(regions) > THREADS
        assert STEPS > TURN_STEPS
        # Pieces that are no multiples of anything, in no order.
        cuts = np.sort(np.random.default_rng().choice(np.arange(1, NBYTES), 40, replace=False))
        starts, ends = np.append(0, cuts), np.append(cuts, NBYTES)
        order = np.random.default_rng().permutation(len(starts))
        starts, lengths = starts[order], (ends - starts)[order]
        reads = [a.read(b.name, region, key, starts, starts, lengths) for region in regions]
        for read, region in zip(reads, regions, strict=True):
            read.wait(SOON_S)
            assert np.array_equal(region.array, content(slab))
        assert is_clean(a)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_that_fails_leaves_nothing_behind(
    slab: FileSlab, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    plain, failed = direct_io.read_fully, threading.Event()

    def read(fd: int, places: list[memoryview], low: int, *others: object) -> None:
        if low == 5 * BUFFER_BYTES and not failed.is_set():
            failed.set()
            raise StorageFailed("the slab", "read", "Input/output error")
        plain(fd, places, low, *others)  # type: ignore[arg-type]

    replace(monkeypatch, read, writes=False)
    with engine_pair(backend) as (a, b):
        region = a.register(torch.zeros(NBYTES, dtype=torch.uint8))
        key = offer(b, b.register(slab), a)
        with pytest.raises(StorageFailed, match="Input/output error"):
            a.read(b.name, region, key, 0, 0, NBYTES).wait(SOON_S)
        assert failed.is_set()
        eventually(lambda: is_clean(a), "nobody waits for an answer")
        a.read(b.name, region, key, 0, 0, NBYTES).wait(SOON_S)
        assert np.array_equal(region.array, content(slab))
        assert len(a._staging._bounces._buffers) <= BUFFERS * THREADS


def test_a_peer_that_is_lost_meanwhile(slab: FileSlab, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, go_on = threading.Event(), threading.Event()
    plain: Callable[..., None] = direct_io.read_fully

    def read(*arguments: object) -> None:
        entered.set()
        assert go_on.wait(SOON_S)
        plain(*arguments)

    replace(monkeypatch, read, writes=False)
    with engine_pair("shared_memory") as (a, b):
        region = a.register(torch.zeros(NBYTES, dtype=torch.uint8))
        key = offer(b, b.register(slab), a)
        try:
            transfer = a.read(b.name, region, key, 0, 0, NBYTES)
            assert entered.wait(SOON_S)
            a.disconnect(b.name, reason="fenced")
            with pytest.raises(PeerLost):
                transfer.wait(SOON_S)
            eventually(lambda: is_clean(a), "nobody waits for an answer")
            assert not a._staging._bounces._buffers, "what may be written to is used no more"
        finally:
            go_on.set()
