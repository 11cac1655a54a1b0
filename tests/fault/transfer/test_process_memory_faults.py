"""Peers that know our addresses are killed in mid-copy, or stopped while we withdraw."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engines import new_engine
from tests.support.ranks import Board, run_ranks
from transfer import Access, PeerLost, Region, RegionKey, TransferEngine

SOON_S = 60.0
BOTH = Access.READ | Access.WRITE


def name_of(rank: int) -> str:
    return f"{rank:016x}"


def meet(board: Board, engine: TransferEngine, region: Region) -> RegionKey:
    other = 1 - board.rank
    engine.connect(board.exchange("address", engine.address)[other])
    key = engine.offer(region, to=name_of(other), access=BOTH)
    board.exchange("own", key.encode())
    return RegionKey.decode(board.read(f"own.{other}"))


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + SOON_S
    while (
        Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "T"
    ):
        assert time.monotonic() < deadline, "it did not stop"
        time.sleep(0.001)


def withdrawn_from_a_stopped_peer(board: Board) -> dict[str, Any]:
    """Rank 1 knows an address of rank 0's and is stopped: what it knows is not free."""
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    outcome: dict[str, Any] = {}
    with new_engine(name=name_of(board.rank)) as engine:
        region = engine.register(memory)
        source = engine.register(torch.ones(1 << 20, dtype=torch.uint8))
        key = meet(board, engine, region)
        if board.rank == 1:
            outcome["backend"] = (
                transfer := engine.write(name_of(0), source, key, 0, 0, 100)
            ).backend
            transfer.wait(SOON_S)
            board.post("used", os.getpid())
            board.read("over", timeout_s=SOON_S)
            return outcome
        pid = board.read("used", timeout_s=SOON_S)
        mine = RegionKey.decode(board.read("own.0"))
        stop(pid)
        try:
            started = time.monotonic()
            outcome["while stopped"] = engine.withdraw(mine)
            outcome["waited_s"] = time.monotonic() - started
            outcome["quarantined"] = engine._links.told.num_quarantined
        finally:
            os.kill(pid, signal.SIGCONT)
        deadline = time.monotonic() + SOON_S
        while not engine.withdraw(mine):
            assert time.monotonic() < deadline, "it never answered"
        outcome["at last"] = engine._links.told.num_quarantined
        board.post("over")
    return outcome


def test_a_stopped_peer_keeps_what_it_knows_in_quarantine() -> None:
    owner, user = run_ranks(2, withdrawn_from_a_stopped_peer)
    if user["backend"] != "process_memory":
        pytest.skip("this kernel does not permit copies between processes")
    assert owner["while stopped"] is False
    assert owner["waited_s"] < 10.0
    assert owner["quarantined"] == 1
    assert owner["at last"] == 0


def killed_in_mid_copy(board: Board, victim: str) -> dict[str, Any]:
    """Rank 1 dies while rank 0 copies to it, or while it copies to rank 0."""
    nbytes = 64 << 20
    memory = torch.zeros(nbytes, dtype=torch.uint8)
    outcome: dict[str, Any] = {}
    with new_engine(name=name_of(board.rank)) as engine:
        region, source = engine.register(memory), engine.register(torch.ones_like(memory))
        key = meet(board, engine, region)
        other = name_of(1 - board.rank)
        first = engine.write(other, source, key, 0, 0, nbytes)
        first.wait(SOON_S)
        outcome["backend"] = first.backend
        pid = board.exchange("ready", os.getpid())[1 - board.rank]
        if board.rank == 1:
            deadline = time.monotonic() + SOON_S
            while time.monotonic() < deadline:
                if victim == "requester":
                    engine.write(other, source, key, 0, 0, nbytes)
                else:
                    time.sleep(0.01)
            raise AssertionError("nobody killed it")
        if victim == "requester":
            memory.zero_()
            while not bool(memory[0]):  # it is at it
                pass
            os.kill(pid, signal.SIGKILL)
        started = time.monotonic()

        def copy_on() -> None:
            killed = victim == "requester"
            while time.monotonic() < started + SOON_S:
                if not killed and time.monotonic() > started + 0.1:
                    os.kill(pid, signal.SIGKILL)
                    killed = True
                engine.write(other, source, key, 0, 0, nbytes).wait(SOON_S)

        with pytest.raises(PeerLost) as caught:
            copy_on()
        outcome["peer"] = caught.value.peer
        mine = RegionKey.decode(board.read("own.0"))
        outcome["free"] = engine.withdraw(mine)
        outcome["quarantined"] = engine._links.told.num_quarantined
    return outcome


@pytest.mark.parametrize("victim", ["owner", "requester"])
def test_a_peer_that_is_killed_in_mid_copy_is_lost_and_its_memory_is_free(victim: str) -> None:
    outcome = run_ranks(2, killed_in_mid_copy, victim, exits={1: -9})[0]
    if outcome["backend"] != "process_memory":
        pytest.skip("this kernel does not permit copies between processes")
    assert outcome["peer"] == name_of(1)
    assert outcome["free"] is True
    assert outcome["quarantined"] == 0
