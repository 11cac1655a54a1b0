"""The contestants of the layer benchmark compute one function, and each gets a time every round."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks.bench_moe_layer import (
    PEERS,
    Sizes,
    check,
    measure,
    ours,
    theirs,
    transformers_block,
)
from configs.schema import Exactness

SIZES = Sizes(hidden=64, inner=32, experts=8, topk=2)


@pytest.fixture
def layers():
    with torch.inference_mode():
        block = transformers_block(SIZES)
        yield {
            "ours": ours(block, SIZES, 16, Exactness.BITWISE),
            **{name: theirs(block, name) for name in PEERS},
        }


@pytest.mark.parametrize("tokens", [1, 16])
def test_every_contestant_is_timed_in_every_round(layers, tokens) -> None:
    found = measure(layers, SIZES, tokens, 2)
    assert set(found) == {"ours", *PEERS}
    assert all(len(samples) == 2 and min(samples) > 0 for samples in found.values())


def test_a_contestant_that_computes_something_else_is_refused(layers) -> None:
    layers["ours"] = torch.zeros_like
    with pytest.raises(RuntimeError, match="ours differs from eager"):
        check(layers, torch.randn(3, SIZES.hidden).bfloat16())
