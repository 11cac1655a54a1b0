"""Plain tensors between processes: copied by the kernel where it permits that, else by sockets."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.engines import new_engine, open_descriptors
from tests.support.ranks import Board, run_ranks
from tests.support.waits import eventually
from transfer import Access, Region, RegionKey, TransferEngine

SOON_S = 60.0
NBYTES = 3 << 20
PR_SET_DUMPABLE = 4
CAP_SYS_PTRACE = 19
BOTH = Access.READ | Access.WRITE


def name_of(rank: int) -> str:
    return f"{rank:016x}"


def meet(board: Board, engine: TransferEngine, region: Region) -> RegionKey:
    """Connect two ranks; offer the other our region and return its key."""
    other = 1 - board.rank
    address = board.exchange("address", engine.address)[other]
    engine.connect(address)
    key = engine.offer(region, to=name_of(other), access=BOTH)
    return RegionKey.decode(board.exchange("key", key.encode())[other])


def random_pieces(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Disjoint targets; sources that may overlap; lengths of zero among them."""
    count = int(rng.integers(1, 3000))
    marks = np.unique(rng.integers(0, NBYTES, size=count))
    lengths = np.diff(marks, append=NBYTES)
    lengths = np.where(rng.random(len(marks)) < 0.3, rng.integers(0, lengths + 1), lengths)
    sources = rng.integers(0, NBYTES - lengths + 1)
    order = rng.permutation(len(marks))
    return sources[order], marks[order], lengths[order]


def exchange_pieces(board: Board, seed: int, dumpable: bool) -> dict[str, Any]:
    """Each writes to the other and reads it back; a numpy copy says what should be there."""
    if not dumpable:
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    other = name_of(1 - board.rank)
    rng = np.random.default_rng([seed, board.rank])
    memory = torch.zeros(NBYTES, dtype=torch.uint8)
    ours = torch.from_numpy(rng.integers(0, 256, size=NBYTES, dtype=np.uint8))
    backends = set()
    with new_engine(name=name_of(board.rank)) as engine:
        source, back = engine.register(ours), engine.register(torch.zeros_like(ours))
        key = meet(board, engine, engine.register(memory))
        expected = np.zeros(NBYTES, dtype=np.uint8)
        for round_idx in range(5):
            pieces = random_pieces(rng)
            transfer = engine.write(other, source, key, *pieces, immediate=round_idx)
            transfer.wait(SOON_S)
            backends.add(transfer.backend)
            for s, t, n in zip(*pieces, strict=True):
                expected[t : t + n] = ours.numpy()[s : s + n]
            engine.read(other, back, key, 0, 0, NBYTES).wait(SOON_S)
            assert np.array_equal(back.tensor.numpy(), expected), (seed, round_idx)
            engine.expect({(other, round_idx): 1}, timeout_s=SOON_S)
        theirs = board.exchange("expected", expected.tobytes())[1 - board.rank]
        assert memory.numpy().tobytes() == theirs, seed
        refusal = engine._table.ready(other).locations.refusal
        board.exchange("done", None)
    return {"backends": backends, "refusal": refusal}


def test_random_pieces_both_ways() -> None:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    for result in run_ranks(2, exchange_pieces, seed, True):
        if result["refusal"] is not None:
            pytest.skip(f"this kernel does not permit it: {result['refusal']}")
        assert result["backends"] == {"process_memory"}, seed


def give_up_tracing() -> None:
    """Drop CAP_SYS_PTRACE: then memory of processes that are not dumpable is out of reach."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice 32 bits
    assert libc.capget(header, sets) == 0
    for i in range(3):
        sets[i] &= ~(1 << CAP_SYS_PTRACE)
    assert libc.capset(header, sets) == 0, ctypes.get_errno()


def without_permission(board: Board, seed: int) -> dict[str, Any]:
    give_up_tracing()
    return exchange_pieces(board, seed, dumpable=False)


def test_by_sockets_where_the_kernel_does_not_permit_it() -> None:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    for result in run_ranks(2, without_permission, seed):
        assert result["backends"] == {"tcp"}, seed
        assert "process_vm_readv" in result["refusal"], result


def many_keys(board: Board, cycles: int) -> int:
    """Offer, use and withdraw again and again; count what grows."""
    other = name_of(1 - board.rank)
    memory = torch.zeros(8192, dtype=torch.uint8)
    grown = 0
    with new_engine(name=name_of(board.rank)) as engine:
        region, source = engine.register(memory), engine.register(torch.ones_like(memory))
        meet(board, engine, region)
        if board.rank == 0:
            keys = [engine.offer(region, to=other, access=BOTH) for _ in range(cycles)]
            board.post("keys", [key.encode() for key in keys])
            board.read("used", timeout_s=SOON_S)
            eventually(lambda: all(engine.withdraw(key) for key in keys))
            assert engine._links.told.tokens() == []
        else:
            before = open_descriptors()
            for data in board.read("keys", timeout_s=SOON_S):
                engine.write(other, source, RegionKey.decode(data), 0, 0, 64).wait(SOON_S)
            grown = open_descriptors() - before
            board.post("used")
        board.exchange("withdrawn", None)
        if board.rank == 1:
            assert len(engine._table.ready(other).locations._locations) <= 1
        board.exchange("done", None)
    return grown


def test_nothing_grows_with_the_keys_that_were_used() -> None:
    assert run_ranks(2, many_keys, 1000)[1] <= 1  # the descriptor of the peer's process
