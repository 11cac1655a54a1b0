"""Several ranks of an exchange on a device in one process, and the wires between them."""

from __future__ import annotations

import torch

from dispatch.device_exchange import DeviceExchange
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
