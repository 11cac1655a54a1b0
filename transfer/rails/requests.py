"""All our requests to one peer: operations, spread over its rails. The sprayer's thread-safe shell.

Whoever submits, finishes or fails something lets the core choose and posts what it chose, in the
same thread and under one lock. The engine's thread opens links, and looks at every tick for
deadlines and for rails that have stalled.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, cast

from transfer.errors import TransferError
from transfer.event_loop import EventLoop
from transfer.memory.region import Region
from transfer.pieces import Pieces
from transfer.priority import Priority
from transfer.rails.express import Express, ShortWayLike
from transfer.rails.outcomes import loss, refusal
from transfer.rails.rail import LaneLink, RailLink
from transfer.rails.record import STALL_S_ENDING, RailRecord
from transfer.rails.several import SeveralLinks
from transfer.rails.slices import Operation, Slice, add_signal, slice_operation
from transfer.rails.spray import SprayCore
from transfer.statistics import RailStatistics, Tally
from transfer.wire import SLICE_PIECES, RequestKind, Status

logger = logging.getLogger(__name__)

OPERATIONS_MAX: Final = 256

_Ended = tuple[Operation, TransferError | None]


class Requests:
    """All our requests to one peer. Thread-safe. The sink of its rails' links.

    Args:
        prefer: tiers of rails, by index, that suit a region's memory, the best first.
        open_rail: makes a link over a rail: (index, callback), and calls back on the engine's
            thread with the link or with None. Called on the engine's thread.
        shares: weights of the classes of traffic.
        orders_immediates: whether the rails' links do.
        short_way: the engine's; None where nothing takes it to this peer.
    """

    def __init__(
        self,
        peer: str,
        loop: EventLoop,
        tally: Tally,
        *,
        num_rails: int,
        prefer: Callable[[Region], tuple[tuple[int, ...], ...]],
        shares: Mapping[Priority, float],
        open_rail: Callable[[int, Callable[[RailLink | None], None]], None],
        orders_immediates: bool = True,
        short_way: ShortWayLike | None = None,
    ) -> None:
        self.peer = peer
        self._orders_immediates = orders_immediates
        self._loop = loop
        self._open_rail = open_rail
        # None where there is nothing to choose.
        self._prefer = prefer if num_rails > 1 else None
        # Reentrant: a link that is given up may be torn down in the same thread.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._links: list[RailLink | None] = [None] * num_rails
        self._short_way = short_way
        self._several = SeveralLinks(self._links)
        self._core = SprayCore(
            num_rails,
            shares=shares,
            room=self._room,
            prefer=self._prefer,
            on_room=self._on_room,
        )
        self._closed: TransferError | None = None
        self.tally = tally

    def submit(self, operation: Operation, pieces: Pieces) -> None:
        """Cut an operation into slices and take it; waits while too many are under way.

        Raises:
            TransferTimeout: its deadline came before its turn.
            PeerLost, EngineClosed: no more requests to this peer.
        """
        core = self._core
        self._loop.stir()
        if self._prefer is not None and operation.region is not None:
            operation.rails = self._prefer(operation.region)
        with self._lock:
            if self._is_full or self._closed is not None:
                self._await_turn(operation)
            now = operation.queued_at = time.monotonic()
            slice_operation(
                operation,
                pieces,
                slice_bytes=core.slice_bytes(operation.priority),
                slice_pieces=SLICE_PIECES,
            )
            if not self._orders_immediates:
                add_signal(operation)
            core.add(operation)
            if operation.num_slices == 1:
                part = operation.slices[0]
                rail = core.post_at_once(part, now)
                if rail is not None:
                    self._post(part, rail)
                    return
            core.enqueue(operation)
            self._pump(now)

    @property
    def num_failures(self) -> int:
        """How often its rails have failed. A look, without the lock."""
        return sum(rail.failures for rail in self._core.rails)

    @property
    def num_slices_done(self) -> int:
        """How many slices its rails have brought to their end. A look, without the lock."""
        return sum(rail.slices_done + rail.load.messages_done for rail in self._core.rails)

    @property
    def is_busy(self) -> bool:
        """Whether anything is under way, or a rail is not as it should be. Without the lock."""
        return len(self._core.books) > 0 or any(rail.is_unsettled for rail in self._core.rails)

    def expire(self, now: float) -> None:
        """Fail what is late, move what has stalled, open what is to be opened. At every tick."""
        core = self._core
        with self._lock:
            ended = [self._end(op, op.handle.timed_out()) for op in core.late(now)]
            core.unfold_slow(now)
            for rail, again in core.find_stalled(now):
                self._tell(rail, "no progress", again)
                link = self._links[rail.idx]
                if link is not None:
                    link.suspect("no progress")
            for rail in core.find_dead(now):
                self._drop_link(rail)
                core.close_rail(rail)
            for link in self._links:
                if link is not None:
                    link.attend()
            self._pump(now)
            self._resume()
        self._report(ended)

    def open_rails(self) -> None:
        """Open all rails, before there is need. On the engine's thread."""
        for rail in self._core.rails:
            rail.opening = True
            self._open(rail)

    def close(self, error: TransferError) -> None:
        """Fail everything, now and from now on. On the engine's thread."""
        if self._short_way is not None:
            self._short_way.remove(self.peer, self._core.books)
        with self._lock:
            self._closed = error
            self._core.unfold_all()
            operations = list(self._core.operations.values())
            ended = [self._end(op, loss(op.handle, error)) for op in operations]
            for rail in self._core.rails:
                self._drop_link(rail)
                rail.is_open = False
            self._changed.notify_all()
        self._report(ended)

    def abandon(self) -> None:
        """Close the descriptors only: the way out after a fork."""
        for operation in list(self._core.operations.values()):
            operation.handle.abandon()
        for message in self._core.books.messages():
            self._core.books.pull(message)  # it must not look at its lane any more
            message.abandon()
        for link in self._links:
            if link is not None:
                link.abandon()

    def rails(self, region: Region | None = None) -> list[RailStatistics]:
        """Return what is known about each rail that was open once, the best for a region first."""
        order: list[int] = []
        if region is not None and self._prefer is not None:
            order = [idx for tier in self._prefer(region) for idx in tier]
        with self._lock:
            known = [rail for rail in self._core.rails if rail.name is not None]
            known.sort(key=lambda r: order.index(r.idx) if r.idx in order else len(order))
            return [rail.statistics(self.peer) for rail in known]

    def done(self, link: RailLink, finished: Sequence[tuple[Slice, Status]]) -> None:
        """Slices were answered by the owner."""
        ended: list[_Ended] = []
        with self._lock:
            now = time.monotonic()
            self._book([part for part, _ in finished])
            rail = self._rail_of(link)
            for part, status in finished:
                self._settle(part, rail, status, now, ended)
            if self._core.num_queued:
                self._pump(now)
        self._report(ended)

    def failed(self, link: RailLink, slices: Sequence[Slice], evidence: str) -> None:
        """Slices were lost, the link goes on."""
        with self._lock:
            self._book(slices)
            rail = self._rail_of(link)
            if rail is not None:
                self._tell(rail, evidence, self._core.fail(list(slices), rail))
                self._pump(time.monotonic())

    def broken(self, link: RailLink, evidence: str) -> None:
        """A link is over: its slices go out over other rails, or over this one once it is back."""
        with self._lock:
            self._core.unfold_all()
            rail = self._rail_of(link)
            if rail is not None:
                now = time.monotonic()
                self._links[rail.idx] = None
                self._tell(rail, evidence, self._core.break_rail(rail, now))
                self._pump(now)
            self._resume()

    def _resume(self) -> None:
        """All that was under way the short way is unfolded where that had to be."""
        if self._closed is None:
            self._core.resume()

    def _on_room(self) -> None:
        """A message has ended: whoever waited for that may go on."""
        self._call_waiting()
        with self._lock:
            self._pump(time.monotonic())

    @property
    def _is_full(self) -> bool:
        books = self._core.books
        return len(books) >= OPERATIONS_MAX or books.is_exhausted

    def _call_waiting(self) -> None:
        if self._core.books.awaited:
            with self._changed:
                self._core.books.awaited = False
                self._changed.notify_all()

    def _await_turn(self, operation: Operation) -> None:
        # First of all: what ends from here on, ends for us too.
        self._core.books.awaited = True
        while self._closed is None and self._is_full:
            remaining = operation.handle.deadline - time.monotonic()
            if remaining <= 0 or self._loop.is_current or not self._changed.wait(remaining):
                raise operation.handle.timed_out()
            self._core.books.awaited = True
        if self._closed is not None:
            raise self._closed

    def _room(self, idx: int, urgent: bool) -> int:
        link = self._links[idx]
        return link.room(urgent) if link is not None else 0

    def _rail_of(self, link: RailLink) -> RailRecord | None:
        for rail, found in zip(self._core.rails, self._links, strict=True):
            if found is link:
                return rail
        return None

    def _pump(self, now: float) -> None:
        core = self._core
        while core.num_queued and (chosen := core.next(now)) is not None:
            self._post(*chosen)
        if self._closed is not None:
            return
        for rail in core.to_open(now):
            # A rail that was open once is brought back in time; a new one when there is need.
            if core.num_queued or rail.name is not None:
                rail.opening = True
                self._loop.call(partial(self._open, rail))

    def _post(self, part: Slice, rail: RailRecord) -> None:
        link = self._links[rail.idx]
        assert link is not None, "only rails with a link are chosen"
        handle = part.operation.handle
        if part.idx == 0 and part.attempts == 1:
            self.tally.waited(part.operation.priority, part.posted_at - part.operation.queued_at)
        part.oldest = self._core.books.oldest
        handle.attempts = max(handle.attempts, part.attempts)
        handle.rail = rail.name
        if part.operation.num_slices == 1 or len(self._links) == 1:
            handle.link = link
        elif self._orders_immediates:
            handle.link = self._several
        link.post(part)

    def _open(self, rail: RailRecord) -> None:
        if self._closed is None:
            self._open_rail(rail.idx, partial(self._on_opened, rail))

    def _on_opened(self, rail: RailRecord, link: RailLink | None) -> None:
        with self._lock:
            now = time.monotonic()
            if self._closed is not None:
                if link is not None:
                    link.close()
                return
            if link is None:
                self._core.not_opened(rail, now)
                return
            rail.name = link.rail
            self._links[rail.idx] = link
            if self._short_way is not None:
                cast("LaneLink", link).bind(rail.load)
                self._short_way.add(self.peer, self._core.books)
            rail.repeats = link.drops_late_writes
            if not rail.repeats:
                rail.stall_s_min = STALL_S_ENDING
                rail.stall_s = max(rail.stall_s, STALL_S_ENDING)
            self._core.opened(rail)
            self._pump(now)

    def _settle(
        self,
        part: Slice,
        rail: RailRecord | None,
        status: Status,
        now: float,
        ended: list[_Ended],
    ) -> None:
        operation = part.operation
        is_known = operation.transfer_id in self._core.operations
        if rail is not None and not (is_known and status is Status.OK):
            self._core.complete(part, rail, now)
        if not is_known:
            operation.drop_place()
        elif status is not Status.OK:
            self.tally.add(operation.handle.backend, refused=1)
            ended.append(self._end(operation, refusal(operation.handle, status)))
        else:
            first = not part.done
            whole = self._core.finish(part, rail, now)
            operation.handle.bytes_moved += part.nbytes if first else 0
            if whole:
                ended.append(self._end(operation, None))

    def _end(self, operation: Operation, error: TransferError | None) -> _Ended:
        """Forget an operation; nothing touches our memory for it any more."""
        for rail, parts in self._core.end(operation):
            link = self._links[rail.idx]
            harmless = error is None and operation.kind is RequestKind.WRITE
            if link is None or (harmless and link.drops_late_writes):
                continue
            others = link.give_up(parts)
            self._book(others)
            for part in parts:
                rail.forget(part)
            self._core.fail(list(others), rail)
        if error is not None:
            self.tally.add(operation.handle.backend, failures=1)
        return operation, error

    def _report(self, ended: Sequence[_Ended]) -> None:
        """Tell the callers, without the lock: a callback may call us."""
        for operation, error in ended:
            if not operation.handle.finish(error):
                operation.drop_place()
        self._call_waiting()

    def _book(self, slices: Sequence[Slice]) -> None:
        """See to it that those of the short way are known to the core as slices."""
        for part in slices:
            handle = part.operation.handle
            if isinstance(handle, Express):
                self._core.unfold(handle)

    def _drop_link(self, rail: RailRecord) -> None:
        self._core.unfold_all()
        link, self._links[rail.idx] = self._links[rail.idx], None
        if link is not None:
            link.close()

    def _tell(self, rail: RailRecord, evidence: str, again: Sequence[Slice]) -> None:
        rail.evidence = evidence
        logger.info("rail %s to %s: %s, %s slices sent again",
                    rail.name, self.peer, evidence, len(again))  # fmt: skip
        over_verbs = rail.name is not None and rail.name.backend == "verbs"
        self.tally.add("verbs" if over_verbs else "tcp", resends=len(again))
