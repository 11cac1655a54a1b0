"""Counters of one dispatcher: what was routed where, what arrived, how long it waited."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dispatch.layout import DispatchLayout
from dispatch.routing import Indices, LayerRoute, Routing


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DispatchStatistics:
    """A snapshot; all counts since the dispatcher was made, over all its epochs.

    Attributes:
        passes: Completed passes.
        exchanges: Dispatches that were routed.
        tokens: Tokens of this rank in them.
        routed: [L, E] choices of this rank's tokens for each expert.
        received: [L, E] rows that arrived for each expert of this rank.
        sent_choices: Rank -> choices of this rank's tokens that went there, itself included.
        sent_bytes: Bytes of messages handed to the transport.
        grown_windows: Receive windows that had to grow for a message.
        masked_choices: Choices that were -1.
        degraded_choices: Choices left out because nobody held their expert.
        waited_s: Seconds spent waiting for other ranks' messages.
    """

    passes: int
    exchanges: int
    tokens: int
    routed: Indices
    received: Indices
    sent_choices: Mapping[int, int]
    sent_bytes: int
    grown_windows: int
    masked_choices: int
    degraded_choices: int
    waited_s: float


class Counters:
    """Where a dispatcher counts. Written by its thread; `snapshot` may be called from any."""

    def __init__(self, layout: DispatchLayout) -> None:
        shape = (layout.num_layers, layout.num_logical)
        self.passes = 0
        self.exchanges = 0
        self.tokens = 0
        self.sent_bytes = 0
        self.grown_windows = 0
        self.masked_choices = 0
        self.degraded_choices = 0
        self.waited_s = 0.0
        self._routed = np.zeros(shape, np.int64)
        self._received = np.zeros(shape, np.int64)
        self._sent_choices: dict[int, int] = {}
        self._members: Sequence[int] = ()
        self._rank = -1
        self._routes: Sequence[LayerRoute] = ()
        self._slot_counts: list[Indices] = []
        self._local_counts: list[Indices] = []

    def adopt(self, members: Sequence[int], rank: int, routes: Sequence[LayerRoute]) -> None:
        """Count by the slots of another epoch; what was counted so far is kept."""
        self._routed, self._received, self._sent_choices = self._folded()
        self._members, self._rank, self._routes = members, rank, routes
        mine = members.index(rank)
        self._slot_counts = [np.zeros(route.num_slots, np.int64) for route in routes]
        self._local_counts = [
            np.zeros(route.slot_bounds[mine + 1] - route.slot_bounds[mine], np.int64)
            for route in routes
        ]

    def routed(self, layer: int, routing: Routing, num_tokens: int, num_degraded: int) -> None:
        """Count one dispatch."""
        self.exchanges += 1
        if not num_tokens:
            return
        self.tokens += num_tokens
        self.masked_choices += routing.num_masked
        self.degraded_choices += num_degraded
        self._slot_counts[layer] += routing.counts

    def received(self, layer: int, counts: Indices) -> None:
        """Count the rows that arrived for each local expert."""
        self._local_counts[layer] += counts

    def snapshot(self) -> DispatchStatistics:
        """Return all counters as they are now."""
        routed, received, sent_choices = self._folded()
        return DispatchStatistics(
            passes=self.passes,
            exchanges=self.exchanges,
            tokens=self.tokens,
            routed=routed,
            received=received,
            sent_choices=sent_choices,
            sent_bytes=self.sent_bytes,
            grown_windows=self.grown_windows,
            masked_choices=self.masked_choices,
            degraded_choices=self.degraded_choices,
            waited_s=self.waited_s,
        )

    def _folded(self) -> tuple[Indices, Indices, dict[int, int]]:
        """Return the earlier epochs' counts plus this one's, by expert and by rank."""
        routed, received = self._routed.copy(), self._received.copy()
        sent = dict(self._sent_choices)
        for layer, route in enumerate(self._routes):
            mine = self._members.index(self._rank)
            bounds, experts = route.slot_bounds, route.slot_experts
            np.add.at(routed[layer], experts, self._slot_counts[layer])
            local = experts[bounds[mine] : bounds[mine + 1]]
            received[layer, local] += self._local_counts[layer]
            for rank, begin, end in zip(self._members, bounds, bounds[1:], strict=False):
                sent[rank] = sent.get(rank, 0) + int(self._slot_counts[layer][begin:end].sum())
        return routed, received, sent
