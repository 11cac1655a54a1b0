"""Regions of files through the ordinary calls: own files, peers' memory, peers' files."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.schema import FileConfig
from tests.support.disk_calls import replace
from tests.support.engines import (
    BACKENDS,
    BOTH,
    engine_pair,
    new_engine,
    offer,
    open_descriptors,
)
from tests.support.waits import eventually
from transfer import (
    Access,
    AccessRefused,
    PeerLost,
    RegionUnknown,
    StorageFailed,
    TransferTimeout,
    allocate,
)
from transfer.backends.file import FileSlab

NBYTES = (9 << 20) + 777
SMALL = FileConfig(threads=2, io_bytes=1 << 17)
SOON_S = 60.0
both_backends = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture
def slabs(tmp_path: Path) -> Iterator[list[FileSlab]]:
    with (
        FileSlab(tmp_path / "first", NBYTES, SMALL) as first,
        FileSlab(tmp_path / "second", NBYTES, SMALL) as second,
    ):
        yield [first, second]


def random_bytes() -> torch.Tensor:
    return torch.randint(0, 256, (NBYTES,), dtype=torch.uint8)


def content(slab: FileSlab) -> torch.Tensor:
    found = torch.zeros(NBYTES, dtype=torch.uint8)
    slab.read(found, 0, 0, NBYTES)
    return found


def pieces() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scattered, disjoint, in another order at either side."""
    rng = np.random.default_rng()
    marks = np.unique(rng.integers(0, NBYTES - 1, size=500))
    lengths = np.diff(marks)
    order = rng.permutation(len(lengths))
    starts, lengths = marks[:-1][order], lengths[order]
    return np.cumsum(lengths) - lengths, starts, lengths


def moved(source: torch.Tensor, target: torch.Tensor, plan: tuple[np.ndarray, ...]) -> torch.Tensor:
    expected = target.clone()
    for s, t, n in zip(*plan, strict=True):
        expected[t : t + n] = source[s : s + n]
    return expected


def test_own_files(slabs: list[FileSlab]) -> None:
    data, back, plan = random_bytes(), torch.zeros(NBYTES, dtype=torch.uint8), pieces()
    with new_engine() as engine:
        memory, target = engine.register(data), engine.register(back)
        first, second = map(engine.register, slabs)
        assert (first.kind, first.nbytes, first.shareable) == ("file", NBYTES, False)
        keys = [offer(engine, region, engine) for region in (first, second)]
        assert keys[0].kind == "file"
        write = engine.write(engine.name, memory, keys[0], *plan, immediate=7)
        write.wait(SOON_S)
        assert (write.backend, write.bytes_moved) == ("file", int(plan[2].sum()))
        engine.expect({(engine.name, 7): 1}, timeout_s=SOON_S)
        assert engine.statistics().backends["local"].bytes_written == int(plan[2].sum())
        held = content(slabs[0])
        assert torch.equal(held, moved(data, torch.zeros_like(held), plan))
        engine.write(engine.name, first, keys[1], 0, 0, NBYTES).wait(SOON_S)
        assert torch.equal(content(slabs[1]), held)
        engine.read(engine.name, target, keys[1], 0, 0, NBYTES).wait(SOON_S)
        assert torch.equal(back, held)
        engine.read(engine.name, first, offer(engine, memory, engine), 0, 0, NBYTES).wait(SOON_S)
        assert torch.equal(content(slabs[0]), data)


def test_a_window_of_a_file(slabs: list[FileSlab]) -> None:
    with new_engine() as engine:
        memory, file = engine.register(random_bytes()), engine.register(slabs[0])
        key = offer(engine, file, engine, offset=5000, nbytes=100)
        engine.write(engine.name, memory, key, 0, 10, 90).wait(SOON_S)
        held = content(slabs[0])
        assert torch.equal(held[5010:5100], memory.tensor[:90])
        assert not held[:5010].any()
        assert not held[5100:].any()
        with pytest.raises(AccessRefused):
            engine.write(engine.name, memory, key, 0, 11, 90)
        with pytest.raises(ValueError, match="own region"):
            engine.write(engine.name, file, key, NBYTES, 0, 1)
        reading = offer(engine, file, engine, Access.READ)
        with pytest.raises(AccessRefused, match="right to WRITE"):
            engine.write(engine.name, memory, reading, 0, 0, 1)
        engine.withdraw(key)
        with pytest.raises(RegionUnknown):
            engine.read(engine.name, memory, key, 0, 0, 1)


