"""One rank: bits of the combine, what is refused, what is counted."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from configs.schema import MissingExperts
from dispatch import (
    CallOrder,
    CapacityExceeded,
    DispatchLayout,
    ExpertMap,
    ExpertUnowned,
    InputInvalid,
    LocalDispatcher,
    StaleEpoch,
)
from dispatch.missing import without_missing
from tests.support.moe_reference import draw_tokens, identity_expert, reference, run_layer


def layout_of(**change) -> DispatchLayout:
    fields = {"hidden": 24, "topk": 3, "num_logical": 6, "num_layers": 2, "max_tokens": 16}
    return DispatchLayout(**{**fields, "dtype": torch.bfloat16, **change})


def started(layout: DispatchLayout, **options) -> LocalDispatcher:
    dispatcher = LocalDispatcher(layout=layout, **options)
    dispatcher.begin_pass()
    return dispatcher


@pytest.fixture
def generator():
    seed = random.randrange(1 << 32)
    print("seed", seed)
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("combine_dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden", [1, 7, 64])
def test_bits_equal_the_reference(dtype, combine_dtype, hidden, generator):
    layout = layout_of(dtype=dtype, hidden=hidden)
    dispatcher = started(layout)
    for num_tokens in (0, 1, 2, 16):
        x, ids, weights = draw_tokens(layout, num_tokens, generator, masked=0.3)
        out = run_layer(dispatcher, x, ids, weights, 1, combine_dtype=combine_dtype)
        assert out.dtype is dtype
        assert torch.equal(out, reference(x, ids, weights, 1, combine_dtype=combine_dtype))


def test_many_chunks_give_the_bits_of_one_token_at_a_time(generator):
    layout = layout_of(hidden=2048, topk=8, num_logical=12, max_tokens=200)
    dispatcher = started(layout)
    x, ids, weights = draw_tokens(layout, 200, generator)
    whole = run_layer(dispatcher, x, ids, weights, 0)
    for t in range(0, 200, 23):
        alone = run_layer(dispatcher, x[t : t + 1], ids[t : t + 1], weights[t : t + 1], 0)
        assert torch.equal(whole[t : t + 1], alone)


def test_rows_are_grouped_by_expert_then_token_then_choice():
    layout = layout_of(hidden=1, dtype=torch.float32)
    dispatcher = started(layout)
    x = torch.tensor([[10.0], [20.0], [30.0]])
    ids = torch.tensor([[5, 0, 5], [-1, 5, 1], [0, -1, -1]])
    arrived, _ = dispatcher.dispatch(x, ids, torch.ones(3, 3), layer=0)
    assert arrived.experts == (0, 1, 2, 3, 4, 5)
    assert arrived.counts == (2, 1, 0, 0, 0, 3)
    assert arrived.rows.flatten().tolist() == [10, 30, 20, 10, 10, 20]
    arrived.rows.fill_(0)
    assert x.flatten().tolist() == [10, 20, 30], "the rows are the caller's own"


def test_masked_choices_contribute_nothing_whatever_their_weight():
    layout = layout_of()
    dispatcher = started(layout)
    x, ids = torch.randn(2, 24).bfloat16(), torch.tensor([[-1, 2, -1], [-1, -1, -1]])
    weights = torch.tensor([[float("nan"), 0.5, float("inf")], [float("nan"), 1.0, 1.0]])
    out = run_layer(dispatcher, x, ids, weights, 0)
    clean = torch.tensor([[0.0, 0.5, 0.0], [0.0, 0.0, 0.0]])
    assert torch.equal(out, reference(x, ids, clean, 0))
    assert not out[1].any()


def test_negative_zero_does_not_depend_on_masking():
    layout = layout_of(dtype=torch.float32, hidden=4)
    dispatcher = started(layout)
    x = torch.full((1, 4), -0.0)
    for ids in ([[1, -1, -1]], [[-1, 1, -1]], [[1, 1, 1]]):
        out = run_layer(dispatcher, x, torch.tensor(ids), torch.ones(1, 3), 0, identity_expert)
        assert not torch.signbit(out).any()


def test_a_token_with_nan_shows_it_and_nobody_else_does(generator):
    layout = layout_of()
    dispatcher = started(layout)
    x, ids, weights = draw_tokens(layout, 4, generator, masked=0)
    x[2, 3] = float("nan")
    x[2, 4] = float("inf")
    out = run_layer(dispatcher, x, ids, weights, 0)
    assert out[2, 3].isnan()
    assert out[2, 4].isinf()
    assert out[[0, 1, 3]].isfinite().all()


BAD_INPUTS = {
    "x of another width": lambda x, i, w: (x[:, :-1].contiguous(), i, w),
    "x with three dimensions": lambda x, i, w: (x[None], i, w),
    "x of another type": lambda x, i, w: (x.float(), i, w),
    "x not contiguous": lambda x, i, w: (x.t().contiguous().t(), i, w),
    "x on another device": lambda x, i, w: (x.to("meta"), i, w),
    "ids of another type": lambda x, i, w: (x, i.int(), w),
    "ids of another length": lambda x, i, w: (x, i[:-1], w),
    "ids of another K": lambda x, i, w: (x, i[:, :-1].contiguous(), w),
    "ids not contiguous": lambda x, i, w: (x, i.t().contiguous().t(), w),
    "weights of another type": lambda x, i, w: (x, i, w.double()),
    "weights of another length": lambda x, i, w: (x, i, w[1:]),
    "id E": lambda x, i, w: (x, i.fill_(6), w),
    "id E + 1": lambda x, i, w: (x, i.fill_(7), w),
    "id 2 E": lambda x, i, w: (x, i.fill_(12), w),
    "id 2 E + 1": lambda x, i, w: (x, i.fill_(13), w),
    "huge id": lambda x, i, w: (x, i.fill_(1 << 62), w),
    "id -2": lambda x, i, w: (x, i.fill_(-2), w),
    "id -E": lambda x, i, w: (x, i.fill_(-6), w),
    "id -2 E - 1": lambda x, i, w: (x, i.fill_(-13), w),
    "id -2 E": lambda x, i, w: (x, i.fill_(-12), w),
    "the largest id": lambda x, i, w: (x, i.fill_((1 << 63) - 1), w),
    "the most negative id": lambda x, i, w: (x, i.fill_(-(1 << 63)), w),
}


@pytest.mark.parametrize("spoil", BAD_INPUTS.values(), ids=BAD_INPUTS.keys())
def test_bad_input_is_refused_and_the_pass_goes_on(spoil, generator):
    layout = layout_of()
    dispatcher = started(layout)
    x, ids, weights = draw_tokens(layout, 4, generator)
    with pytest.raises(InputInvalid):
        dispatcher.dispatch(*spoil(x.clone(), ids.clone(), weights.clone()), layer=0)
    assert torch.equal(run_layer(dispatcher, x, ids, weights, 0), reference(x, ids, weights, 0))
    assert dispatcher.statistics().exchanges == 1


def test_one_token_too_many_and_a_wrong_layer_are_refused(generator):
    layout = layout_of()
    dispatcher = started(layout)
    with pytest.raises(CapacityExceeded) as caught:
        dispatcher.dispatch(*draw_tokens(layout, 17, generator), layer=0)
    assert (caught.value.num_tokens, caught.value.max_tokens) == (17, 16)
    for layer in (-1, 2):
        with pytest.raises(InputInvalid, match="layer"):
            dispatcher.dispatch(*draw_tokens(layout, 1, generator), layer=layer)
    dispatcher.dispatch(*draw_tokens(layout, 16, generator), layer=0)


def test_bad_results_are_refused_and_the_combine_can_be_repeated(generator):
    layout = layout_of(combine_dtype=torch.bfloat16)
    dispatcher = started(layout)
    arrived, handle = dispatcher.dispatch(*draw_tokens(layout, 3, generator), layer=0)
    good = arrived.rows.clone()
    for bad in (good[:-1], good.float(), good.double(), good.t().contiguous().t(), good[:, :-1]):
        with pytest.raises(InputInvalid):
            dispatcher.combine(bad, handle)
    dispatcher.combine(good, handle)


def test_order_of_calls_is_enforced(generator):
    layout = layout_of()
    dispatcher = LocalDispatcher(layout=layout)
    tokens = draw_tokens(layout, 2, generator)
    with pytest.raises(CallOrder):
        dispatcher.dispatch(*tokens, layer=0)
    with pytest.raises(CallOrder):
        dispatcher.end_pass()
    dispatcher.begin_pass()
    with pytest.raises(CallOrder):
        dispatcher.begin_pass()
    arrived, handle = dispatcher.dispatch(*tokens, layer=0)
    for call in (dispatcher.end_pass, lambda: dispatcher.dispatch(*tokens, layer=1)):
        with pytest.raises(CallOrder):
            call()
    dispatcher.combine(arrived.rows, handle)
    with pytest.raises(StaleEpoch):
        dispatcher.combine(arrived.rows, handle)
    dispatcher.end_pass()


def test_an_expert_without_a_copy_is_an_error_or_left_out(generator):
    layout = layout_of(num_layers=1, topk=3)
    held = ExpertMap(num_layers=1, num_logical=6, placement={0: ((0, 1, 2, 4),)})
    x = torch.randn(4, 24, generator=generator).bfloat16()
    ids = torch.tensor([[0, 3, 1], [5, 3, -1], [2, 1, 0], [-1, 4, 5]])
    weights = torch.tensor([[0.5, 0.3, 0.2], [0.6, 0.4, 9.0], [0.2, 0.3, 0.5], [9.0, 0.25, 0.75]])
    with pytest.raises(ExpertUnowned) as caught:
        started(layout, expert_map=held).dispatch(x, ids, weights, layer=0)
    assert caught.value.experts == (3, 5)
    dispatcher = started(layout, expert_map=held, missing_experts=MissingExperts.DEGRADE)
    arrived, handle = dispatcher.dispatch(x, ids, weights, layer=0)
    assert handle.num_degraded == 4
    assert arrived.experts == (0, 1, 2, 4)
    out = dispatcher.combine(arrived.rows, handle)
    f32 = torch.float32
    scale = torch.tensor(0.5 + 0.3 + 0.2, dtype=f32) / (
        torch.tensor(0.5, dtype=f32) + torch.tensor(0.2, dtype=f32)
    )
    kept = torch.stack([weights[0, 0] * scale, torch.zeros(()), weights[0, 2] * scale])
    want = reference(x[:1], torch.tensor([[0, -1, 1]]), kept[None], 0, identity_expert)
    assert torch.equal(out[:1], want)
    assert not out[1].any(), "all its experts are missing"
    assert torch.equal(out[2:3], reference(x[2:3], ids[2:3], weights[2:3], 0, identity_expert))
    assert torch.allclose(out[3], x[3], rtol=1e-2), "0.25 grew to the sum of both"
    assert dispatcher.statistics().degraded_choices == 4


def test_documented_renormalisation():
    out = without_missing(
        np.array([[0.5, 0.3, 0.2]], np.float32),
        np.zeros((1, 3), bool),
        np.array([[True, False, False]]),
    )
    np.testing.assert_allclose(out, [[0.0, 0.6, 0.4]], rtol=1e-6)


def test_counters_add_up(generator):
    layout = layout_of()
    dispatcher = started(layout)
    routed = np.zeros((2, 6), np.int64)
    masked = 0
    for layer in (0, 1, 0):
        x, ids, weights = draw_tokens(layout, 9, generator, masked=0.4)
        run_layer(dispatcher, x, ids, weights, layer)
        masked += int((ids < 0).sum())
        for expert in ids[ids >= 0].tolist():
            routed[layer, expert] += 1
    dispatcher.end_pass()
    counted = dispatcher.statistics()
    assert (counted.passes, counted.exchanges, counted.tokens) == (1, 3, 27)
    assert counted.masked_choices == masked
    assert (counted.routed == routed).all()
    assert (counted.received == routed).all()
    assert counted.sent_choices == {0: int(routed.sum())}
    assert counted.sent_bytes == 0, "own rows are never put into a message"


def test_inference_mode_and_plain_mode_can_be_mixed(generator):
    layout = layout_of()
    with torch.inference_mode():
        dispatcher = started(layout)
        x, ids, weights = draw_tokens(layout, 3, generator)
        inside = run_layer(dispatcher, x, ids, weights, 0)
    outside = run_layer(dispatcher, x.clone(), ids.clone(), weights.clone(), 0)
    assert torch.equal(inside, outside)
