"""Engines in real processes: all-to-all writes, simultaneous calls, and forks."""

from __future__ import annotations

import multiprocessing
import os
import time
from typing import Any

import pytest
import torch

from tests.support.engines import BACKENDS, new_engine, offer
from tests.support.ranks import Board, run_ranks
from transfer import Access, RegionKey, TransferEngine, allocate

SOON_S = 60.0
both_backends = pytest.mark.parametrize("backend", BACKENDS)


def name_of(rank: int) -> str:
    return f"{rank:016x}"


def meet(board: Board, engine: TransferEngine) -> None:
    """Everybody calls everybody, all at once."""
    for rank, address in board.exchange("address", engine.address).items():
        if rank != board.rank:
            assert engine.connect(address, timeout_s=SOON_S).name == name_of(rank)
    board.exchange("connected", None)


def all_to_all(board: Board, backend: str, rounds: int, nbytes: int) -> dict[str, Any]:
    """Each rank writes a pattern into its window at every other rank, round by round."""
    others = [rank for rank in range(board.world_size) if rank != board.rank]
    with new_engine(backend, name=name_of(board.rank)) as engine:
        meet(board, engine)
        memory, message = allocate(nbytes * board.world_size), allocate(nbytes)
        region, source = engine.register(memory), engine.register(message)
        offers = {
            rank: engine.offer(region, to=name_of(rank), access=Access.WRITE,
                               offset=rank * nbytes, nbytes=nbytes).encode()
            for rank in others
        }  # fmt: skip
        keys = {rank: RegionKey.decode(sent[board.rank])
                for rank, sent in board.exchange("offers", offers).items()
                if rank != board.rank}  # fmt: skip
        for i in range(rounds):
            message.tensor.fill_((board.rank * 16 + i) % 251)
            for rank in others:
                engine.write(name_of(rank), source, keys[rank], 0, 0, nbytes, immediate=i).wait()
            engine.expect({(name_of(rank), i): 1 for rank in others}, timeout_s=SOON_S)
            for rank in others:
                got = memory.tensor[rank * nbytes : (rank + 1) * nbytes]
                # A fast peer may be one round ahead of us, never two: it waits for our write.
                allowed = {(rank * 16 + i) % 251, (rank * 16 + i + 1) % 251}
                assert set(got.unique().tolist()) <= allowed, (i, rank)
        statistics = engine.statistics()
        board.exchange("done", None)
    return {"received": statistics.immediates_received, "peers": statistics.peers}


@both_backends
def test_three_processes_all_to_all(backend: str) -> None:
    results = run_ranks(3, all_to_all, str(backend), 20, 100_000, timeout_s=180)
    assert [result["received"] for result in results] == [40] * 3
    assert [result["peers"] for result in results] == [2] * 3


def call_each_other(board: Board, backend: str, times: int) -> int:
    """Both sides call at the same moment, with fresh engines each time."""
    other = 1 - board.rank
    for i in range(times):
        with new_engine(backend, name=f"{board.rank}-{i}") as engine:
            address = board.exchange(f"address-{i}", engine.address)[other]
            peer = engine.connect(address, timeout_s=SOON_S)
            assert peer.name == f"{other}-{i}"
            assert len(engine.peers()) == 1
            board.exchange(f"met-{i}", None)
            # Whatever calls were dropped, the one that stands carries traffic both ways.
            region = engine.register(allocate(64))
            key = offer_by_name(engine, region, peer.name)
            theirs = RegionKey.decode(board.exchange(f"key-{i}", key.encode())[other])
            engine.write(peer, region, theirs, 0, 0, 64, immediate=1).wait(SOON_S)
            engine.expect({(peer.name, 1): 1}, timeout_s=SOON_S)
            board.exchange(f"end-{i}", None)
    return times


def offer_by_name(engine: TransferEngine, region: Any, name: str) -> RegionKey:
    return engine.offer(region, to=name, access=Access.READ | Access.WRITE)


@both_backends
def test_simultaneous_calls_converge(backend: str) -> None:
    assert run_ranks(2, call_each_other, str(backend), 15, timeout_s=180) == [15, 15]


def write_to_a_rank_that_sleeps(board: Board, backend: str) -> float:
    """One-sided: the target's thread of Python does nothing meanwhile."""
    with new_engine(backend, name=name_of(board.rank)) as engine:
        meet(board, engine)
        other = name_of(1 - board.rank)
        nbytes = 8 << 20
        region = engine.register(allocate(nbytes))
        key = offer_by_name(engine, region, other)
        theirs = RegionKey.decode(board.exchange("key", key.encode())[1 - board.rank])
        if board.rank == 0:
            region.tensor.random_()
            # Many more immediates than a socket's buffer holds, and nobody waits for them.
            for _ in range(2000):
                engine.write(other, region, theirs, 0, 0, 64, immediate=7).wait(SOON_S)
            engine.write(other, region, theirs, 0, 0, nbytes, immediate=8).wait(SOON_S)
            board.post("sum", int(region.tensor.long().sum()))
            board.exchange("done", None)
        else:
            total = board.read("sum")
            engine.expect({(other, 7): 2000, (other, 8): 1}, timeout_s=SOON_S)
            assert int(region.tensor.long().sum()) == total
            board.exchange("done", None)
    return 0.0


@both_backends
def test_nobody_has_to_wait_for_immediates(backend: str) -> None:
    run_ranks(2, write_to_a_rank_that_sleeps, str(backend), timeout_s=180)


def die_with_a_forked_child(board: Board, backend: str) -> str:
    """Rank 1 forks a child that lives on, and is killed: rank 0 must notice all the same."""
    lost: list[str] = []
    engine = new_engine(backend, name=name_of(board.rank))
    engine.on_peer_lost(lambda name, evidence: lost.append(evidence))
    with engine:
        meet(board, engine)
        if board.rank == 1:
            child = os.fork()
            if child == 0:
                time.sleep(SOON_S)
                os._exit(0)
            board.post("child", child)
            time.sleep(0.2)
            os._exit(17)
        child = board.read("child")
        deadline = time.monotonic() + SOON_S / 2
        while not lost and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(child, 9)
    return lost[0] if lost else ""


@both_backends
def test_a_fork_does_not_hide_a_death(backend: str) -> None:
    evidence = run_ranks(2, die_with_a_forked_child, str(backend), exits={1: 17})[0]
    assert evidence


def use_in_child(engine: TransferEngine, pipe: Any) -> None:
    try:
        engine.connect("127.0.0.1:1")
    except Exception as error:  # noqa: BLE001 - its name is what the test looks at
        pipe.send(type(error).__name__)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_an_engine_does_not_work_in_a_forked_child() -> None:
    with new_engine() as engine, new_engine() as other:
        engine.connect(other.address)
        reader, writer = multiprocessing.Pipe(duplex=False)
        context = multiprocessing.get_context("fork")
        child = context.Process(target=use_in_child, args=(engine, writer))
        child.start()
        assert reader.poll(SOON_S)
        assert reader.recv() == "EngineClosed"
        child.join(SOON_S)
        assert child.exitcode == 0
        child.close()
        reader.close()
        writer.close()
        assert engine.peer(other.name).alive, "the parent's connections stand"
        source, target = engine.register(torch.ones(8).byte()), other.register(allocate(8))
        engine.write(other.name, source, offer(other, target, engine), 0, 0, 8).wait(SOON_S)
        assert target.tensor.tolist() == [1] * 8
