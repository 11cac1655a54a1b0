"""Dispatch over the transfer engine: one write with an immediate per peer and phase.

    prepare   fresh receive windows for an epoch; the old ones are dropped
    install   everybody's windows are in hand: passes may start
    dispatch  assemble | write to each peer | wait for each peer's message | sort by expert
    combine   assemble | write to each peer | wait for each peer's message | weighted sums

Two windows per peer and microbatch are enough. A rank sends phase n + 1 only after it has read
everybody's phase n, so a peer that holds all messages of phase n + 1 may overwrite the window of
phase n: that is where its message of phase n + 2 goes. No barrier is needed. Each microbatch has
windows, immediates and an order of its own, so one may be in flight while another goes on.

Windows are sized for an even share of `config.window_tokens`, and grow by agreement when a rank
has to send more: see `dispatch.growth`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from configs.schema import DispatchConfig, MissingExperts
from dispatch.delivery import Delivery
from dispatch.exchange import Exchange
from dispatch.exchange_calls import ExchangeCalls
from dispatch.expert_map import ExpertMap
from dispatch.layout import DispatchLayout
from dispatch.pass_calls import ChangingGroup, offer_of
from dispatch.weighted_sum import WeightedSum
from dispatch.windows import ReceiveWindow, SendWindow, Staging, expected_choices, window_sizes

if TYPE_CHECKING:
    from transfer import TransferEngine

logger = logging.getLogger(__name__)


class TransferDispatcher(ChangingGroup, ExchangeCalls):
    """A `Dispatcher` for a group whose membership changes.

    Made once per process; `prepare` and `install` lead from epoch to epoch, in any state. After
    an error in a pass every call but these two is refused. Not thread-safe.

    Calls that send or receive also raise `transfer.Interrupted`, when the engine was interrupted:
    that pass is lost.

    Args:
        engine: Open, connected to every member before `install`; not owned.
        config: Deadlines.
        layout: Sizes, the same on every member.
    """

    def __init__(
        self, engine: TransferEngine, config: DispatchConfig, *, layout: DispatchLayout
    ) -> None:
        super().__init__(layout)
        self._engine = engine
        self._config = config
        self._weighted_sum = WeightedSum(layout)
        self._staging = Staging(engine, layout)
        self._exchange: Exchange | None = None
        self._delivery: Delivery | None = None
        self._windows: dict[int, ReceiveWindow] = {}  # rank -> my windows for it
        self._members: dict[int, str] = {}

    def prepare(
        self,
        *,
        epoch: int,
        rank: int,
        members: Mapping[int, str],
        expert_map: ExpertMap,
        missing_experts: MissingExperts = MissingExperts.WAIT,
    ) -> dict[int, bytes]:
        """Leave the old epoch and open fresh receive windows for the new one.

        Args:
            epoch: The new epoch, greater than the last.
            rank: This rank.
            members: Rank -> peer name of all members, this one included.
            expert_map: Where the experts live in the new epoch.
            missing_experts: `wait`: a choice whose expert nobody holds is an error. `degrade`: it
                is left out and the token's other weights are scaled up.

        Returns:
            Other rank -> an offer that the caller has to deliver to that rank's `install`.

        Raises:
            InputInvalid: The epoch is not newer, the map does not fit the layout, or `rank` is no
                member. The dispatcher is as before.
        """
        self._check_newer(epoch)
        exchange = Exchange(
            self._layout,
            expert_map,
            tuple(members),
            rank,
            missing_experts=missing_experts,
            counters=self._counters,
            weighted_sum=self._weighted_sum,
        )
        self._sequence.become_prepared(epoch)
        self._drop_windows()
        self._exchange, self._members = exchange, dict(members)
        self._open_windows(exchange)
        return {other: window.offer(self._layout, epoch) for other, window in self._windows.items()}

    def _open_windows(self, exchange: Exchange) -> None:
        others = [other for other in exchange.members if other != exchange.rank]
        num_choices = expected_choices(
            self._layout,
            len(exchange.members),
            tokens=self._config.window_tokens,
            slack=self._config.window_slack,
        )
        num_experts = max(map(len, exchange.experts))
        # The widest dispatch window there can be: a peer that holds all experts of a layer.
        self._staging.resize(
            len(others), window_sizes(self._layout, self._layout.num_logical, num_choices)
        )
        for other in others:
            self._windows[other] = ReceiveWindow(
                self._engine,
                self._layout,
                peer=self._members[other],
                num_experts=num_experts,
                num_choices=num_choices,
            )

    def install(self, offers: Mapping[int, bytes]) -> None:
        """Start the prepared epoch: all other members' windows are in hand.

        Args:
            offers: Other rank -> what its `prepare` returned for this rank.

        Raises:
            CallOrder: Nothing is prepared.
            StaleEpoch: An offer is for another epoch.
            LayoutMismatch: An offer is missing, or a member was configured with other sizes.
        """
        self._sequence.check_prepared()
        exchange, epoch = self._exchange, self.epoch
        assert exchange is not None
        targets: dict[int, SendWindow] = {}
        for other in self._windows:
            offer = offer_of(offers, other)
            targets[other] = SendWindow.read(offer, self._layout, rank=other, epoch=epoch)
        self._delivery = Delivery(
            self._engine,
            exchange,
            epoch=epoch,
            timeout_s=self._config.pass_timeout_s,
            peers={other: self._members[other] for other in self._windows},
            windows=self._windows,
            targets=targets,
            staging=self._staging,
            counters=self._counters,
            num_windows=2 * self._layout.microbatches,
        )
        self._sequence.become_idle()
        logger.debug("epoch %d installed on rank %d", epoch, exchange.rank)

    def close(self) -> None:
        """Withdraw everything that was offered and let go of the memory. Idempotent."""
        self._sequence.become_failed()
        self._drop_windows()
        self._staging.close()

    def _first_messages(self) -> list[tuple[str, int]]:
        return self._installed()[1].first_messages()

    def _installed(self) -> tuple[Exchange, Delivery]:
        exchange, delivery = self._exchange, self._delivery
        assert exchange is not None
        assert delivery is not None
        return exchange, delivery

    def _drop_windows(self) -> None:
        self._delivery = None
        for window in self._windows.values():
            window.drop()
        self._windows = {}