def test_a_file_region_is_never_taken_for_memory(slabs: list[FileSlab]) -> None:
    with new_engine() as engine:
        region = engine.register(slabs[0])
        for name in ("array", "start", "tensor"):
            with pytest.raises(AttributeError, match="file memory"):
                getattr(region, name)


@both_backends
@pytest.mark.parametrize("shareable", [True, False], ids=["memory", "tensor"])
def test_own_file_and_memory_of_a_peer(
    backend: str, shareable: bool, slabs: list[FileSlab]
) -> None:
    plan = pieces()
    with engine_pair(backend) as (a, b):
        data = random_bytes()
        slabs[0].write(data, 0, 0, NBYTES)
        file = a.register(slabs[0])
        theirs = b.register(allocate(NBYTES) if shareable else torch.zeros_like(data))
        key = offer(b, theirs, a)
        a.write(b.name, file, key, *plan, immediate=3).wait(SOON_S)
        b.expect({(a.name, 3): 1}, timeout_s=SOON_S)
        assert torch.equal(theirs.tensor, moved(data, torch.zeros_like(data), plan))
        theirs.tensor.random_()
        before = content(slabs[0])
        a.read(b.name, file, key, plan[1], plan[0], plan[2]).wait(SOON_S)
        assert torch.equal(content(slabs[0]), moved(theirs.tensor, before, plan))
        a.write(b.name, file, key, 0, 0, 0, immediate=4).wait(SOON_S)
        b.expect({(a.name, 4): 1}, timeout_s=SOON_S)


@both_backends
def test_files_of_a_peer(backend: str, slabs: list[FileSlab]) -> None:
    data, back, plan = random_bytes(), torch.zeros(NBYTES, dtype=torch.uint8), pieces()
    with engine_pair(backend) as (a, b):
        memory, target, mine = a.register(data), a.register(back), a.register(slabs[0])
        key = offer(b, b.register(slabs[1]), a)
        a.write(b.name, memory, key, *plan, immediate=9).wait(SOON_S)
        b.expect({(a.name, 9): 1}, timeout_s=SOON_S)
        held = content(slabs[1])
        assert torch.equal(held, moved(data, torch.zeros_like(data), plan))
        a.read(b.name, target, key, 0, 0, NBYTES).wait(SOON_S)
        assert torch.equal(back, held)
        a.read(b.name, mine, key, 0, 0, NBYTES).wait(SOON_S)
        assert torch.equal(content(slabs[0]), held)
        slabs[0].write(data, 0, 0, NBYTES)
        a.write(b.name, mine, key, 0, 0, NBYTES).wait(SOON_S)
        assert torch.equal(content(slabs[1]), data)
        a.write(b.name, memory, key, 0, 0, 0, immediate=10).wait(SOON_S)
        b.expect({(a.name, 10): 1}, timeout_s=SOON_S)


@both_backends
def test_the_way_is_explained(backend: str, slabs: list[FileSlab]) -> None:
    with engine_pair(backend) as (a, b):
        mine, key = a.register(slabs[0]), offer(b, b.register(slabs[1]), a)
        assert a.explain(b.name, mine).backend == a.explain(b.name, key).backend == "file"
        assert "only the owner" in str(a.explain(b.name, key))


@both_backends
def test_both_ask_each_other_at_once(backend: str, slabs: list[FileSlab]) -> None:
    with engine_pair(backend) as (a, b):
        keys = [offer(b, b.register(slabs[1]), a), offer(a, a.register(slabs[0]), b)]
        regions = [engine.register(random_bytes()) for engine in (a, b)]
        transfers = [
            engine.write(peer.name, region, key, start, start, 100_000)
            for start in range(0, 3_000_000, 100_000)
            for engine, peer, region, key in (
                (a, b, regions[0], keys[0]),
                (b, a, regions[1], keys[1]),
            )
        ]
        for transfer in transfers:
            transfer.wait(SOON_S)
        for slab, region in zip(slabs, reversed(regions), strict=True):
            assert torch.equal(content(slab)[:3_000_000], region.tensor[:3_000_000])


