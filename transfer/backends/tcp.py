"""The rail over sockets: lanes for urgent and for bulk slices, and who moves their bytes.

A lane's bytes are moved by the thread that waits for them, if there is one, so that a small round
trip needs no other thread of ours: it *leads*. Otherwise the engine's thread does. Small requests
leave in the thread that posts them. Same-host peers use the same code over unix sockets, to map
memory and for memory that cannot be mapped.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, cast

from transfer.backends.lane import Finished, LaneLike, make_lane, progress, tune
from transfer.event_loop import READABLE, WRITABLE, EventLoop
from transfer.rail import RailName, SliceSink
from transfer.slices import Slice
from transfer.statistics import Tally
from transfer.stream import Stream
from transfer.wire import HAS_IMMEDIATE, MAGIC, REQUEST, RequestKind, Status

# Requests of one lane without an answer.
LANE_SLICES: Final = 64
# So many small ones may wait for a thread to wait for them.
UNATTENDED_MAX: Final = 4
REDIAL_S: Final = 0.05
STATUSES: Final = tuple(Status)

Dial = Callable[[Callable[[socket.socket | None], None]], None]


@dataclass(slots=True, eq=False)
class _Entry:
    """A lane in its rail. `interest` is what the engine's thread waits for."""

    lane: LaneLike
    urgent: bool
    interest: int


