"""Two processes over TLS, and somebody who listens on the wire between them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.schema import TransferTls
from tests.support.certificates import Authority
from tests.support.engines import new_engine
from tests.support.ranks import Board, run_ranks
from tests.support.recorder import Recorder
from transfer import Access, RegionKey, TransferEngine, allocate

SOON_S = 40.0
NBYTES = 12 << 20
BOTH = Access.READ | Access.WRITE


def name_of(rank: int) -> str:
    return f"{rank:016x}"


class Member:
    """One side: an engine behind a recorder, a source and a window."""

    def __init__(self, board: Board, engine: TransferEngine, seed: int) -> None:
        self.board, self.engine = board, engine
        self.other = 1 - board.rank
        # Both sides know what both have.
        self.bytes = [np.random.default_rng([seed, rank]).integers(0, 256, NBYTES, dtype=np.uint8)
                      for rank in (0, 1)]  # fmt: skip
        self.source = engine.register(allocate(NBYTES))
        self.source.array[:] = self.bytes[board.rank]
        self.window = engine.register(allocate(NBYTES))
        addresses = board.exchange("address", engine.address)
        if board.rank == 0:
            engine.connect(addresses[1], timeout_s=SOON_S)
        board.exchange("connected", None)
        offered = engine.offer(self.window, to=name_of(self.other), access=BOTH).encode()
        self.key = RegionKey.decode(board.exchange("key", offered)[self.other])

    def write(self, *places: Any, immediate: int) -> None:
        peer = name_of(self.other)
        self.engine.write(peer, self.source, self.key, *places, immediate=immediate).wait(SOON_S)
        self.engine.expect({(peer, immediate): 1}, timeout_s=SOON_S)

    def check_window(self, expected: np.ndarray, what: str) -> None:
        assert np.array_equal(self.window.array, expected), what
        self.board.exchange(f"checked {what}", None)


def exchange(board: Board, tls: TransferTls, seed: int) -> tuple[bool, int]:
    """Everything both ways; returns whether payload was readable on the wire, and its bytes."""
    generator = random.Random(seed)
    name = name_of(board.rank)
    with new_engine("tcp", name=name, tls=tls) as engine, Recorder(engine.address) as wire:
        wire.stand_before(engine)
        member = Member(board, engine, seed)
        theirs = member.bytes[member.other]

        member.write(0, 0, NBYTES, immediate=1)  # large: several slices
        member.check_window(theirs, f"large, seed {seed}")

        lengths = np.array([generator.choice([0, 1, 5, 700, 16 << 10, 40_000])
                            for _ in range(600)], dtype=np.int64)  # fmt: skip
        offsets = np.cumsum(lengths) - lengths
        places = offsets[np.array(generator.sample(range(600), 600))]
        order = np.argsort(places, kind="stable")
        targets = np.empty_like(places)
        targets[order] = np.cumsum(lengths[order]) - lengths[order]
        member.window.array[:] = 0
        member.board.exchange("cleared", None)
        member.write(offsets, targets, lengths, immediate=2)
        expected = np.zeros(NBYTES, dtype=np.uint8)
        for source, target, length in zip(offsets, targets, lengths, strict=True):
            expected[target : target + length] = theirs[source : source + length]
        member.check_window(expected, f"scattered, seed {seed}")

        for i in range(50):
            member.write(i * 64, i * 64, 64, immediate=10 + i)  # small
        board.exchange("written", None)

        member.window.array[:] = member.bytes[board.rank][::-1]
        board.exchange("reversed", None)
        got = engine.register(allocate(NBYTES))
        peer = name_of(member.other)
        engine.read(peer, got, member.key, 0, 0, NBYTES).wait(SOON_S)
        assert np.array_equal(got.array, theirs[::-1]), f"read, seed {seed}"
        engine.read(peer, got, member.key, lengths * 0 + 5, offsets, lengths * 0 + 9).wait(SOON_S)
        board.exchange("read", None)

        payload = member.bytes[board.rank].tobytes() + theirs.tobytes()
        starts = [generator.randrange(len(payload) - 24) for _ in range(40)]
        carried = bytes(wire.carried)
        readable = any(payload[start : start + 24] in carried for start in starts)
        board.exchange("over", None)
    return readable, len(carried)


@pytest.mark.parametrize("encrypted", [True, False], ids=["tls", "plain"])
def test_no_byte_of_what_is_moved_can_be_read_on_the_wire(encrypted: bool, tmp_path: Path) -> None:
    """And all of it can without TLS: the listener does listen."""
    seed = random.randrange(2**32)
    tls = Authority(tmp_path).member() if encrypted else TransferTls()
    for readable, carried in run_ranks(2, exchange, tls, seed, timeout_s=180):
        assert readable is not encrypted, f"seed {seed}"
        assert carried > NBYTES, "it stood between the two"


def reset(board: Board, tls: TransferTls, seed: int) -> tuple[int, int]:
    """Rank 0 writes while its connections to rank 1 are reset."""
    name = name_of(board.rank)
    with new_engine("tcp", name=name, tls=tls) as engine, Recorder(engine.address) as wire:
        wire.stand_before(engine)
        member = Member(board, engine, seed)
        cut = resends = 0
        if board.rank == 1:
            wire.cut_after(NBYTES // 3)
        board.exchange("ready", None)
        if board.rank == 0:
            lengths = np.full(NBYTES // 8192, 8192, dtype=np.int64)
            offsets = np.arange(len(lengths), dtype=np.int64) * 8192
            peer = name_of(1)
            engine.write(peer, member.source, member.key, offsets, offsets, lengths,
                         immediate=3).wait(SOON_S)  # fmt: skip
            resends = sum(s.resends for s in engine.statistics().backends.values())
        else:
            engine.expect({(name_of(0), 3): 1}, timeout_s=SOON_S)
            assert np.array_equal(member.window.array, member.bytes[0]), f"seed {seed}"
            cut = wire.num_cut
        board.exchange("over", None)
    return cut, resends


def test_connections_that_are_reset_in_the_middle_cost_nothing(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    results = run_ranks(2, reset, Authority(tmp_path).member(), seed, timeout_s=180)
    assert results[1][0] > 0, "they were reset"
    assert results[0][1] > 0, "slices were sent again"
