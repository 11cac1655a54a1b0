"""Whatever the placement, the number of ranks and the routing: same bits, nothing lost."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import MissingExperts
from dispatch import DispatchLayout, ExpertMap
from tests.support.exchange_group import ExchangeGroup
from tests.support.moe_reference import draw_map, draw_tokens, identity_expert, reference

SETTINGS = settings(max_examples=60, deadline=None)


@st.composite
def cases(draw):
    layout = DispatchLayout(
        hidden=draw(st.sampled_from([1, 3, 8, 40])),
        topk=draw(st.integers(1, 9)),
        num_logical=draw(st.sampled_from([1, 2, 7, 8, 60])),
        num_layers=2,
        dtype=draw(st.sampled_from([torch.bfloat16, torch.float32])),
        max_tokens=8,
    )
    ranks = draw(st.lists(st.integers(0, 20), min_size=1, max_size=6, unique=True))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 32)))
    hot = draw(st.one_of(st.none(), st.integers(0, layout.num_logical - 1)))
    masked = draw(st.sampled_from([0.0, 0.2, 1.0]))
    tokens = [
        draw_tokens(layout, draw(st.integers(0, 8)), generator, masked=masked, hot=hot)
        for _ in ranks
    ]
    return layout, sorted(ranks), generator, tokens, draw(st.integers(0, 1))


@SETTINGS
@given(case=cases(), widen=st.booleans())
def test_bits_are_those_of_one_token_at_a_time(case, widen):
    layout, ranks, generator, tokens, layer = case
    kind = torch.float32 if widen else None
    group = ExchangeGroup(layout, draw_map(layout, ranks, generator), ranks)
    outputs = group.run(tokens, layer, combine_dtype=kind).outputs
    for mine, out in zip(tokens, outputs, strict=True):
        assert torch.equal(out, reference(*mine, layer, combine_dtype=kind))


@SETTINGS
@given(case=cases())
def test_placement_and_rank_count_do_not_matter(case):
    layout, ranks, generator, tokens, layer = case
    maps = [
        draw_map(layout, ranks, generator, instances_max=3),
        ExpertMap.even(num_layers=2, num_logical=layout.num_logical, ranks=ranks),
        ExpertMap.even(num_layers=2, num_logical=layout.num_logical, ranks=ranks[:1]),
    ]
    several = [ExchangeGroup(layout, placed, ranks).run(tokens, layer).outputs for placed in maps]
    alone = [
        ExchangeGroup(layout, maps[2], ranks[:1]).run([mine], layer).outputs[0] for mine in tokens
    ]
    for outputs in several:
        for out, want in zip(outputs, alone, strict=True):
            assert torch.equal(out, want)


@SETTINGS
@given(case=cases())
def test_every_choice_arrives_exactly_once_in_order(case):
    layout, ranks, generator, tokens, layer = case
    layout = DispatchLayout(
        hidden=3,
        topk=layout.topk,
        num_logical=layout.num_logical,
        num_layers=2,
        dtype=torch.float32,
        max_tokens=8,
    )
    # The row says where it comes from: (position of the source, token, 0).
    tokens = [
        (torch.tensor([[s, t, 0] for t in range(len(i))]).float().view(-1, 3), i, w)
        for s, (_, i, w) in enumerate(tokens)
    ]
    placed = draw_map(layout, ranks, generator)
    group = ExchangeGroup(layout, placed, ranks)
    done = group.run(tokens, layer)
    arrived = sum(sum(rows.counts) for rows in done.arrived)
    assert arrived == sum(int((ids >= 0).sum()) for _, ids, _ in tokens)
    for rank, rows in zip(ranks, done.arrived, strict=True):
        begin = 0
        for expert, count in zip(rows.experts, rows.counts, strict=True):
            want = [
                [source, token, 0]
                for source, (_, ids, _) in enumerate(tokens)
                if placed.route(layer, ranks[source])[expert] == rank
                for token, row in enumerate(ids.tolist())
                for chosen in row
                if chosen == expert
            ]
            assert rows.rows[begin : begin + count].tolist() == want
            begin += count
    sent = sum(int(c.snapshot().routed.sum()) for c in group.counters)
    received = sum(int(c.snapshot().received.sum()) for c in group.counters)
    assert sent == received == arrived


@SETTINGS
@given(case=cases())
def test_identity_experts_return_the_input(case):
    layout, ranks, generator, tokens, layer = case
    group = ExchangeGroup(layout, draw_map(layout, ranks, generator), ranks)
    even = []
    for x, ids, _ in tokens:
        # Weights of powers of two that add up to 1, and short mantissas: every sum is exact.
        x = x.bfloat16().to(layout.dtype)
        num_valid = (ids >= 0).sum(1, keepdim=True)
        usable = 2 ** torch.log2(num_valid.clamp(min=1)).floor().long()
        position = (ids >= 0).cumsum(1)
        ids = torch.where(position <= usable, ids, -1)
        even.append((x, ids, (1.0 / usable).expand(ids.shape).contiguous()))
    outputs = group.run(even, layer, identity_expert).outputs
    for (x, ids, _), out in zip(even, outputs, strict=True):
        want = torch.where((ids >= 0).any(1, keepdim=True), x, 0)
        assert torch.equal(out, want)


@SETTINGS
@given(case=cases())
def test_message_sizes_follow_the_formula(case):
    layout, ranks, generator, tokens, layer = case
    placed = draw_map(layout, ranks, generator)
    done = ExchangeGroup(layout, placed, ranks).run(tokens, layer)
    for (source, target), nbytes in done.dispatch_bytes.items():
        route = placed.route(layer, ranks[source]).tolist()
        ids = tokens[source][1].tolist()
        here = [[c for c in row if c >= 0 and route[c] == ranks[target]] for row in ids]
        num_choices, num_rows = sum(map(len, here)), sum(map(bool, here))
        index_bytes = 4 * (len(placed.experts_of(ranks[target], layer)) + num_choices)
        padded = (index_bytes + 63) // 64 * 64
        row_bytes = layout.hidden * layout.dtype.itemsize
        assert nbytes == 64 + padded + num_rows * row_bytes
        assert done.combine_bytes[target, source] == 64 + num_choices * row_bytes


@SETTINGS
@given(case=cases(), lost=st.integers(0, 59))
def test_degrading_changes_only_the_tokens_that_lost_an_expert(case, lost):
    layout, ranks, _, tokens, layer = case
    whole = ExpertMap.even(num_layers=2, num_logical=layout.num_logical, ranks=ranks)
    expert = lost % layout.num_logical
    placed = ExpertMap(
        num_layers=2,
        num_logical=layout.num_logical,
        placement={
            rank: tuple(tuple(e for e in experts if e != expert) for experts in layers)
            for rank, layers in whole.placement.items()
        },
    )
    degrade = MissingExperts.DEGRADE
    before = ExchangeGroup(layout, whole, ranks).run(tokens, layer).outputs
    after = ExchangeGroup(layout, placed, ranks, missing_experts=degrade).run(tokens, layer).outputs
    for (_, ids, _), full, partial in zip(tokens, before, after, strict=True):
        untouched = ~(ids == expert).any(1)
        assert torch.equal(full[untouched], partial[untouched])
