"""A layer's tokens at once and in halves: the same bits, and calls that all ranks agree on."""

from __future__ import annotations

import random

import pytest
import torch

from configs.schema import DispatchConfig
from dispatch import CallOrder, DispatchLayout, LocalDispatcher
from dispatch.message import GRANT, Stamp, mark, marks_of, more_of, write_header
from moe_runtime.models.expert_exchange import through_experts
from tests.support.moe_reference import draw_tokens, reference, run_experts

LAYOUT = DispatchLayout(
    hidden=24,
    topk=3,
    num_logical=7,
    num_layers=2,
    dtype=torch.bfloat16,
    max_tokens=30,
    microbatches=2,
)


class Counting(LocalDispatcher):
    """Counts what is sent; `others_have_more`: as if another rank had said so."""

    def __init__(self, *, others_have_more: bool = False) -> None:
        super().__init__(layout=LAYOUT)
        self.others_have_more = others_have_more
        self.sent: list[tuple[int, int]] = []

    def dispatch_send(self, x, ids, weights, *, layer, microbatch=0, more=False):
        self.sent.append((microbatch, len(x)))
        more = more or (self.others_have_more and not microbatch)
        return super().dispatch_send(x, ids, weights, layer=layer, microbatch=microbatch, more=more)


def compute(layer: int):
    return lambda arrived: run_experts(arrived.rows, arrived.counts, arrived.experts, layer)


@pytest.mark.parametrize("others_have_more", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 4, 5, 6, 29, 30])
def test_bits_and_calls(num_tokens, others_have_more):
    seed = random.randrange(1 << 32)
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    dispatcher = Counting(others_have_more=others_have_more)
    dispatcher.begin_pass()
    for layer in (0, 1):
        tokens = draw_tokens(LAYOUT, num_tokens, generator)
        for most in (None, 5):
            dispatcher.sent.clear()
            out = through_experts(
                dispatcher, *tokens, layer=layer, experts=compute(layer), microbatch_tokens=most
            )
            assert torch.equal(out, reference(*tokens, layer))
            if most is None:
                continue
            half = num_tokens if num_tokens <= 5 else -(-num_tokens // 2)
            cut = num_tokens > 5 or others_have_more
            assert dispatcher.sent == [(0, half), (1, num_tokens - half)][: 1 + cut]
    dispatcher.end_pass()


def test_a_dispatcher_without_a_second_window_refuses():
    dispatcher = LocalDispatcher(layout=LAYOUT)
    with pytest.raises(CallOrder):
        through_experts(
            dispatcher,
            *draw_tokens(LAYOUT, 9, torch.Generator()),
            layer=0,
            experts=compute(0),
            microbatch_tokens=2,
        )


def test_the_flag_in_a_header_is_apart_from_its_marks():
    buffer = torch.full((64,), 255, dtype=torch.uint8).numpy()
    shared = Stamp(1, 2, 0, 0).header(torch.bfloat16, 24)
    for more in (False, True):
        write_header(buffer, shared, 0, 1, 0, 0, more=more)
        assert (more_of(buffer), marks_of(buffer)) == (more, (0, 0))
        mark(buffer, GRANT, 640)
        assert (more_of(buffer), marks_of(buffer)) == (more, (GRANT, 640))


def test_configuration_needs_windows_for_both():
    assert DispatchConfig().microbatch_tokens is None
    assert DispatchConfig(microbatches=2, microbatch_tokens=64).microbatch_tokens == 64
    with pytest.raises(ValueError, match="microbatches >= 2"):
        DispatchConfig(microbatch_tokens=64)
