"""The order of calls: passes, exchanges in a pass, and what is refused after a failure.

    unprepared --prepare--> prepared --install--> idle --begin_pass--> in pass --end_pass--> idle
                                 ^                                        |
                                 +------ prepare <------ failed <---------+ any error in a pass

Within a pass each microbatch goes round on its own, as often as there are layers:

    free --dispatch_send--> dispatch_recv --> combine_send --> combine_recv --> free

Each call hands out a ticket (the object it returns) that the next one has to bring.

Pure: no clock, no tensors. Not thread-safe.
"""

from __future__ import annotations

from enum import StrEnum

from dispatch.errors import CallOrder, InputInvalid, StaleEpoch
from dispatch.message import Stamp


class State(StrEnum):
    """Where a dispatcher is; the values read well in an error."""

    UNPREPARED = "unprepared"
    PREPARED = "prepared but not installed"
    IDLE = "between passes"
    IN_PASS = "in a pass"
    FAILED = "failed and not prepared again"


class Call(StrEnum):
    """What a microbatch that is not free waits for."""

    DISPATCH_RECV = "dispatch_recv"
    COMBINE_SEND = "combine_send"
    COMBINE_RECV = "combine_recv"


class PassSequence:
    """Counts passes and says which call may come next.

    Args:
        num_microbatches: How many exchanges may be in flight at once.

    Attributes:
        state: See `State`.
        epoch: Of the last `prepare`.
        pass_id: Of the current or last pass; -1 before the first.
    """

    def __init__(self, num_microbatches: int = 1) -> None:
        self.state = State.UNPREPARED
        self.epoch = 0
        self.pass_id = -1
        self._num_microbatches = num_microbatches
        self._due: dict[int, tuple[Call, object]] = {}  # microbatch -> next call and its ticket

    def become_prepared(self, epoch: int) -> None:
        """Forget everything of the epoch before. Legal in every state."""
        self.state = State.PREPARED
        self.epoch = epoch
        self.pass_id = -1
        self._due.clear()

    def check_prepared(self) -> None:
        """Accept an `install` now.

        Raises:
            CallOrder: Nothing is prepared.
        """
        self._require("install", State.PREPARED)

    def become_idle(self) -> None:
        """All offers are in hand."""
        self.check_prepared()
        self.state = State.IDLE

    def become_failed(self) -> None:
        """The pass is lost; only `become_prepared` leads on."""
        self.state = State.FAILED
        self._due.clear()

    def __enter__(self) -> None:
        """Messages are under way: whatever is raised until `__exit__`, this pass is lost."""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """See `__enter__`."""
        if kind is not None:
            self.become_failed()

    def begin(self) -> None:
        """Start the next pass."""
        self._require("begin_pass", State.IDLE)
        self.state = State.IN_PASS
        self.pass_id += 1

    def end(self) -> None:
        """Finish the pass; every dispatch has had its combine."""
        self._require("end_pass", State.IN_PASS)
        for microbatch in self._due:
            self._require_free("end_pass", microbatch)
        self.state = State.IDLE

    def dispatching(self, layer: int, microbatch: int = 0) -> Stamp:
        """Return the stamp of a dispatch in this layer.

        Raises:
            CallOrder: No pass is in progress, or the microbatch is not free.
            InputInvalid: There are fewer microbatches.
        """
        self._require("dispatch", State.IN_PASS)
        if not 0 <= microbatch < self._num_microbatches:
            raise InputInvalid(
                name="microbatch",
                observed=str(microbatch),
                expected=f"0..{self._num_microbatches - 1}",
            )
        self._require_free("dispatch", microbatch)
        return Stamp(self.epoch, self.pass_id, layer, 0, microbatch)

    def expect(self, call: Call, ticket: object, stamp: Stamp) -> None:
        """Let `call` with `ticket` be the next of the stamp's microbatch."""
        assert self.state is State.IN_PASS, "an exchange goes on without a pass"
        self._due[stamp.microbatch] = call, ticket

    def check(self, call: Call, ticket: object, stamp: Stamp) -> None:
        """Accept a call that is due.

        Args:
            call: Which one.
            ticket: What `expect` was told; no other is accepted.
            stamp: Of the exchange that the ticket says it belongs to.

        Raises:
            StaleEpoch: The ticket is of another epoch, it was used already, or it is not for
                this call.
        """
        due = self._due.get(stamp.microbatch)
        if due is None or due[1] is not ticket or due[0] is not call:
            state = self.state if due is None else f"next is {due[0]}"
            raise StaleEpoch(
                what=f"{call} with a handle",
                observed=f"epoch {stamp.epoch}, pass {stamp.pass_id}, layer {stamp.layer}",
                expected=f"epoch {self.epoch}, pass {self.pass_id} ({state})",
            )

    def combined(self, stamp: Stamp) -> None:
        """The exchange is complete."""
        del self._due[stamp.microbatch]

    def _require(self, call: str, state: State) -> None:
        if self.state is not state:
            raise CallOrder(call=call, state=self.state.value)

    def _require_free(self, call: str, microbatch: int) -> None:
        if microbatch in self._due:
            due = self._due[microbatch][0]
            raise CallOrder(call=call, state=f"microbatch {microbatch} waits for its {due}")
