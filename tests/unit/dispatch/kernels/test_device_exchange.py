"""All operations together: several ranks in one process against the CPU path, bit for bit."""

from __future__ import annotations

import pytest
import torch

from configs.schema import CombineMode, CombineWire, DispatchWire
from dispatch.device_exchange import DeviceExchange
from dispatch.errors import CapacityExceeded, InputInvalid, MessageMismatch
from dispatch.expert_map import ExpertMap
from dispatch.kernels.fp8 import dequantise
from dispatch.layout import DispatchLayout
from dispatch.local import LocalDispatcher
from dispatch.message import Stamp

STAMP = Stamp(epoch=4, pass_id=2, layer=1, parity=0)
CPU = torch.device("cpu")


def layout_of(num_experts, topk, hidden, dtype, **options):
    return DispatchLayout(
        hidden=hidden, topk=topk, num_logical=num_experts, num_layers=2, dtype=dtype,
        max_tokens=6, **options,
    )  # fmt: skip


def expert(rows, number, dtype):
    """Some function that is one expert's own."""
    return (rows.float() * (number + 1) + 0.25).to(dtype)


def by_the_cpu_path(layout, x, ids, weights, dtype):
    dispatcher = LocalDispatcher(layout=layout)
    dispatcher.begin_pass()
    rows, handle = dispatcher.dispatch(x, ids, weights, layer=1)
    parts = rows.rows.split(list(rows.counts))
    results = [expert(part, e, dtype) for e, part in zip(rows.experts, parts, strict=True)]
    out = dispatcher.combine(torch.cat(results), handle)
    dispatcher.end_pass()
    return out


class Group:
    """The ranks of an exchange, and the wires between them."""

    def __init__(self, layout, expert_map, **options):
        self.layout, self.map = layout, expert_map
        self.ranks = [
            DeviceExchange(layout, expert_map, expert_map.ranks, rank, device=CPU, **options)
            for rank in expert_map.ranks
        ]

    def carry(self, parity, sizes, dtype=None):
        for source, sender in enumerate(self.ranks):
            for target, receiver in enumerate(self.ranks):
                if source != target:
                    size = int(sizes[source][target])
                    message = sender.outgoing(parity)[target][:size]
                    window = receiver.incoming(parity)
                    begin = sender.result_offset(dtype) if parity else source * window.shape[1]
                    window.view(-1)[begin : begin + size] = message

    def dispatch(self, tokens):
        sent = [rank.send(*one, STAMP) for rank, one in zip(self.ranks, tokens, strict=True)]
        self.carry(0, [one.num_bytes for one in sent])
        received = [rank.receive(one) for rank, one in zip(self.ranks, sent, strict=True)]
        for rank, one in zip(self.ranks, received, strict=True):
            rank.check(one.arranged.faults)
        return sent, received

    def compute(self, position, received, dtype):
        rank = self.map.ranks[position]
        rows, bounds = received.rows, received.arranged.bounds
        if received.scales is not None:
            rows = dequantise(rows, received.scales, self.layout.dtype)
        results = torch.full((len(rows), self.layout.hidden), torch.nan, dtype=dtype)
        for index, number in enumerate(self.map.experts_of(rank, 1)):
            begin, end = bounds[index : index + 2].tolist()
            results[begin:end] = expert(rows[begin:end], number, dtype)
        return results

    def run(self, tokens, dtype):
        sent, received = self.dispatch(tokens)
        sizes, wire = [], None
        for position, (rank, one) in enumerate(zip(self.ranks, sent, strict=True)):
            results = self.compute(position, received[position], dtype)
            wire, num_bytes = rank.send_results(results, received[position], one)
            sizes.append(num_bytes)
        self.carry(1, sizes, wire)
        outs = []
        for rank, one in zip(self.ranks, sent, strict=True):
            out, faults = rank.finish(one, wire)
            rank.check(faults)
            outs.append(out)
        return outs


def tokens_of(layout, shares):
    return [
        (
            torch.randn(count, layout.hidden).to(layout.dtype),
            torch.randint(-1, layout.num_logical, (count, layout.topk)),
            torch.rand(count, layout.topk),
        )
        for count in shares
    ]


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


def test_too_small_a_capacity_is_told(interpreted) -> None:
    layout = layout_of(2, 1, 16, torch.bfloat16)
    expert_map = ExpertMap.even(num_layers=2, num_logical=2, ranks=[0, 1])
    group = Group(layout, expert_map, capacity=5, alignment=1)
    one = torch.zeros(3, 16, dtype=torch.bfloat16), torch.zeros(3, 1).long(), torch.ones(3, 1)
    with pytest.raises(InputInvalid, match="rows that arrived"):
        group.dispatch([one, one])


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
