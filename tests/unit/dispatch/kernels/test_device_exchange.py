"""All operations together: several ranks in one process against the CPU path, bit for bit."""

from __future__ import annotations

import pytest
import torch

from configs.schema import CombineMode, CombineWire, DispatchWire
from dispatch.device_exchange import DeviceExchange
from dispatch.errors import CapacityExceeded, InputInvalid, MessageMismatch
from dispatch.expert_map import ExpertMap
from tests.support.device_group import (
    CPU,
    STAMP,
    Group,
    by_the_cpu_path,
    layout_of,
    tokens_of,
)


@pytest.mark.parametrize(
    ("dtype", "result_dtype", "options"),
    [
        (torch.bfloat16, torch.bfloat16, {}),
        (torch.float32, torch.float32, {}),
        (torch.bfloat16, torch.float32, {"combine_wire": CombineWire.BF16}),
        (torch.bfloat16, torch.float32, {"dispatch_wire": DispatchWire.FP8}),
    ],
)
@pytest.mark.parametrize(
    ("placement", "topk", "hidden", "shares"),
    [
        ({0: range(3)}, 2, 7, [5]),
        ({0: [0, 3], 2: [1, 4, 6], 5: [2, 5]}, 3, 130, [4, 0, 6]),
        ({0: [], 1: [0, 1, 2, 3, 4]}, 5, 24, [3, 1]),
        ({0: [0, 1], 1: [0, 1], 2: [1]}, 2, 33, [6, 2, 1]),  # instances of an expert
    ],
)
def test_the_sums_are_those_of_the_cpu_path(
    interpreted, seed, placement, topk, hidden, shares, dtype, result_dtype, options
) -> None:
    num_experts = 1 + max(e for held in placement.values() for e in held)
    layout = layout_of(num_experts, topk, hidden, dtype, **options)
    expert_map = ExpertMap(
        num_layers=2,
        num_logical=num_experts,
        placement={rank: (tuple(held),) * 2 for rank, held in placement.items()},
    )
    tokens = tokens_of(layout, shares)
    outs = Group(layout, expert_map, alignment=8).run(tokens, result_dtype)
    for out, one in zip(outs, tokens, strict=True):
        due = by_the_cpu_path(layout, *one, result_dtype)
        assert out.dtype is due.dtype
        assert torch.equal(out.view(torch.uint8), due.view(torch.uint8))


def test_a_wrong_message_is_named(interpreted, seed) -> None:
    layout = layout_of(4, 2, 16, torch.bfloat16)
    group = Group(layout, ExpertMap.even(num_layers=2, num_logical=4, ranks=[0, 1]))
    tokens = tokens_of(layout, [3, 3])
    sent, _ = group.dispatch(tokens)
    group.ranks[0].incoming(0)[1].view(torch.int32)[11] = -1
    received = group.ranks[0].receive(sent[0])
    with pytest.raises(MessageMismatch) as caught:
        group.ranks[0].check(received.arranged.faults)
    assert (caught.value.source, caught.value.observed) == (1, "sizes")


def test_too_small_a_capacity_is_told_and_nothing_is_written(interpreted) -> None:
    layout = layout_of(2, 1, 16, torch.bfloat16)
    expert_map = ExpertMap.even(num_layers=2, num_logical=2, ranks=[0, 1])
    group = Group(layout, expert_map, capacity=5, alignment=1)
    one = torch.ones(3, 16, dtype=torch.bfloat16), torch.zeros(3, 1).long(), torch.ones(3, 1)
    sent = [rank.send(*one, STAMP) for rank in group.ranks]
    group.carry(0, [one.num_bytes for one in sent])
    received = group.ranks[0].receive(sent[0])
    with pytest.raises(InputInvalid, match="rows that arrived"):
        group.ranks[0].check(received.arranged.faults)
    # Its messages back are empty, so the sources see that they are not the ones due.
    wire, num_bytes = group.ranks[0].send_results(torch.zeros(5, 16), received, sent[0])
    assert num_bytes.tolist() == [64, 64]
    assert int(group.ranks[0].outgoing(1)[1].view(torch.int32)[11]) == 0
    _, faults = group.ranks[0].finish(sent[0], wire)
    with pytest.raises(MessageMismatch):
        group.ranks[0].check(faults)


def test_wrong_input_is_refused_before_anything_runs() -> None:
    layout = layout_of(2, 1, 16, torch.bfloat16)
    expert_map = ExpertMap.even(num_layers=2, num_logical=2, ranks=[0, 1])
    rank = DeviceExchange(layout, expert_map, [0, 1], 0, device=CPU)
    x, ids, weights = tokens_of(layout, [7])[0]
    with pytest.raises(CapacityExceeded):
        rank.send(x, ids, weights, STAMP)
    for arguments, name in (
        ((x[:6].float(), ids[:6], weights[:6]), "dtype of x"),
        ((x[:6, :8].contiguous(), ids[:6], weights[:6]), "shape of x"),
        ((x[:6], ids[:5], weights[:6]), "shape of topk_ids"),
        ((x[:6], ids[:6], weights[:6].half()), "dtype of topk_weights"),
        ((x[:6].to("meta"), ids[:6], weights[:6]), "device of x"),
    ):
        with pytest.raises(InputInvalid) as caught:
            rank.send(*arguments, STAMP)
        assert caught.value.name == name
    with pytest.raises(InputInvalid, match="combine is reduced"):
        DeviceExchange(
            layout_of(2, 1, 16, torch.bfloat16, combine=CombineMode.REDUCED),
            expert_map, [0, 1], 0, device=CPU,
        )  # fmt: skip
    with pytest.raises(InputInvalid, match="rank is 2"):
        DeviceExchange(layout, expert_map, [0, 1], 2, device=CPU)
