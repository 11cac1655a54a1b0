"""What a worker does when the view changes: new windows, missing experts, then passes again.

The coordinator of `elastic` decides when; this is the how. Called on the rank loop's thread only.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from moe_runtime.messages import ViewCommitted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from configs.schema import MissingExperts
    from dispatch import TransferDispatcher
    from elastic import ExpertLoader, View
    from moe_runtime.front_link import FrontLink
    from moe_runtime.models.experts import ExpertBank

logger = logging.getLogger(__name__)


class WorkerMember:
    """Implements `elastic.GroupMember` for a worker that serves a model."""

    def __init__(
        self,
        *,
        rank: int,
        incarnation: str,
        dispatcher: TransferDispatcher,
        bank: ExpertBank,
        loader: ExpertLoader,
        missing_experts: MissingExperts,
        warm_up: Callable[[], None],
        link: FrontLink,
    ) -> None:
        self._rank = rank
        self._incarnation = incarnation
        self._dispatcher = dispatcher
        self._bank = bank
        self._loader = loader
        self._missing_experts = missing_experts
        self._warm_up = warm_up
        self._link = link

    def committed(self, view: View) -> None:
        """Tell the front at once, so that it can move the requests of lost workers."""
        self._link.send(
            ViewCommitted(
                incarnation=self._incarnation,
                view=view.encode(),
                members=[member.incarnation for member in view.members],
                epoch=view.epoch,
            )
        )

    def prepare(self, view: View) -> dict[int, bytes]:
        """Open fresh receive windows for the view's other members."""
        return self._dispatcher.prepare(
            epoch=view.epoch,
            rank=self._rank,
            members={member.rank: member.incarnation for member in view.members},
            expert_map=view.expert_map,
            missing_experts=self._missing_experts,
        )

    def load(self, view: View) -> None:
        """Make this rank's experts resident: from a peer, the pool or the checkpoint."""
        experts = view.expert_map
        missing = self._bank.retain(
            (layer, expert)
            for layer in range(experts.num_layers)
            for expert in experts.experts_of(self._rank, layer)
        )
        if missing:
            served = self._loader.load(missing)
            self._warm_up()
            milliseconds = served.elapsed_s * 1e3
            logger.info("epoch %d: experts in %.0f ms: %s", view.epoch, milliseconds, served)

    def install(self, view: View, offers: Mapping[int, bytes]) -> None:
        """Every member's windows are in hand: passes of this epoch may start."""
        self._dispatcher.install(offers)
