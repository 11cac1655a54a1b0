"""Files of a same-host peer: what is read is copied by whoever asks, what is written by nobody."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.schema import FileConfig
from tests.support.disk_calls import replace
from tests.support.engines import BACKENDS, engine_pair, new_engine, offer
from tests.support.waits import eventually
from transfer import Memory, PeerLost, StorageFailed, TransferTimeout, allocate
from transfer.backends import file_work
from transfer.backends.file import FileSlab
from transfer.pieces import Pieces, copy_pieces
from transfer.storage.bounce import BUFFER_BYTES
from transfer.storage.messages import ASK_BYTES_MAX

NBYTES = 20 << 20
SOON_S = 60.0


@pytest.fixture
def slab(tmp_path: Path) -> Iterator[FileSlab]:
    with FileSlab(tmp_path / "slab", NBYTES, FileConfig(threads=2)) as slab:
        yield slab


def content(slab: FileSlab) -> torch.Tensor:
    found = torch.zeros(NBYTES, dtype=torch.uint8)
    slab.read(found, 0, 0, NBYTES)
    return found


@pytest.fixture
def shared() -> Iterator[Callable[[int], Memory]]:
    """Makes memory that the other engine can map."""
    with ExitStack() as stack:

        def make(nbytes: int) -> Memory:
            memory = allocate(nbytes)
            stack.callback(memory.close)
            return memory

        yield make


Shared = Callable[[int], Memory]


class Copies:
    """Copies as told, and remembers which pieces."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, int]] = []
        self.threads: set[int] = set()

    def __call__(self, target: np.ndarray, source: np.ndarray, pieces: Pieces) -> None:
        copy_pieces(target, source, pieces)
        places = zip(pieces.target_offsets.tolist(), pieces.lengths.tolist(), strict=True)
        self.pieces += places
        self.threads.add(threading.get_ident())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("nbytes", [1 << 20, 777_777, BUFFER_BYTES + 5000])
def test_a_reader_copies_out_of_the_buffers_itself(
    backend: str, nbytes: int, slab: FileSlab, shared: Shared
) -> None:
    slab.write(torch.randint(0, 256, (NBYTES,), dtype=torch.uint8), 0, 0, NBYTES)
    count = NBYTES // nbytes
    sources = np.random.default_rng().permutation(count) * nbytes
    targets, copies = np.arange(count) * nbytes, Copies()
    with engine_pair(backend) as (a, b):
        region = a.register(shared(count * nbytes))
        key = offer(b, b.register(slab), a)
        a.read(b.name, region, key, targets, sources, nbytes, copy=copies).wait(SOON_S)
        held = content(slab)
        for target, source in zip(targets, sources, strict=True):
            found = region.tensor[target : target + nbytes]
            assert torch.equal(found, held[source : source + nbytes])
    if nbytes <= BUFFER_BYTES:
        assert sorted(copies.pieces) == [(target, nbytes) for target in targets]
    else:
        assert sum(length for _, length in copies.pieces) == count * nbytes
    assert threading.get_ident() not in copies.threads


def test_own_files_are_not_copied(slab: FileSlab, shared: Shared) -> None:
    copies = Copies()
    with new_engine() as engine:
        region = engine.register(shared(NBYTES))
        key = offer(engine, engine.register(slab), engine)
        engine.read(engine.name, region, key, 0, 0, [NBYTES], copy=copies).wait(SOON_S)
    assert not copies.pieces


def test_shared_memory_is_written_from_where_it_lies(slab: FileSlab, shared: Shared) -> None:
    with engine_pair("shared_memory") as (a, b):
        region = a.register(shared(NBYTES))
        region.tensor.random_()
        key = offer(b, b.register(slab), a)
        lengths = np.array([1 << 20, ASK_BYTES_MAX + 5000, 777, 1 << 16])
        ends = np.cumsum(lengths)
        targets = ends[-1] - ends
        offers = len(a._offers)
        a.write(b.name, region, key, ends - lengths, targets, lengths, immediate=3).wait(SOON_S)
        b.expect({(a.name, 3): 1}, timeout_s=SOON_S)
        held = content(slab)
        for source, target, length in zip(ends - lengths, targets, lengths, strict=True):
            expected = region.tensor[source : source + length]
            assert torch.equal(held[target : target + length], expected)
        assert not a._staging._bounces._buffers, "a buffer was used"
        assert len(a._offers) == offers + 1
        region.tensor.random_()
        a.write(b.name, region, key, 0, 0, NBYTES).wait(SOON_S)
        assert torch.equal(content(slab), region.tensor)
        assert len(a._offers) == offers + 1, "offered twice"


