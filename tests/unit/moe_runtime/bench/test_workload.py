"""Sizes, places and patterns: what a row of `bench transfer` moves."""

from __future__ import annotations

import random

import numpy as np
import pytest

from moe_runtime.bench.workload import (
    Case,
    differing_piece,
    fill,
    parse_size,
    pattern,
    placements,
    shown_size,
)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("1", 1), ("4096", 4096), ("4K", 4096), (" 4kib ", 4096), ("64KB", 65536), ("1M", 1 << 20),
     ("2G", 2 << 30)],
)  # fmt: skip
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes
    assert parse_size(shown_size(nbytes)) == nbytes


@pytest.mark.parametrize("text", ["", "0", "-1", "4X", "1.5M", "K", "4 K", "2000G", "9" * 30])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_size(text)


@pytest.mark.parametrize(("size", "blocks", "batch"), [(1, 1, 1), (7, 13, 3), (4096, 50, 2)])
def test_pieces_do_not_overlap_and_fit(size: int, blocks: int, batch: int) -> None:
    case = Case(operation="write", size=size, blocks=blocks, batch=batch)
    lanes = placements(case, seed=random.randrange(1000))
    assert len(lanes) == batch
    for offsets in ([lane.source for lane in lanes], [lane.target for lane in lanes]):
        used = np.concatenate(offsets)
        covered = (used[:, None] + np.arange(size)).ravel()
        assert len(np.unique(covered)) == case.nbytes * batch
        assert covered.min() >= 0
        assert covered.max() < case.window_bytes


def test_the_pattern_belongs_to_its_place() -> None:
    seed = random.randrange(1 << 32)
    whole = pattern(0, 10_000, seed)
    for _ in range(50):
        offset, nbytes = random.randrange(9000), random.randrange(1, 1000)
        assert np.array_equal(pattern(offset, nbytes, seed), whole[offset : offset + nbytes])
    other = pattern(0, 10_000, seed + 1)
    assert (whole != other).mean() > 0.9


def test_a_single_late_byte_is_seen() -> None:
    seed = random.randrange(1 << 32)
    case = Case(operation="write", size=9001, blocks=7, batch=1)
    (lane,) = placements(case, seed)
    source, target = (np.zeros(case.window_bytes, dtype=np.uint8) for _ in range(2))
    fill(source, lane.source, lane.size, seed)
    for a, b in zip(lane.source, lane.target, strict=True):
        target[b : b + lane.size] = source[a : a + lane.size]
    assert differing_piece(target, lane, seed) is None
    piece, byte = random.randrange(7), random.randrange(9001)
    target[lane.target[piece] + byte] ^= 1
    assert differing_piece(target, lane, seed) == piece, (seed, byte)
