"""Peers are killed, stopped and woken in the middle of it."""

from __future__ import annotations

import gc
import os
import signal
import time
from typing import Any

import pytest
import torch

from tests.support.engines import BACKENDS, new_engine, open_descriptors
from tests.support.ranks import Board, run_ranks
from tests.support.waits import eventually
from transfer import (
    Access,
    ImmediateTimeout,
    PeerLost,
    RegionKey,
    TransferEngine,
    TransferError,
    TransferTimeout,
    allocate,
)

SOON_S = 60.0
both_backends = pytest.mark.parametrize("backend", BACKENDS)


def name_of(rank: int) -> str:
    return f"{rank:016x}"


class Station:
    """One rank of these tests: an engine, a window for each other rank, and what was lost."""

    def __init__(self, board: Board, backend: str, nbytes: int, **options: Any) -> None:
        self.board = board
        self.lost: list[tuple[str, str]] = []
        self.engine: TransferEngine = new_engine(backend, name=name_of(board.rank), **options)
        self.engine.on_peer_lost(lambda name, evidence: self.lost.append((name, evidence)))
        self.engine.open()
        self.others = [rank for rank in range(board.world_size) if rank != board.rank]
        for rank, address in board.exchange("address", self.engine.address).items():
            if rank < board.rank:
                self.engine.connect(address)
        board.exchange("connected", None)
        self.memories = {rank: allocate(nbytes) for rank in self.others}
        self.regions = {rank: self.engine.register(m) for rank, m in self.memories.items()}
        offers = {
            rank: self.engine.offer(region, to=name_of(rank), access=Access.WRITE).encode()
            for rank, region in self.regions.items()
        }
        self.keys = {
            rank: RegionKey.decode(sent[board.rank])
            for rank, sent in board.exchange("offers", offers).items()
            if rank != board.rank
        }
        self.source = self.engine.register(allocate(nbytes))
        # Map everything now: a stopped peer could not answer later.
        for rank in self.others:
            self.write(rank, 1).wait(SOON_S)
        board.exchange("mapped", os.getpid())
        self.pids = {rank: board.read(f"mapped.{rank}") for rank in range(board.world_size)}

    def write(self, rank: int, nbytes: int, **options: Any) -> Any:
        key = self.keys[rank]
        return self.engine.write(name_of(rank), self.source, key, 0, 0, nbytes, **options)

    def await_loss(self) -> float:
        started = time.monotonic()
        while not self.lost:
            assert time.monotonic() < started + SOON_S, "on_peer_lost was not called"
            time.sleep(0.001)
        return time.monotonic() - started


def killed_in_mid_batch(board: Board, backend: str) -> float:
    """Rank 1 writes without end and is killed; rank 0 waits for more, and writes to it."""
    nbytes = 4 << 20
    station = Station(board, backend, nbytes)
    engine = station.engine
    if board.rank == 1:
        while True:
            station.write(0, nbytes, immediate=1)
    engine.expect({(name_of(1), 1): 3}, timeout_s=SOON_S)
    os.kill(station.pids[1], signal.SIGKILL)
    started = time.monotonic()

    def expect_more() -> None:
        while True:
            engine.expect({(name_of(1), 1): 1}, timeout_s=SOON_S)

    with pytest.raises(PeerLost) as caught:
        expect_more()
    elapsed = time.monotonic() - started
    assert caught.value.peer == name_of(1)
    station.await_loss()
    assert [name for name, _ in station.lost] == [name_of(1)]
    with pytest.raises(PeerLost):
        station.write(1, nbytes).wait(SOON_S)
    engine.close()
    return elapsed


@both_backends
def test_a_killed_writer_is_noticed_by_who_waits(backend: str) -> None:
    elapsed = run_ranks(2, killed_in_mid_batch, str(backend), exits={1: -9})[0]
    assert elapsed < SOON_S


def killed_target(board: Board, backend: str) -> list[str]:
    """Rank 1 is killed while rank 0 writes to it with several transfers under way."""
    nbytes = 16 << 20
    station = Station(board, backend, nbytes)
    if board.rank == 1:
        time.sleep(SOON_S)
    errors: list[str] = []
    transfers = []
    deadline = time.monotonic() + SOON_S
    while not errors and time.monotonic() < deadline:
        try:
            transfers += [station.write(1, nbytes, immediate=2) for _ in range(3)]
            if len(transfers) == 6:
                os.kill(station.pids[1], signal.SIGKILL)
            for transfer in transfers[-6:]:
                transfer.wait(SOON_S)
        except PeerLost as error:
            errors.append(error.evidence)
    station.await_loss()
    assert all(transfer.done() for transfer in transfers), "nothing is left open"
    station.engine.close()
    return errors


@both_backends
def test_writes_to_a_killed_peer_fail(backend: str) -> None:
    errors = run_ranks(2, killed_target, str(backend), exits={1: -9})[0]
    assert errors


