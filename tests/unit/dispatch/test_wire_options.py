"""Sums on the experts' ranks, rows in fp8, results in bf16: bits, bytes, refusals."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch

from configs.dispatch_options import CombineMode, CombineWire, DispatchWire
from dispatch import DispatchLayout, ExpertMap, LayoutMismatch, MessageMismatch, native
from dispatch.kernels.fp8 import dequantise_torch, quantise_torch
from dispatch.message import Stamp
from tests.support.dispatch_pair import LAYOUT, both, install, pair, prepared
from tests.support.exchange_group import ExchangeGroup
from tests.support.moe_reference import (
    draw_map,
    draw_tokens,
    identity_expert,
    reference,
    run_layer,
    scale_expert,
)

RANKS = [0, 2, 5]
BASE = DispatchLayout(
    hidden=200, topk=5, num_logical=7, num_layers=2, dtype=torch.bfloat16, max_tokens=9
)
REDUCED = dataclasses.replace(BASE, combine=CombineMode.REDUCED)
FP8 = dataclasses.replace(BASE, dispatch_wire=DispatchWire.FP8)


@pytest.fixture(params=["compiled", "torch"])
def way(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(native, "compiled", None)
    elif native.compiled is None:
        pytest.skip("the compiled loops were not built")


@pytest.fixture
def generator():
    seed = random.randrange(1 << 32)
    print("seed", seed)
    return torch.Generator().manual_seed(seed)


def drawn(layout: DispatchLayout, generator: torch.Generator):
    return [draw_tokens(layout, n, generator, masked=0.2) for n in (9, 0, 4)]


def reduced_reference(placed: ExpertMap, rank: int, tokens, layer: int, wire: torch.dtype):
    """One token at a time: a sum per rank in the order of k, then a sum of the ranks' sums."""
    x, ids, weights = tokens
    route, out = placed.route(layer, rank), torch.zeros_like(x)
    for t in range(len(x)):
        total = torch.zeros(x.shape[1])
        for owner in RANKS:
            part, chosen = torch.zeros(x.shape[1]), False
            for k, expert in enumerate(ids[t].tolist()):
                if expert >= 0 and int(route[expert]) == owner:
                    row = scale_expert(x[t : t + 1], layer, expert)[0]
                    part, chosen = part + row.float() * weights[t, k], True
            total = total + part.to(wire).float() if chosen else total
        out[t] = total.to(x.dtype)
    return out


@pytest.mark.parametrize("wire", list(CombineWire))
@pytest.mark.parametrize("combine_dtype", [None, torch.float32, torch.float16])
def test_reduced_sums_per_rank_then_over_the_ranks(way, generator, combine_dtype, wire):
    layout = dataclasses.replace(REDUCED, combine_wire=wire)
    tokens, placed = drawn(layout, generator), draw_map(layout, RANKS, generator)
    done = ExchangeGroup(layout, placed, RANKS).run(tokens, 1, combine_dtype=combine_dtype)
    kind = torch.bfloat16 if wire is CombineWire.BF16 else combine_dtype or torch.bfloat16
    for rank, mine, out in zip(RANKS, tokens, done.outputs, strict=True):
        if combine_dtype is torch.float16:  # the experts' results were rounded to it
            close = reduced_reference(placed, rank, mine, 1, kind)
            assert torch.allclose(out.float(), close.float(), rtol=0.05, atol=0.1)
        else:
            assert torch.equal(out, reduced_reference(placed, rank, mine, 1, kind))
    exact = ExchangeGroup(BASE, placed, RANKS).run(tokens, 1, combine_dtype=combine_dtype)
    # Equal where no token has two experts on one other rank.
    assert sum(done.combine_bytes.values()) <= sum(exact.combine_bytes.values())
    assert sum(done.dispatch_bytes.values()) >= sum(exact.dispatch_bytes.values())


def test_reduced_equals_exact_where_every_sum_is_exact(way, generator):
    x = torch.randint(-4, 5, (6, 200), generator=generator).bfloat16()
    ids = torch.rand(6, 7, generator=generator).argsort(1)[:, :5].contiguous()
    weights = torch.full((6, 5), 0.25)
    placed = draw_map(REDUCED, RANKS, generator)
    tokens = [(x, ids, weights)] * 3
    outs = [
        ExchangeGroup(layout, placed, RANKS).run(tokens, 0, identity_expert).outputs
        for layout in (BASE, REDUCED)
    ]
    for exact, reduced in zip(*outs, strict=True):
        assert torch.equal(exact, reduced)


def test_fp8_rows_arrive_as_quantised_wherever_the_experts_live(way, generator):
    tokens = drawn(FP8, generator)
    tokens[0][0][3] = 0
    tokens[0][0][4, 130] = 30000.0
    seen = [
        (dequantise_torch(*quantise_torch(x), torch.bfloat16), ids, weights)
        for x, ids, weights in tokens
    ]
    assert not torch.equal(seen[0][0], tokens[0][0]), "something was rounded"
    for ranks in (RANKS, RANKS[:1]):
        group = ExchangeGroup(FP8, draw_map(FP8, ranks, generator), ranks)
        done = group.run(tokens[: len(ranks)], 0)
        for mine, out in zip(seen, done.outputs, strict=False):
            assert torch.equal(out, reference(*mine, 0))
    native_rows = ExchangeGroup(BASE, draw_map(BASE, RANKS, generator), RANKS).run(tokens, 0)
    assert sum(done.dispatch_bytes.values()) < sum(native_rows.dispatch_bytes.values())