def test_what_is_released_is_offered_no_more(slab: FileSlab, shared: Shared) -> None:
    with engine_pair("shared_memory") as (a, b):
        key = offer(b, b.register(slab), a)
        memory = shared(1 << 20)
        region = a.register(memory)
        windows = b._table.ready(a.name).windows._windows
        before = len(a._offers), len(windows)
        for _ in range(2):
            a.write(b.name, region, key, 0, 0, 1 << 20).wait(SOON_S)
            assert len(a._offers) == before[0] + 1
            assert len(windows) == before[1] + 1
            assert a.release(region)
            assert len(a._offers) == before[0]
            eventually(lambda: len(windows) == before[1], "the peer forgets the window")
        a.write(b.name, region, key, 0, 0, 1 << 20).wait(SOON_S)
        assert len(a._offers) == before[0] + 1
        del region
        gc.collect()
        eventually(lambda: len(a._offers) == before[0], "the region is gone")
        eventually(lambda: len(windows) == before[1], "the peer forgets the window")


def test_a_lost_peer_is_offered_nothing(slab: FileSlab, shared: Shared) -> None:
    with engine_pair("shared_memory") as (a, b):
        region = a.register(shared(1 << 20))
        a.write(b.name, region, offer(b, b.register(slab), a), 0, 0, 1 << 20).wait(SOON_S)
        assert len(a._offers) == 1
        b.close()
        eventually(lambda: not len(a._offers), "the loss is noticed")
        with pytest.raises(PeerLost):
            a._table.ready(b.name)


def test_a_closed_memory_goes_by_way_of_buffers(slab: FileSlab, shared: Shared) -> None:
    with engine_pair("shared_memory") as (a, b):
        memory = shared(1 << 20)
        region = a.register(memory)
        region.tensor.random_()
        memory.close()
        a.write(b.name, region, offer(b, b.register(slab), a), 0, 0, 1 << 20).wait(SOON_S)
        assert torch.equal(content(slab)[: 1 << 20], region.tensor)
        assert a._staging._bounces._buffers


@pytest.mark.parametrize("write", [True, False])
def test_the_owner_tells_when_its_disk_fails_halfway(
    write: bool, slab: FileSlab, shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def failing(*arguments: object) -> None:
        calls.append(arguments)
        if len(calls) > 3:
            raise StorageFailed("the slab", "moved", "Input/output error")

    replace(monkeypatch, failing, writes=write)
    with engine_pair("shared_memory") as (a, b):
        region = a.register(shared(NBYTES))
        key = offer(b, b.register(slab), a)
        move = a.write if write else a.read
        transfer = move(b.name, region, key, 0, 0, NBYTES)
        with pytest.raises(StorageFailed, match="Input/output"):
            transfer.wait(SOON_S)
        assert len(calls) > 3
        service = b._staging._service
        eventually(lambda: not service._used, "nothing is under way")
        eventually(lambda: slab._queue is not None and not slab._queue.num_alive, "it is idle")


def test_a_full_queue_of_the_owner_is_asked_again(
    tmp_path: Path, shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang, entered, read_fully = threading.Event(), threading.Event(), file_work.read_fully

    def hanging(*arguments: object) -> None:
        entered.set()
        assert hang.wait(SOON_S)
        read_fully(*arguments)  # type: ignore[arg-type]

    config = FileConfig(threads=1, queued_max=1)
    with (
        FileSlab(tmp_path / "slab", NBYTES, config) as slab,
        engine_pair("shared_memory") as (a, b),
    ):
        slab.write(torch.randint(0, 256, (NBYTES,), dtype=torch.uint8), 0, 0, NBYTES)
        region, key = a.register(shared(NBYTES)), offer(b, b.register(slab), a)
        a.read(b.name, region, key, 0, 0, 4096).wait(SOON_S)  # from here on buffers are mapped
        replace(monkeypatch, hanging, writes=False)
        transfers = [a.read(b.name, region, key, i << 20, i << 20, 1 << 20) for i in range(4)]
        assert entered.wait(SOON_S)
        short = a.read(b.name, region, key, 10 << 20, 10 << 20, 4096, timeout_s=0.1)
        with pytest.raises(TransferTimeout):
            short.wait(SOON_S)
        hang.set()
        for transfer in transfers:
            transfer.wait(SOON_S)
        assert torch.equal(region.tensor[: 4 << 20], content(slab)[: 4 << 20])
        assert not b._staging._service._used
