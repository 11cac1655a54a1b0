"""Dispatch within one rank: no messages, the same rows, the same bits."""

from __future__ import annotations

import torch

from configs.schema import MissingExperts
from dispatch.dispatcher import Dispatcher
from dispatch.exchange import Exchange
from dispatch.expert_map import ExpertMap
from dispatch.handle import DispatchHandle, ExpertRows, Outgoing, Returning
from dispatch.layout import DispatchLayout
from dispatch.pass_calls import FixedGroup
from dispatch.passes import Call
from dispatch.weighted_sum import WeightedSum


class LocalDispatcher(FixedGroup, Dispatcher):
    """A `Dispatcher` for a rank that is alone. Not thread-safe.

    Args:
        layout: Sizes.
        expert_map: Where the experts live; default: all on this rank.
        rank: This rank.
        missing_experts: What to do with experts that this rank does not hold.

    Raises:
        InputInvalid: The map does not fit the layout.
    """

    def __init__(
        self,
        *,
        layout: DispatchLayout,
        expert_map: ExpertMap | None = None,
        rank: int = 0,
        missing_experts: MissingExperts = MissingExperts.WAIT,
    ) -> None:
        super().__init__(layout)
        self._exchange = Exchange(
            layout,
            expert_map
            or ExpertMap.even(
                num_layers=layout.num_layers, num_logical=layout.num_logical, ranks=[rank]
            ),
            [rank],
            rank,
            missing_experts=missing_experts,
            counters=self._counters,
            weighted_sum=WeightedSum(layout),
        )

    def dispatch_send(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        layer: int,
        microbatch: int = 0,
        more: bool = False,
    ) -> Outgoing:
        """See `Dispatcher.dispatch_send`; never raises PassFailed."""
        stamp = self._dispatching(layer, microbatch)
        outgoing = self._exchange.send(x, topk_ids, topk_weights, stamp, more=more)
        self._sequence.expect(Call.DISPATCH_RECV, outgoing, stamp)
        return outgoing

    def dispatch_recv(
        self, outgoing: Outgoing, *, timeout_s: float | None = None
    ) -> tuple[ExpertRows, DispatchHandle]:
        """See `Dispatcher.dispatch_recv`; never raises PassFailed."""
        del timeout_s  # nobody to wait for
        self._sequence.check(Call.DISPATCH_RECV, outgoing, outgoing.stamp)
        rows, handle = self._exchange.receive(outgoing, {})
        self._sequence.expect(Call.COMBINE_SEND, handle, handle.stamp)
        return rows, handle

    def combine_send(self, expert_out: torch.Tensor, handle: DispatchHandle) -> Returning:
        """See `Dispatcher.combine_send`; never raises PassFailed."""
        self._sequence.check(Call.COMBINE_SEND, handle, handle.stamp)
        returning = self._exchange.returning(expert_out, handle, handle.stamp.answer())
        self._sequence.expect(Call.COMBINE_RECV, returning, handle.stamp)
        return returning

    def combine_recv(self, returning: Returning, *, timeout_s: float | None = None) -> torch.Tensor:
        """See `Dispatcher.combine_recv`; never raises PassFailed."""
        del timeout_s
        stamp = returning.handle.stamp
        self._sequence.check(Call.COMBINE_RECV, returning, stamp)
        out = self._exchange.finish(returning, {})
        self._sequence.combined(stamp)
        return out
