"""The order of calls: passes, exchanges in a pass, and what is refused after a failure.

    unprepared --prepare--> prepared --install--> idle --begin_pass--> in pass --end_pass--> idle
                                 ^                                        |
                                 +------ prepare <------ failed <---------+ any error in a pass

Pure: no clock, no tensors. Not thread-safe.
"""

from __future__ import annotations

from enum import StrEnum

from dispatch.errors import CallOrder, StaleEpoch
from dispatch.message import Stamp


class State(StrEnum):
    """Where a dispatcher is; the values read well in an error."""

    UNPREPARED = "unprepared"
    PREPARED = "prepared but not installed"
    IDLE = "between passes"
    IN_PASS = "in a pass"
    AWAITING_COMBINE = "between a dispatch and its combine"
    FAILED = "failed and not prepared again"


class PassSequence:
    """Counts passes and says which call may come next.

    Attributes:
        state: See `State`.
        epoch: Of the last `prepare`.
        pass_id: Of the current or last pass; -1 before the first.
    """

    def __init__(self) -> None:
        self.state = State.UNPREPARED
        self.epoch = 0
        self.pass_id = -1
        self._outstanding: object = None

    def become_prepared(self, epoch: int) -> None:
        """Forget everything of the epoch before. Legal in every state."""
        self.state = State.PREPARED
        self.epoch = epoch
        self.pass_id = -1
        self._outstanding = None

    def become_idle(self) -> None:
        """All offers are in hand."""
        self._require("install", State.PREPARED)
        self.state = State.IDLE

    def become_failed(self) -> None:
        """The pass is lost; only `become_prepared` leads on."""
        self.state = State.FAILED
        self._outstanding = None

    def begin(self) -> None:
        """Start the next pass."""
        self._require("begin_pass", State.IDLE)
        self.state = State.IN_PASS
        self.pass_id += 1

    def end(self) -> None:
        """Finish the pass; every dispatch has had its combine."""
        self._require("end_pass", State.IN_PASS)
        self.state = State.IDLE

    def dispatching(self, layer: int) -> Stamp:
        """Return the stamp of a dispatch in this layer."""
        self._require("dispatch", State.IN_PASS)
        return Stamp(self.epoch, self.pass_id, layer, 0)

    def dispatched(self, handle: object) -> None:
        """A dispatch is complete; its combine comes next."""
        self._require("dispatch", State.IN_PASS)
        self.state = State.AWAITING_COMBINE
        self._outstanding = handle

    def combining(self, handle: object, stamp: Stamp) -> Stamp:
        """Return the stamp of the combine that belongs to `handle`.

        Args:
            handle: What `dispatched` was told last; no other is accepted.
            stamp: The stamp of its dispatch.

        Raises:
            StaleEpoch: The handle is of another epoch, or it was used already.
        """
        if handle is not self._outstanding:
            raise StaleEpoch(
                what="handle",
                observed=f"epoch {stamp.epoch}, pass {stamp.pass_id}, layer {stamp.layer}",
                expected=f"epoch {self.epoch}, pass {self.pass_id} ({self.state})",
            )
        return stamp._replace(parity=1)

    def combined(self) -> None:
        """The combine is complete."""
        self._require("combine", State.AWAITING_COMBINE)
        self.state = State.IN_PASS
        self._outstanding = None

    def _require(self, call: str, state: State) -> None:
        if self.state is not state:
            raise CallOrder(call=call, state=self.state.value)
