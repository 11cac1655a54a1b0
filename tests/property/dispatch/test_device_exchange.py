"""The exchange on a device, by its torch references, against one rank that holds everything."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import DispatchWire
from dispatch.expert_map import ExpertMap
from tests.support.device_group import Group, by_the_cpu_path, layout_of


@st.composite
def exchanges(draw):
    """Any placement, uneven or with instances, over any ranks; any ids of the layer, and -1."""
    num_experts = draw(st.integers(1, 12))
    ranks = draw(st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True))
    owners = draw(
        st.lists(
            st.sets(st.sampled_from(ranks), min_size=1, max_size=2),
            min_size=num_experts, max_size=num_experts,
        )
    )  # fmt: skip
    placement = {rank: tuple(e for e, who in enumerate(owners) if rank in who) for rank in ranks}
    topk = draw(st.integers(1, 6))
    shares = [draw(st.integers(0, 6)) for _ in ranks]
    number = st.integers(-1, num_experts - 1)
    ids = [
        draw(st.lists(st.lists(number, min_size=topk, max_size=topk), min_size=n, max_size=n))
        for n in shares
    ]
    return num_experts, placement, topk, ids


@settings(deadline=None, max_examples=60)
@given(
    exchange=exchanges(),
    hidden=st.integers(1, 140),
    alignment=st.sampled_from([1, 8, 64]),
    fp8=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_sums_do_not_depend_on_where_experts_and_tokens_are(
    exchange, hidden, alignment, fp8, seed
) -> None:
    num_experts, placement, topk, all_ids = exchange
    torch.manual_seed(seed)
    wire = DispatchWire.FP8 if fp8 else DispatchWire.NATIVE
    layout = layout_of(num_experts, topk, hidden, torch.bfloat16, dispatch_wire=wire)
    expert_map = ExpertMap(
        num_layers=2,
        num_logical=num_experts,
        placement={rank: (held,) * 2 for rank, held in placement.items()},
    )
    tokens = [
        (
            torch.randn(len(ids), hidden).to(torch.bfloat16),
            torch.tensor(ids, dtype=torch.int64).view(len(ids), topk),
            torch.rand(len(ids), topk),
        )
        for ids in all_ids
    ]
    outs = Group(layout, expert_map, alignment=alignment).run(tokens, torch.bfloat16)
    for out, one in zip(outs, tokens, strict=True):
        assert torch.equal(out, by_the_cpu_path(layout, *one, torch.bfloat16))


@settings(deadline=None, max_examples=60)
@given(exchange=exchanges(), hidden=st.integers(1, 40))
def test_nothing_is_lost_and_nothing_added(exchange, hidden) -> None:
    num_experts, placement, topk, all_ids = exchange
    layout = layout_of(num_experts, topk, hidden, torch.float32)
    expert_map = ExpertMap(
        num_layers=2,
        num_logical=num_experts,
        placement={rank: (held,) * 2 for rank, held in placement.items()},
    )
    tokens = [
        (
            torch.ones(len(ids), hidden),
            torch.tensor(ids, dtype=torch.int64).view(len(ids), topk),
            torch.ones(len(ids), topk),
        )
        for ids in all_ids
    ]
    sent, received = Group(layout, expert_map, alignment=1).dispatch(tokens)
    valid = sum(int((ids >= 0).sum()) for _, ids, _ in tokens)
    assert sum(int(one.routed.choice_bounds[-1]) for one in sent) == valid
    assert sum(int(one.arranged.counts.sum()) for one in received) == valid
    total = sum(float(one.rows[: int(one.arranged.counts.sum())].sum()) for one in received)
    assert total == valid * hidden
