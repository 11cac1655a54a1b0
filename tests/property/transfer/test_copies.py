"""Scattered copies, compiled or not, against one numpy assignment per piece."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.engines import engine_pair
from transfer import Access, allocate, native
from transfer.pieces import Pieces, copy_addressed, copy_pieces, make_pieces

NBYTES = 1 << 20
SEEDS = np.random.SeedSequence().generate_state(8)


@pytest.fixture(params=["compiled", "python"])
def copies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "compiled" and not native.COMPILED:
        pytest.skip("the compiled part was not built, or is turned off")
    if request.param == "python":
        monkeypatch.setattr(native, "COMPILED", False)
        monkeypatch.setattr(native, "copy_one", native._copy_one)
        monkeypatch.setattr(native, "copy_pieces", native._copy_pieces)


def random_pieces(rng: np.random.Generator) -> Pieces:
    """Disjoint targets in random order; sources anywhere; some equal, aligned, empty, joined."""
    count = int(rng.integers(1, 2000))
    align = int(rng.choice([1, 1, 64, 4096]))
    marks = np.unique(rng.integers(0, NBYTES, size=count) // align * align)
    lengths = np.diff(marks, append=NBYTES)
    if rng.random() < 0.3:
        lengths = np.full(len(marks), int(lengths.min()))
    lengths = np.where(rng.random(len(marks)) < 0.2, rng.integers(0, lengths + 1), lengths)
    sources = rng.integers(0, NBYTES - lengths + 1)
    if rng.random() < 0.3:
        sources = marks  # neighbours at both ends
    order = rng.permutation(len(marks)) if rng.random() < 0.7 else np.arange(len(marks))
    return make_pieces(sources[order], marks[order], lengths[order])


def one_by_one(target: np.ndarray, source: np.ndarray, pieces: Pieces) -> None:
    for s, t, n in zip(pieces.source_offsets, pieces.target_offsets, pieces.lengths, strict=True):
        target[t : t + n] = source[s : s + n]


@pytest.mark.usefixtures("copies")
@pytest.mark.parametrize("seed", SEEDS)
def test_every_piece_lands_and_nothing_else(seed: int) -> None:
    rng = np.random.default_rng(int(seed))
    source = rng.integers(0, 256, size=NBYTES, dtype=np.uint8)
    for copy in ("arrays", "addresses"):
        got, expected = np.zeros(NBYTES, dtype=np.uint8), np.zeros(NBYTES, dtype=np.uint8)
        pieces = random_pieces(rng)
        if copy == "arrays":
            copy_pieces(got, source, pieces)
        else:
            copy_addressed(int(got.ctypes.data), int(source.ctypes.data), pieces)
        one_by_one(expected, source, pieces)
        assert np.array_equal(got, expected), (seed, copy)


@pytest.mark.usefixtures("copies")
@pytest.mark.parametrize("seed", SEEDS)
def test_targets_that_overlap_hold_one_of_their_pieces(seed: int) -> None:
    rng = np.random.default_rng(int(seed))
    source = np.repeat(np.arange(1, 101, dtype=np.uint8), 1000)
    target = np.zeros(5000, dtype=np.uint8)
    places = rng.integers(0, 4001, size=100)
    copy_pieces(target, source, make_pieces(np.arange(100) * 1000, places, 1000))
    for i in np.flatnonzero(target):
        writers = np.flatnonzero((places <= i) & (i < places + 1000)) + 1
        assert target[i] in writers, (seed, i)
    covered = np.zeros(5000, dtype=bool)
    for place in places:
        covered[place : place + 1000] = True
    assert np.array_equal(target != 0, covered), seed


@pytest.mark.usefixtures("copies")
@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "plain"])
def test_engines_move_pieces_as_numpy_does(mapped: bool) -> None:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    rng = np.random.default_rng(seed)
    with engine_pair() as (a, b):
        memory = allocate(NBYTES).tensor if mapped else torch.zeros(NBYTES, dtype=torch.uint8)
        key = b.offer(b.register(memory), to=a.name, access=Access.READ | Access.WRITE)
        ours = torch.from_numpy(rng.integers(0, 256, size=NBYTES, dtype=np.uint8))
        source, back = a.register(ours), a.register(torch.zeros_like(ours))
        expected, returned = memory.numpy().copy(), back.tensor.numpy().copy()
        for _ in range(5):
            pieces = random_pieces(rng)
            arrays = (pieces.source_offsets, pieces.target_offsets, pieces.lengths)
            a.write(b.name, source, key, *arrays).wait()
            one_by_one(expected, ours.numpy(), pieces)
            assert np.array_equal(memory.numpy(), expected), seed
            pieces = random_pieces(rng)
            arrays = (pieces.target_offsets, pieces.source_offsets, pieces.lengths)
            a.read(b.name, back, key, *arrays).wait()
            one_by_one(returned, expected, pieces)
            assert np.array_equal(back.tensor.numpy(), returned), seed


@pytest.mark.usefixtures("copies")
@pytest.mark.parametrize("lengths", [[-1], [1, -5], [-(2**63)]])
def test_negative_lengths_touch_nothing(lengths: list[int]) -> None:
    target, source = np.zeros(64, dtype=np.uint8), np.ones(64, dtype=np.uint8)
    numbers = np.array(lengths, dtype=np.int64)
    zeros = np.zeros_like(numbers)
    with pytest.raises(ValueError, match="length"):
        native.copy_pieces(int(target.ctypes.data), int(source.ctypes.data), zeros, zeros, numbers)
    assert not target.any()