def killed_with_nobody_waiting(board: Board, backend: str) -> float:
    station = Station(board, backend, 4096)
    if board.rank == 1:
        station.write(0, 4096, immediate=9).wait(SOON_S)
        station.write(2, 4096, immediate=9).wait(SOON_S)
        os.kill(os.getpid(), signal.SIGKILL)
    elapsed = station.await_loss()
    # What it had completed before its death still counts.
    station.engine.expect({(name_of(1), 9): 1}, timeout_s=SOON_S)
    # The others are not concerned.
    other = 2 - board.rank
    station.write(other, 4096, immediate=4).wait(SOON_S)
    station.engine.expect({(name_of(other), 4): 1}, timeout_s=SOON_S)
    board.exchange("end", None, [0, 2])
    station.engine.close()
    return elapsed


@both_backends
def test_a_death_is_told_though_nobody_waits(backend: str) -> None:
    results = run_ranks(3, killed_with_nobody_waiting, str(backend), exits={1: -9})
    assert max(results[0], results[2]) < SOON_S


def stopped_peer(board: Board, backend: str) -> list[str]:
    """Rank 1 is stopped: rank 0's writes end at their deadlines, none blocks for ever."""
    station = Station(board, backend, 1 << 20)
    if board.rank == 1:
        board.read("over", timeout_s=SOON_S)
        station.engine.close()
        return []
    os.kill(station.pids[1], signal.SIGSTOP)
    kinds: list[str] = []
    try:
        started = time.monotonic()
        while not kinds:
            assert time.monotonic() - started < SOON_S
            try:
                for transfer in [station.write(1, 65536, immediate=1, timeout_s=0.3)
                                 for _ in range(200)]:  # fmt: skip
                    transfer.wait()
            except TransferTimeout as error:
                kinds.append(f"{type(error).__name__} {error.peer}")
        with pytest.raises(ImmediateTimeout):
            station.engine.expect({(name_of(1), 5): 1}, timeout_s=0.2)
        started = time.monotonic()
        station.engine.disconnect(name_of(1), reason="it does not answer")
        assert time.monotonic() - started < SOON_S, "fencing does not wait for the peer"
    finally:
        os.kill(station.pids[1], signal.SIGCONT)
    board.post("over")
    station.engine.close()
    return kinds


@both_backends
def test_a_stopped_peer_blocks_nobody(backend: str) -> None:
    assert run_ranks(2, stopped_peer, str(backend))[0] == [f"TransferTimeout {name_of(1)}"]


def zombie(board: Board, backend: str) -> dict[str, Any]:
    """Rank 1 writes without end, is stopped, fenced, and wakes: nothing of it counts any more."""
    nbytes = 1 << 20
    station = Station(board, backend, nbytes)
    if board.rank == 1:
        station.source.tensor.fill_(66)
        refused = ""
        while not refused:
            try:
                station.write(0, nbytes, immediate=1, timeout_s=SOON_S).wait()
            except TransferError as error:
                refused = type(error).__name__
        station.await_loss()
        board.post("woken", refused)
        board.read("over")
        station.engine.close()
        return {"error": refused}
    name = name_of(1)
    station.engine.expect({(name, 1): 3}, timeout_s=SOON_S)
    os.kill(station.pids[1], signal.SIGSTOP)
    station.engine.disconnect(name, reason="stopped")
    # A fresh incarnation gets fresh memory; nobody reads the old window any more.
    fresh = allocate(nbytes)
    os.kill(station.pids[1], signal.SIGCONT)
    board.read("woken")
    with pytest.raises(PeerLost, match="stopped"):
        station.engine.expect({(name, 1): 1}, timeout_s=1.0)
    assert not fresh.tensor.any()
    assert station.lost == [], "who fences is not told of it"
    landed = station.memories[1].tensor.clone()
    time.sleep(0.1)
    quiet = torch.equal(landed, station.memories[1].tensor)
    board.post("over")
    station.engine.close()
    return {"quiet": quiet}


@both_backends
def test_a_fenced_zombie_harms_nobody(backend: str) -> None:
    results = run_ranks(2, zombie, str(backend))
    assert results[0] == {"quiet": True}
    assert results[1]["error"] == "PeerLost"


def descriptors_after_deaths(board: Board, backend: str) -> int:
    """The survivor frees what belonged to the dead."""
    before = open_descriptors()
    station = Station(board, backend, 1 << 20)
    if board.rank:
        time.sleep(0.05 * board.rank)
        os.kill(os.getpid(), signal.SIGKILL)
    deadline = time.monotonic() + SOON_S
    while len(station.lost) < 2 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert station.engine.peers() == ()
    station.engine.close()
    for memory in station.memories.values():
        memory.close()
    del station
    gc.collect()
    eventually(lambda: open_descriptors() <= before, "what belonged to the dead is closed")
    return open_descriptors() - before


@both_backends
def test_the_dead_leave_no_descriptors(backend: str) -> None:
    exits = {1: -9, 2: -9}
    assert run_ranks(3, descriptors_after_deaths, str(backend), exits=exits)[0] <= 0
