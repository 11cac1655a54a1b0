"""Copies within one memory against numpy: overlapping pieces behave like one memmove."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.engines import BOTH, new_engine
from transfer import RegionKey
from transfer.backends.local import copy_within
from transfer.pieces import make_pieces

AREA = 400


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=12),
    starts=st.lists(st.integers(0, AREA - 30), min_size=12, max_size=12),
    gap=st.integers(0, 3),
    base=st.integers(0, 200),
    shift=st.integers(-100, 100),
    seed=st.integers(0, 2**32 - 1),
)
@example(lengths=[10, 10], starts=[0, 10] + [0] * 10, gap=0, base=10, shift=0, seed=1)
def test_a_batch_is_one_memmove(
    lengths: list[int], starts: list[int], gap: int, base: int, shift: int, seed: int
) -> None:
    memory = np.random.default_rng(seed).integers(0, 256, size=AREA + 400, dtype=np.uint8)
    places = base + np.cumsum([0, *[n + gap for n in lengths[:-1]]])
    if places[-1] + lengths[-1] > AREA:
        return
    source_start, target_start = (100, 100 + shift)
    expected, before = memory.copy(), memory.copy()
    for s, t, n in zip(starts, places, lengths, strict=False):
        expected[target_start + t : target_start + t + n] = before[
            source_start + s : source_start + s + n
        ]
    pieces = make_pieces(starts[: len(lengths)], places, lengths)
    source = memory[source_start : source_start + AREA]
    target = memory[target_start : target_start + AREA]
    copy_within(target, source, pieces)
    assert np.array_equal(memory, expected)


@pytest.mark.parametrize("direction", ["write", "read"])
def test_an_engine_moves_overlapping_pieces_within_its_own_memory(direction: str) -> None:
    memory = torch.randint(0, 256, (100_000,), dtype=torch.uint8)
    expected = memory.clone()
    expected[1000:91_000] = memory[:90_000]
    with new_engine() as engine:
        region = engine.register(memory)
        key = RegionKey.decode(engine.offer(region, to=engine.name, access=BOTH).encode())
        starts = np.arange(9) * 10_000
        if direction == "write":
            engine.write(engine.name, region, key, starts, starts + 1000, 10_000).wait(10)
        else:
            engine.read(engine.name, region, key, starts + 1000, starts, 10_000).wait(10)
    assert torch.equal(memory, expected)