def test_what_is_not_finite_stays_visible_in_fp8(generator):
    x, ids, weights = draw_tokens(FP8, 2, generator, masked=0.0)
    x[0, 7] = float("nan")
    x[0, 150] = float("inf")
    group = ExchangeGroup(FP8, draw_map(FP8, RANKS[:1], generator), RANKS[:1])
    out = group.run([(x, ids, weights)], 0).outputs[0]
    assert out[0, [7, 150]].isnan().all()
    assert out[0].isfinite().sum() == 198
    assert out[1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_results_travel_in_bf16(way, generator, dtype):
    layout = dataclasses.replace(BASE, dtype=dtype, combine_wire=CombineWire.BF16)
    tokens = drawn(layout, generator)
    group = ExchangeGroup(layout, draw_map(layout, RANKS, generator), RANKS)
    done = group.run(tokens, 1, combine_dtype=torch.float32)
    for mine, out in zip(tokens, done.outputs, strict=True):
        assert torch.equal(out, reference(*mine, 1, combine_dtype=torch.bfloat16))


def test_a_choice_beyond_the_rows_is_refused_where_this_rank_adds_up(generator):
    group = ExchangeGroup(REDUCED, ExpertMap.even(num_layers=2, num_logical=7, ranks=RANKS), RANKS)
    first, second = group.exchanges[:2]
    stamp = Stamp(1, 0, 0, 0)
    x, _, weights = draw_tokens(REDUCED, 2, generator)
    ids = torch.full((2, 5), second.experts[0][0])
    outgoing = first.send(x, ids, weights, stamp)
    buffer = group._window(1, 0)
    first.write_dispatch(outgoing, 1, buffer)
    at = 64 + 4 * len(second.experts[0])
    buffer[at : at + 4].view("i4")[0] = 2 * 5  # row 2 of 2
    mine = second.send(x[:0], ids[:0], weights[:0], stamp)
    empty = group._window(1, 0)
    group.exchanges[2].write_dispatch(
        group.exchanges[2].send(x[:0], ids[:0], weights[:0], stamp), 1, empty
    )
    with pytest.raises(MessageMismatch, match="highest row"):
        second.receive(mine, {0: buffer, 2: empty})


def test_a_message_that_claims_more_than_its_window_holds_is_refused(generator):
    group = ExchangeGroup(BASE, ExpertMap.even(num_layers=2, num_logical=7, ranks=[0, 1]), [0, 1])
    first, second = group.exchanges
    tokens = draw_tokens(BASE, 9, generator, hot=second.experts[0][0], masked=0.0)
    outgoing = first.send(*tokens, Stamp(1, 0, 0, 0))
    buffer, empty = group._window(1, 0), group._window(0, 0)
    nbytes = first.write_dispatch(outgoing, 1, buffer)
    assert nbytes == first.dispatch_bytes(outgoing, 1)
    mine = second.send(*(part[:0] for part in tokens), Stamp(1, 0, 0, 0))
    with pytest.raises(MessageMismatch, match="bytes"):
        second.receive(mine, {0: buffer[: nbytes - 1]})
    rows, handle = second.receive(mine, {0: buffer})
    second.write_dispatch(mine, 0, empty)
    arrived, sent = first.receive(outgoing, {1: empty})
    stamp = Stamp(1, 0, 0, 1)
    back = np.zeros(BASE.combine_window_bytes(), np.uint8)
    nbytes = second.write_combine(second.returning(rows.rows, handle, stamp), 0, back)
    returning = first.returning(arrived.rows, sent, stamp)
    with pytest.raises(MessageMismatch, match="bytes"):
        first.finish(returning, {1: back[: nbytes - 1]})
    assert first.finish(returning, {1: back[:nbytes]}).shape == (9, 200)


def test_members_must_agree_on_the_options():
    others = {
        "combine": {"combine": CombineMode.REDUCED},
        "dispatch_wire": {"dispatch_wire": DispatchWire.FP8},
        "combine_wire": {"combine_wire": CombineWire.BF16},
    }
    for name, change in others.items():
        with pair(layouts=(LAYOUT, dataclasses.replace(LAYOUT, **change))) as dispatchers:
            offers = prepared(dispatchers, 1)
            with pytest.raises(LayoutMismatch) as caught:
                dispatchers[0].install({1: offers[1][0]})
            assert caught.value.name == name


def test_all_options_at_once_over_windows_that_grow(generator):
    layout = dataclasses.replace(
        LAYOUT,
        hidden=256,
        max_tokens=40,
        combine=CombineMode.REDUCED,
        dispatch_wire=DispatchWire.FP8,
        combine_wire=CombineWire.BF16,
    )
    tokens = [draw_tokens(layout, n, generator, masked=0.1) for n in (40, 31)]
    with pair(layouts=(layout, layout), window_slack=0.05) as dispatchers:
        install(dispatchers, 1)

        def run(rank: int) -> torch.Tensor:
            dispatchers[rank].begin_pass()
            outs = [run_layer(dispatchers[rank], *tokens[rank], 0) for _ in range(3)]
            dispatchers[rank].end_pass()
            assert torch.equal(outs[0], outs[1])
            assert torch.equal(outs[0], outs[2])
            return outs[0]

        outs = both(lambda: run(0), lambda: run(1))
        assert min(d.statistics().grown_windows for d in dispatchers) > 0
    for mine, out in zip(tokens, outs, strict=True):
        assert torch.allclose(out.float(), reference(*mine, 0).float(), rtol=0.1, atol=0.3)
