"""Our end of a rail to a peer: slices of our writes and reads, moved by the card.

Life of a link:

    opening   until the owner has told its queue pairs; then
    open      until a request fails, or the pairs are given up; then
    settling  until the owner has told what arrived; then told to the sink, and
                opening again, if that was a refusal or a give-up,
                closed, if the rail has failed.

An operation that fails may have arrived all the same, and so may the immediate that it carries,
of which none may be counted twice. So when queue pairs are over, the owner ends its own and says
how many immediates have come over each. Connections are reliable and in order: the first so many
have arrived, the others never will, nor anything else over those pairs. Only then is anything
told, and sent again.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any, Final

from transfer.backends.verbs.binding import PyverbsError, error_text
from transfer.backends.verbs.completion import REFUSED, SUCCESS, CompletionQueue
from transfer.backends.verbs.domain import PeerDomain
from transfer.backends.verbs.evidence import failure_of
from transfer.backends.verbs.keys import KeyTable, Places
from transfer.backends.verbs.lane import SendLane
from transfer.backends.verbs.messages import LANES, End
from transfer.backends.verbs.queue_pair import QueuePair, make_end
from transfer.backends.verbs.work import Work, make_work
from transfer.event_loop import READABLE, EventLoop
from transfer.handle import Transfer
from transfer.rails.rail import RailName, SliceSink
from transfer.rails.slices import Slice
from transfer.wire import RequestKind, Status

SLICES_MAX: Final = 16
SEND_REQUESTS: Final = 1024
ELEMENTS_MAX: Final = 16
EDGE_TRIGGERED: Final = 1 << 31
WAKE: Final = 1

Finished = list[tuple[Slice, Status]]


class RailState(Enum):
    """Where a link stands; see the module."""

    OPENING = auto()
    OPEN = auto()
    SETTLING = auto()
    CLOSED = auto()


class VerbsRail:
    """A rail of queue pairs, one for urgent and one for bulk traffic. A `RailLink`.

    Args:
        device_idx: which of the owner's devices it leads to.
        keys: how the owner's offers are reached.
        settle: tells the owner that the pairs of this life are over: (rail, token or b"").
        reopen: asks the owner for new pairs, on the engine's thread.
        forget: the rail is closed.
    """

    orders_immediates: Final = False
    drops_late_writes: Final = False

    def __init__(
        self,
        rail: RailName,
        device_idx: int,
        domain: PeerDomain,
        loop: EventLoop,
        sink: SliceSink,
        keys: KeyTable,
        *,
        settle: Callable[[VerbsRail, bytes], None],
        reopen: Callable[[VerbsRail], None],
        forget: Callable[[VerbsRail], None],
    ) -> None:
        self.rail = rail
        self.device_idx = device_idx
        self.device = domain.device
        self.number = 0
        self._domain = domain
        self._loop = loop
        self._sink = sink
        self._keys = keys
        self._settle, self._reopen, self._forget = settle, reopen, forget
        limits = self.device.limits
        self._depth = min(SEND_REQUESTS, limits.send_requests)
        self._elements_max = min(ELEMENTS_MAX, limits.pieces)
        self._state = RailState.OPENING
        self._lanes: list[SendLane] = []
        self._by_number: dict[int, SendLane] = {}
        self._skipped = False
        self._parked: dict[bytes, list[Slice]] = {}
        # What could not be posted, what was done when the pairs ended, what nobody waits for.
        self._lost: list[Slice] = []
        self._late: Finished = []
        self._given_up: set[Slice] = set()
        self._evidence = ""
        self._refused: Work | None = None
        self._is_broken = False
        # Held for bookkeeping, posting and polling; never while the sink is called.
        self._lock = threading.RLock()
        # Held by the one thread that serves the completions.
        self._serving = threading.Lock()
        # Flush completions come for every request, signalled or not.
        self._completions = CompletionQueue(self.device, LANES * (self._depth + 1))
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        loop.watch(self._completions, lambda _: self._serve(), READABLE | EDGE_TRIGGERED)

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._state is RailState.CLOSED

    def prepare(self, number: int) -> End:
        """Make the queue pairs of a new life.

        Raises:
            PyverbsError: the device makes none.
        """
        with self._lock:
            self.number = number
            lanes: list[SendLane] = []
            try:
                for _ in range(LANES):
                    lanes.append(self._make_lane())  # noqa: PERF401 (closed if the next one fails)
            except PyverbsError:
                for lane in lanes:
                    lane.close()
                raise
            self._lanes = lanes
            self._by_number = {lane.pair.number: lane for lane in lanes}
            return make_end(self.device, [lane.pair for lane in lanes])

    def connect(self, end: End, num_credits: int) -> None:
        """Connect the queue pairs with the owner's, which are ready to serve.

        Raises:
            PyverbsError: the owner's device cannot be reached.
        """
        with self._lock:
            for i, lane in enumerate(self._lanes):
                lane.credits = num_credits
                lane.pair.connect(end, i)
            self._completions.arm()
            if self._state is RailState.OPENING:
                self._state = RailState.OPEN

    def room(self, urgent: bool) -> int:
        """How many slices it would take now."""
        lanes = self._lanes
        if self._state is not RailState.OPEN or not lanes:
            return 0
        num_parked = sum(map(len, list(self._parked.values())))
        return SLICES_MAX - len(lanes[0 if urgent else -1]) - num_parked

    def post(self, part: Slice) -> None:
        """Hand a slice to the card, or park it until its key is known."""
        token = part.operation.token
        with self._lock:
            if self._state is not RailState.OPEN:
                self._lose([part])
                return
            places = self._keys.find(token)
            if places is not None:
                self._send(part, places)
                return
            self._parked.setdefault(token, []).append(part)
        self._keys.ask(token)

    def on_key(self, token: bytes, places: Places | None, status: Status) -> None:
        """The owner has answered: post what was parked, or end it with what it said."""
        with self._lock:
            parked = self._parked.pop(token, [])
            if places is not None:
                for i, part in enumerate(parked):
                    if self._state is not RailState.OPEN:
                        self._lose(parked[i:])
                        break
                    self._send(part, places)
                return
        if parked:
            self._sink.done(self, [(part, status) for part in parked])

    def progress(self, handle: Transfer, timeout_s: float) -> bool:
        """Serve the completions in the caller's thread until a slice has ended."""
        if not self._serving.acquire(blocking=False):
            return False
        try:
            if self._state is RailState.CLOSED:
                return False
            finished = self._collect()
            if not finished:
                self._completions.wait(self._wakeup, timeout_s)
                finished = self._collect(after_event=True)
        finally:
            self._serving.release()
        if self._skipped:  # something came while we had the lock
            self._loop.call(self._serve)
        if finished:
            self._sink.done(self, finished)
        return True

    def leave(self) -> None:
        """Nothing to do: each `progress` hands the completions back."""

    def attend(self) -> None:
        """Nothing to do: the engine's thread is woken by the completion channel."""

    def suspect(self, evidence: str) -> None:
        """It is thought to have failed: end the queue pairs, and tell the sink later."""
        with self._lock:
            if self._state is RailState.OPEN:
                self._tear(evidence, is_broken=True)

    def give_up(self, slices: Sequence[Slice]) -> Sequence[Slice]:
        """Forget slices; the queue pairs end if some of them are under way."""
        wanted = set(slices)
        with self._lock:
            for token, parked in self._parked.items():
                self._parked[token] = [part for part in parked if part not in wanted]
            self._lost = [part for part in self._lost if part not in wanted]
            under_way = [p for p in slices if not all(lane.drop(p) for lane in self._lanes)]
            if under_way:
                self._given_up.update(under_way)
                if self._state is RailState.OPEN:
                    self._tear("an operation on it was given up", is_broken=False)
        return ()

    def close(self) -> None:
        """Destroy the queue pairs, and let the engine's thread free the rest."""
        with self._lock:
            if self._state is RailState.CLOSED:
                return
            self._state = RailState.CLOSED
            for lane in self._lanes:
                lane.close()
            self._parked.clear()
        os.eventfd_write(self._wakeup, WAKE)
        self._forget(self)
        self._loop.call(self._free)

    def abandon(self) -> None:
        """Close the descriptors only."""
        self._completions.abandon()
        os.close(self._wakeup)

    def on_settled(self, arrived: Sequence[int], status: Status) -> None:
        """The owner has ended its pairs: tell what is done and what is to be sent again."""
        with self._lock:
            if self._state is not RailState.SETTLING:
                return
            finished, lost = self._sort_out(arrived, status)
            is_broken = self._is_broken
            if not is_broken:
                self._state = RailState.OPENING
        if finished:
            self._sink.done(self, finished)
        if is_broken:
            self.close()
            self._sink.broken(self, self._evidence)
            return
        if lost:
            self._sink.failed(self, lost, self._evidence)
        self._reopen(self)

    def not_opened(self, evidence: str) -> None:
        """New queue pairs could not be had."""
        if self._state is not RailState.CLOSED:
            self.close()
            self._sink.broken(self, evidence)

    def _make_lane(self) -> SendLane:
        pair = QueuePair(
            self.device, self._domain.domain, self._completions,
            send_requests=self._depth, pieces=self._elements_max,
        )  # fmt: skip
        return SendLane(pair, depth=self._depth, elements_max=self._elements_max)

    def _send(self, part: Slice, places: Places) -> None:
        try:
            lane = self._lanes[0 if part.urgent else -1]
            place = places[self.device_idx]
            lane.add(make_work(part, place, self._domain, self._elements_max))
        except PyverbsError as error:
            if not any(work.part is part for work in lane.unfinished()):
                self._lost.append(part)
            self._tear(error_text(error), is_broken=True)

    def _serve(self) -> None:
        self._skipped = True  # before the look: who has the lock sees it when it lets go
        if not self._serving.acquire(blocking=False):
            return
        self._skipped = False
        try:
            finished = self._collect(after_event=True)
        finally:
            self._serving.release()
        if finished:
            self._sink.done(self, finished)

    def _collect(self, *, after_event: bool = False) -> Finished:
        finished: Finished = []
        with self._lock:
            try:
                if after_event:
                    self._completions.take_events()
                    self._completions.arm()
                while completions := self._completions.poll():
                    for completion in completions:
                        self._take(completion, finished)
            except PyverbsError as error:
                if self._state is RailState.OPEN:
                    self._tear(error_text(error), is_broken=True)
        return finished

    def _take(self, completion: Any, finished: Finished) -> None:
        lane = self._by_number.get(int(completion.qp_num))
        if lane is None:
            return  # of pairs that are over
        chain = int(completion.wr_id)
        if completion.status == SUCCESS:
            done = [work.part for work in lane.complete(chain)]
            finished += [(part, Status.OK) for part in done if part not in self._given_up]
        elif self._state is RailState.OPEN:
            work = lane.find(chain)
            is_read = work is not None and work.part.operation.kind is RequestKind.READ
            failure = failure_of(completion, self.rail, "read" if is_read else "write")
            is_refusal = failure.status == REFUSED
            self._refused = work if is_refusal else None
            self._tear(str(failure), is_broken=not is_refusal)

    def _tear(self, evidence: str, *, is_broken: bool) -> None:
        """End the queue pairs. What they have not finished is in doubt until it is settled."""
        self._state = RailState.SETTLING
        self._evidence, self._is_broken = evidence, is_broken
        for lane in self._lanes:
            lane.stop()
        try:
            while completions := self._completions.poll():
                for completion in completions:
                    self._take(completion, self._late)
        except PyverbsError:
            pass  # the device is gone; what has arrived will be told by the owner
        for lane in self._lanes:
            lane.close()
        token = b"" if self._refused is None else self._refused.part.operation.token
        self._settle(self, token)

    def _sort_out(self, arrived: Sequence[int], status: Status) -> tuple[Finished, list[Slice]]:
        finished, self._late = self._late, []
        lost, self._lost = self._lost, []
        for parked in self._parked.values():
            lost += parked
        for lane, count in zip(self._lanes, arrived, strict=True):
            for work in lane.unfinished():
                if work.part in self._given_up:
                    continue
                if work.number is not None and work.number < count:
                    finished.append((work.part, Status.OK))
                elif work is self._refused:
                    refusal = status if status is not Status.OK else Status.OUT_OF_BOUNDS
                    finished.append((work.part, refusal))
                else:
                    lost.append(work.part)
        self._parked.clear()
        self._given_up.clear()
        self._refused = None
        self._lanes, self._by_number = [], {}
        return finished, lost

    def _lose(self, parts: list[Slice]) -> None:
        self._lost += parts
        if self._state is not RailState.SETTLING:
            self._loop.call(self._tell_lost)

    def _tell_lost(self) -> None:
        with self._lock:
            if self._state is RailState.SETTLING:
                return  # told when that is over
            lost, self._lost = self._lost, []
        if lost:
            self._sink.failed(self, lost, self._evidence)

    def _free(self) -> None:
        with self._serving, self._lock:
            self._loop.unwatch(self._completions)
            self._completions.close()
            os.close(self._wakeup)
