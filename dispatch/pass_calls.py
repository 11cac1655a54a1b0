"""What every dispatcher does at the ends of a pass, and before the first message of an exchange."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from dispatch.errors import InputInvalid, LayoutMismatch
from dispatch.layout import DispatchLayout
from dispatch.message import Stamp
from dispatch.passes import PassSequence, State
from dispatch.statistics import Counters, DispatchStatistics
from dispatch.validation import check_layer


class PassCalls:
    """The calls of a `Dispatcher` that send nothing. Not thread-safe.

    Args:
        layout: Sizes.
    """

    def __init__(self, layout: DispatchLayout) -> None:
        self._layout = layout
        self._counters = Counters(layout)
        self._sequence = PassSequence(layout.microbatches)

    def begin_pass(self) -> None:
        """See `Dispatcher.begin_pass`."""
        self._sequence.begin()

    def end_pass(self) -> None:
        """See `Dispatcher.end_pass`."""
        self._sequence.end()
        self._counters.passes += 1

    def statistics(self) -> DispatchStatistics:
        """See `Dispatcher.statistics`."""
        return self._counters.snapshot()

    def _dispatching(self, layer: int, microbatch: int) -> Stamp:
        """Return the stamp of a dispatch that may begin now.

        Raises:
            CallOrder, InputInvalid: It may not, or there is no such layer or microbatch.
        """
        check_layer(self._layout, layer)
        return self._sequence.dispatching(layer, microbatch)


class FixedGroup(PassCalls):
    """Of a group that stays as it is: passes may start at once."""

    def __init__(self, layout: DispatchLayout) -> None:
        super().__init__(layout)
        self._sequence.become_prepared(0)
        self._sequence.become_idle()


class ChangingGroup(PassCalls, ABC):
    """Of a group whose membership changes: `prepare` and `install` lead from epoch to epoch."""

    @property
    def epoch(self) -> int:
        """The epoch of the last `prepare`; 0 before the first."""
        return self._sequence.epoch

    def pass_started_by_peer(self) -> list[tuple[str, int]]:
        """Return what `TransferEngine.wait_any` has to watch to see a peer begin the next pass.

        Empty when there are no peers or no pass may begin.
        """
        return self._first_messages() if self._sequence.state is State.IDLE else []

    @abstractmethod
    def _first_messages(self) -> list[tuple[str, int]]:
        """Return (peer, immediate) of the messages that may begin a pass of what is installed."""

    def _check_newer(self, epoch: int) -> None:
        if epoch <= self.epoch:
            raise InputInvalid(name="epoch", observed=str(epoch), expected=f"> {self.epoch}")


def offer_of(offers: Mapping[int, bytes], rank: int) -> bytes:
    """Return what a member's `prepare` returned for this rank.

    Raises:
        LayoutMismatch: It is missing.
    """
    if rank not in offers:
        raise LayoutMismatch(rank=rank, name="number of offers", observed=0, expected=1)
    return offers[rank]
