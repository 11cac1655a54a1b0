"""All ranks of an exchange in one thread: messages are arrays handed over directly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from configs.schema import MissingExperts
from dispatch import DispatchLayout, ExpertMap, ExpertRows
from dispatch.exchange import Exchange
from dispatch.message import Stamp
from dispatch.statistics import Counters
from dispatch.weighted_sum import WeightedSum
from tests.support.moe_reference import Expert, run_experts, scale_expert

Tokens = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Exchanged:
    outputs: list[torch.Tensor]
    arrived: list[ExpertRows]
    dispatch_bytes: dict[tuple[int, int], int]  # (source, target) positions
    combine_bytes: dict[tuple[int, int], int]


class ExchangeGroup:
    def __init__(
        self,
        layout: DispatchLayout,
        expert_map: ExpertMap,
        ranks: Sequence[int],
        *,
        missing_experts: MissingExperts = MissingExperts.WAIT,
    ) -> None:
        self.layout = layout
        self.counters = [Counters(layout) for _ in ranks]
        self.exchanges = [
            Exchange(
                layout,
                expert_map,
                ranks,
                rank,
                missing_experts=missing_experts,
                counters=counters,
                weighted_sum=WeightedSum(layout),
            )
            for rank, counters in zip(sorted(ranks), self.counters, strict=True)
        ]

    def run(
        self,
        tokens: Sequence[Tokens],
        layer: int,
        expert_fn: Expert = scale_expert,
        combine_dtype: torch.dtype | None = None,
    ) -> Exchanged:
        size = len(self.exchanges)
        pairs = [(s, t) for s in range(size) for t in range(size) if s != t]
        stamp = Stamp(1, 0, layer, 0)
        outgoing = [e.send(*mine, stamp) for e, mine in zip(self.exchanges, tokens, strict=True)]
        sent = {pair: self._window(pair[1], layer) for pair in pairs}
        dispatch_bytes = {
            (s, t): self.exchanges[s].write_dispatch(outgoing[s], t, sent[s, t]) for s, t in pairs
        }
        received = [
            e.receive(outgoing[t], {s: sent[s, t] for s in range(size) if s != t})
            for t, e in enumerate(self.exchanges)
        ]
        for window in sent.values():
            window[:] = 0xA5  # what was received must not live in the windows
        returning = [
            e.returning(
                run_experts(rows.rows, rows.counts, rows.experts, layer, expert_fn, combine_dtype),
                handle,
                Stamp(1, 0, layer, 1),
            )
            for e, (rows, handle) in zip(self.exchanges, received, strict=True)
        ]
        returned = {pair: np.zeros(self.layout.combine_window_bytes(), np.uint8) for pair in pairs}
        combine_bytes = {
            (s, t): self.exchanges[s].write_combine(returning[s], t, returned[s, t])
            for s, t in pairs
        }
        outputs = [
            e.finish(returning[t], {s: returned[s, t] for s in range(size) if s != t})
            for t, e in enumerate(self.exchanges)
        ]
        return Exchanged(outputs, [rows for rows, _ in received], dispatch_bytes, combine_bytes)

    def _window(self, target: int, layer: int) -> np.ndarray:
        num_experts = len(self.exchanges[target].experts[layer])
        return np.zeros(self.layout.dispatch_window_bytes(num_experts), np.uint8)
