"""Dispatch within one rank: no messages, the same rows, the same bits."""

from __future__ import annotations

from collections.abc import Mapping

from configs.schema import MissingExperts
from dispatch.carrier import Size, Write
from dispatch.exchange import Exchange
from dispatch.exchange_calls import ExchangeCalls
from dispatch.expert_map import ExpertMap
from dispatch.layout import Bytes, DispatchLayout
from dispatch.message import Stamp
from dispatch.pass_calls import FixedGroup
from dispatch.weighted_sum import WeightedSum


class Nobody:
    """The `Carrier` of a rank without others: nothing is sent, and nothing waited for."""

    def send(self, stamp: Stamp, size: Size, write: Write, *, due: Size | None = None) -> None:
        """See `Carrier.send`."""

    def receive(
        self, stamp: Stamp, shared: bytes, timeout_s: float | None = None
    ) -> Mapping[int, Bytes]:
        """See `Carrier.receive`."""
        return {}


class LocalDispatcher(FixedGroup, ExchangeCalls):
    """A `Dispatcher` for a rank that is alone, which never raises PassFailed. Not thread-safe.

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
        exchange = Exchange(
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
        self._parts = exchange, Nobody()

    def _installed(self) -> tuple[Exchange, Nobody]:
        return self._parts