class TcpRail:
    """A link made of several lanes, opened as they are needed. Thread-safe.

    Args:
        sock: the first connection.
        num_bulk: lanes for bulk traffic, beside one for urgent traffic.
        dial: opens another one, and calls back on the engine's thread with the socket or None.
    """

    orders_immediates = True
    drops_late_writes = True

    def __init__(
        self,
        rail: RailName,
        sock: socket.socket,
        loop: EventLoop,
        sink: SliceSink,
        tally: Tally,
        *,
        num_bulk: int,
        dial: Dial,
    ) -> None:
        self.rail = rail
        self._tally = tally
        self._loop = loop
        self._sink = sink
        self._dial = dial
        self._num_bulk = num_bulk
        self._lock = threading.RLock()
        self._entries: list[_Entry] = []
        self._carried: dict[Slice, _Entry] = {}
        # Of bulk and of urgent lanes.
        self._num_lanes = [1, 1]
        self._sole: list[_Entry | None] = [None, None]
        self._num_carried = [0, 0]
        self._leader = 0  # identity of a thread
        self._dialing = False
        self._redial_at = 0.0
        self._closed = False
        self._first: socket.socket | None = sock  # becomes the lane of whoever comes first

    def room(self, urgent: bool) -> int:
        """How many slices it would take now."""
        # A look without the lock: the sprayer asks before each slice, and its own lock keeps
        # others from posting between this and the post.
        return LANE_SLICES * self._num_lanes[urgent] - self._num_carried[urgent]

    def post(self, part: Slice) -> None:
        """Send a slice over the least busy lane of its kind."""
        urgent = part.urgent
        with self._lock:
            entry = self._sole[urgent]
            if entry is None or (not urgent and self._num_carried[False] > 1):
                entry = self._choose(urgent)
            if entry is not None and self._send(entry.lane, part):
                self._carried[part] = entry
                self._num_carried[entry.urgent] += 1
                self._attend_to_posted(entry, part)
                return
        # The link is breaking: whoever finds out will say so, but not about this slice.
        self._loop.call(lambda: self._sink.failed(self, [part], "no lane"))

    def progress(self, timeout_s: float) -> bool:
        """Lead: move the bytes of all lanes until something ended. See `leave`."""
        me = threading.get_ident()
        with self._lock:
            if self._leader not in (0, me) or self._closed:
                return False
            entries = []
            lanes = []
            for entry in self._entries:
                if entry.lane.in_flight:
                    entries.append(entry)
                    lanes.append(entry.lane)
                    if entry.interest:
                        self._watch(entry, 0)
            if not entries:  # whoever has received the answer is about to tell
                return False
            self._leader = me
        self._report(progress(lanes, timeout_s), entries)
        return True

    def leave(self) -> None:
        """End the lead of the calling thread, if it has it: the engine's thread takes over."""
        if self._leader == threading.get_ident():
            with self._lock:
                self._leader = 0
                if self._carried:
                    self._attend()

    def attend(self) -> None:
        """Let the engine's thread move the bytes, unless a thread leads. At every tick too."""
        with self._lock:
            self._attend()

    def suspect(self, evidence: str) -> None:
        """Nothing to do: the owner drops what comes a second time."""

    def give_up(self, slices: Sequence[Slice]) -> list[Slice]:
        """Reset the lanes that carry any of these."""
        with self._lock:
            hit = {self._carried[part] for part in slices if part in self._carried}
            lost = [part for entry in hit for part in self._remove(entry) if part not in slices]
            if hit and not self._entries and not self._closed:
                self._loop.call(lambda: self._sink.broken(self, "its operations were given up"))
                self._closed = True
        return lost

    def close(self) -> None:
        """Reset all lanes."""
        with self._lock:
            self._closed = True
            if self._first is not None:
                Stream.discard(self._first)
                self._first = None
            for entry in list(self._entries):
                self._remove(entry)

    def abandon(self) -> None:
        """Close the descriptors only."""
        if self._first is not None:
            self._first.close()
        for entry in self._entries:
            entry.lane.abandon()

    def _choose(self, urgent: bool) -> _Entry | None:
        if self._first is not None:
            sock, self._first = self._first, None
            self._add(sock, urgent)
        own = [entry for entry in self._entries if entry.urgent == urgent]
        chosen = min(own or self._entries, key=lambda entry: entry.lane.in_flight, default=None)
        if len(own) < (1 if urgent else self._num_bulk):
            self._open_another(urgent)
        return chosen

    def _send(self, lane: LaneLike, part: Slice) -> bool:
        operation, pieces = part.operation, part.pieces
        writes = operation.kind is RequestKind.WRITE
        immediate = operation.immediate
        header = REQUEST.pack(
            MAGIC, operation.kind, 0 if immediate is None else HAS_IMMEDIATE, part.idx,
            operation.num_slices, len(pieces), immediate or 0, part.nbytes,
            operation.transfer_id, part.oldest, operation.token,
        )  # fmt: skip
        ours, theirs = pieces.source_offsets, pieces.target_offsets
        if not writes:
            ours, theirs = theirs, ours
        base = 0 if operation.region is None else operation.region.start
        return lane.post(part, header, writes, base, ours, theirs, pieces.lengths)

    def _attend_to_posted(self, entry: _Entry, part: Slice) -> None:
        lane = entry.lane
        unsent = WRITABLE if lane.unsent else 0
        if self._leader:
            # The thread that leads looks after its own, and after all that is to be received.
            if unsent and self._leader != threading.get_ident():
                self._watch(entry, WRITABLE)
        elif unsent or part.operation.num_slices > 1 or lane.in_flight > UNATTENDED_MAX:
            self._watch(entry, READABLE | unsent)
        elif entry.interest:
            # Most likely somebody is about to wait for it, and to lead: the engine's thread
            # would only be woken in vain. The next tick attends to it if nobody does.
            self._watch(entry, 0)

    def _attend(self) -> None:
        if not self._leader:
            for entry in self._entries:
                self._watch(entry, READABLE | (WRITABLE if entry.lane.unsent else 0))

    def _on_event(self, entry: _Entry, events: int) -> None:
        """The engine's thread: a lane is ready, and nobody leads (or it has ended)."""
        self._report(progress([entry.lane], 0.0), [entry])
        with self._lock:
            if entry in self._entries and not (self._leader and entry.lane.in_flight):
                self._watch(entry, READABLE | (WRITABLE if entry.lane.unsent else 0))

    def _report(self, finished: Sequence[Finished], entries: Iterable[_Entry]) -> None:
        if finished:
            done = []
            with self._lock:
                for item, status, place in finished:
                    part = cast("Slice", item)
                    if place is not None:
                        part.operation.place = place
                    self._forget(part)
                    done.append((part, STATUSES[status]))
            self._sink.done(self, done)
        for entry in entries:
            evidence = entry.lane.evidence
            if evidence is not None:
                self._on_broken(entry, evidence)

    def _on_broken(self, entry: _Entry, evidence: str) -> None:
        with self._lock:
            if entry not in self._entries:
                return
            if evidence.startswith("malformed"):
                self._tally.count("malformed")
            lost = self._remove(entry)
            self._redial_at = time.monotonic() + REDIAL_S
            over = not self._entries and not self._closed
            self._closed = self._closed or over
        if lost or not over:
            self._sink.failed(self, lost, evidence)
        if over:
            self._sink.broken(self, evidence)

    def _add(self, sock: socket.socket, urgent: bool) -> None:
        with suppress(OSError):  # it broke already, as its lane will say
            tune(sock)
        entry = _Entry(make_lane(sock.detach()), urgent, READABLE)
        self._entries.append(entry)
        self._count_lanes()
        self._loop.watch(entry.lane, partial(self._on_event, entry), READABLE)

    def _remove(self, entry: _Entry) -> list[Slice]:
        self._entries.remove(entry)
        self._loop.unwatch(entry.lane)
        lost = cast("list[Slice]", entry.lane.close())
        for part in lost:
            self._forget(part)
        self._count_lanes()
        return lost

    def _forget(self, part: Slice) -> None:
        entry = self._carried.pop(part, None)
        if entry is not None:
            self._num_carried[entry.urgent] -= 1

    def _count_lanes(self) -> None:
        for kind in (False, True):
            own = [entry for entry in self._entries if entry.urgent == kind]
            self._num_lanes[kind] = max(len(own), 1)
            self._sole[kind] = own[0] if len(own) == 1 else None

    def _watch(self, entry: _Entry, interest: int) -> None:
        if entry.interest != interest:
            entry.interest = interest
            self._loop.change(entry.lane, interest)

    def _open_another(self, urgent: bool) -> None:
        if self._dialing or self._closed or time.monotonic() < self._redial_at:
            return
        self._dialing = True
        self._loop.call(lambda: self._dial(partial(self._on_dialed, urgent)))

    def _on_dialed(self, urgent: bool, sock: socket.socket | None) -> None:
        with self._lock:
            self._dialing = False
            if sock is None:
                self._redial_at = time.monotonic() + REDIAL_S
                return
            if self._closed:
                Stream.discard(sock)
                return
            self._add(sock, urgent)
        self._sink.done(self, [])  # there is room