@both_backends
def test_a_peers_rights_to_a_file(backend: str, slabs: list[FileSlab]) -> None:
    with engine_pair(backend) as (a, b), new_engine(backend) as c:
        c.connect(b.address)
        memory, file = a.register(random_bytes()), b.register(slabs[0])
        key, reading = offer(b, file, a, nbytes=1000), offer(b, file, a, Access.READ)
        larger = type(key)(b.name, key.token, 2000, 3, key.shareable, key.kind)
        with pytest.raises(AccessRefused, match="outside"):
            a.write(b.name, memory, larger, 0, 0, 2000, immediate=1).wait(SOON_S)
        forged = type(key)(b.name, reading.token, reading.nbytes, 3, False, key.kind)
        with pytest.raises(AccessRefused, match="right to"):
            a.write(b.name, memory, forged, 0, 0, 10, immediate=1).wait(SOON_S)
        host = type(key)(b.name, key.token, key.nbytes, 3, False, "host")
        with pytest.raises(AccessRefused):
            a.write(b.name, memory, host, 0, 0, 10, immediate=1).wait(SOON_S)
        stranger = c.register(random_bytes())
        with pytest.raises(RegionUnknown):
            c.read(b.name, stranger, key, 0, 0, 10).wait(SOON_S)
        assert not content(slabs[0]).any()
        b.withdraw(key)
        with pytest.raises(RegionUnknown):
            a.write(b.name, memory, key, 0, 0, 10, immediate=1).wait(SOON_S)
        with pytest.raises(RegionUnknown):
            a.write(b.name, memory, key, 0, 0, 0, immediate=1).wait(SOON_S)
        assert not content(slabs[0]).any()
        assert not b.arrived({(a.name, 1): 1})


@both_backends
def test_failures_of_the_owners_file_are_told(backend: str, slabs: list[FileSlab]) -> None:
    with engine_pair(backend) as (a, b):
        memory = a.register(random_bytes())
        key = offer(b, b.register(slabs[0]), a)
        slabs[0].close()
        with pytest.raises(StorageFailed, match="not open"):
            a.read(b.name, memory, key, 0, 0, 10).wait(SOON_S)
        with pytest.raises(StorageFailed, match="not open"):
            a.write(b.name, memory, key, 0, 0, 10, immediate=1).wait(SOON_S)
        assert not b.arrived({(a.name, 1): 1})


@both_backends
def test_a_peer_that_goes_away_meanwhile(
    backend: str, slabs: list[FileSlab], monkeypatch: pytest.MonkeyPatch
) -> None:
    hang, entered = threading.Event(), threading.Event()

    def hanging(*arguments: object) -> None:
        entered.set()
        hang.wait(SOON_S)

    with engine_pair(backend) as (a, b):
        memory = a.register(random_bytes())
        key = offer(b, b.register(slabs[0]), a)
        replace(monkeypatch, hanging, writes=False)
        transfer = a.read(b.name, memory, key, 0, 0, NBYTES)
        try:
            assert entered.wait(SOON_S)
            a.disconnect(b.name, reason="it is slow")
            with pytest.raises(PeerLost):
                transfer.wait(SOON_S)
        finally:
            hang.set()


def test_a_hanging_disk_ends_at_the_deadline_for_all_who_wait(
    slabs: list[FileSlab], monkeypatch: pytest.MonkeyPatch
) -> None:
    hang = threading.Event()
    replace(monkeypatch, lambda *arguments: hang.wait(SOON_S), writes=False)
    told = threading.Event()
    with new_engine() as engine:
        memory = engine.register(random_bytes())
        key = offer(engine, engine.register(slabs[0]), engine)
        try:
            transfer = engine.read(engine.name, memory, key, 0, 0, 4096, timeout_s=0.05)
            transfer.when_done(told.set)

            async def awaited() -> None:
                with pytest.raises(TransferTimeout):
                    await transfer

            asyncio.run(asyncio.wait_for(awaited(), SOON_S))
            assert told.is_set()
        finally:
            hang.set()
            monkeypatch.undo()


@both_backends
def test_nothing_is_left(backend: str, slabs: list[FileSlab]) -> None:
    def life() -> None:
        with engine_pair(backend) as (a, b):
            memory, key = a.register(random_bytes()), offer(b, b.register(slabs[0]), a)
            a.write(b.name, memory, key, 0, 0, NBYTES).wait(SOON_S)

    life()  # what is made once per process is made here
    gc.collect()  # a closed engine is a cycle: its last views of buffers go with it
    before, threads = open_descriptors(), threading.active_count()
    for _ in range(5):
        life()
    gc.collect()
    eventually(lambda: open_descriptors() <= before, "descriptors are closed")
    eventually(lambda: threading.active_count() <= threads, "threads have ended")


def test_an_engine_without_storages_has_no_threads_for_them() -> None:
    with new_engine() as engine:
        memory = engine.register(allocate(64))
        engine.write(engine.name, memory, offer(engine, memory, engine, BOTH), 0, 32, 8).wait()
        assert not [t for t in threading.enumerate() if t.name.startswith("staging")]
