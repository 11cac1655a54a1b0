"""The rail over sockets: lanes for urgent and for bulk slices, and who moves their bytes.

A lane's bytes are moved by the thread that waits for them, if there is one, so that a small round
trip needs no other thread of ours: it *leads* the lane. Otherwise the engine's thread does, after
a moment in which somebody may begin to wait. Small requests leave in the thread that posts them.
Same-host peers use the same code over unix sockets, to map memory and for memory that cannot be
mapped.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

from transfer.backends.lane import PYTHON, LaneLike, lane_kind, tune
from transfer.backends.python_lane import Finished
from transfer.connections.stream import Stream
from transfer.event_loop import READABLE, WRITABLE, EventLoop
from transfer.handle import Transfer
from transfer.rails.books import LoadLike, make_load
from transfer.rails.express import Express
from transfer.rails.rail import RailName, SliceSink
from transfer.rails.slices import Slice
from transfer.statistics import Tally
from transfer.wire import MAGIC, REQUEST, RequestKind, Status, flags_of

# Requests of one lane without an answer.
LANE_SLICES: Final = 64
REDIAL_S: Final = 0.05
STATUSES: Final = tuple(Status)

Dial = Callable[[Callable[[socket.socket | None], None]], None]


@dataclass(slots=True, eq=False)
class _Entry:
    """A lane in its rail."""

    lane: LaneLike
    urgent: bool


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
        # Bulk and urgent ones.
        self._own: tuple[list[_Entry], list[_Entry]] = ([], [])
        self._load: LoadLike = make_load()
        self._dialing = False
        self._redial_at = 0.0
        self._closed = False
        self._kind = lane_kind(sock)
        self._first: socket.socket | None = sock  # becomes the lane of whoever comes first

    def bind(self, load: LoadLike) -> None:
        """Tell from here on which lanes there are."""
        with self._lock:
            self._load = load
            if self._kind is not PYTHON:
                cast("Any", load).bind(self, self.rail, self._call_soon, self.report)
            self._count_lanes()

    def room(self, urgent: bool) -> int:
        """How many slices it would take now."""
        # A look without the lock: the sprayer asks before each slice, and its own lock keeps
        # others from posting between this and the post.
        own = self._own[urgent]
        return LANE_SLICES * max(len(own), 1) - sum(entry.lane.in_flight for entry in own)

    def post(self, part: Slice) -> None:
        """Send a slice over the least busy lane of its kind."""
        urgent = part.urgent
        with self._lock:
            entry = self._least_busy(urgent)
            if entry is not None and self._send(entry.lane, part):
                self._carried[part] = entry
                soon = entry.lane.attend_to_posted()
                # Who leads looks after all slices: to wake the engine's thread for each would take
                # a core, and the interpreter, from what is urgent.
                if part.operation.num_slices > 1:
                    soon = soon or not entry.lane.leader
                else:
                    soon = soon or entry.lane.unsent
                if soon:
                    self._call_soon()
                return
        # The link is breaking: whoever finds out will say so, but not about this slice.
        self._loop.call(lambda: self._sink.failed(self, [part], "no lane"))

    def progress(self, handle: Transfer, timeout_s: float) -> bool:
        """Lead the lanes that carry a transfer, until something ended. See `leave`."""
        lanes = self.claim(handle)
        if not lanes:  # whoever has received the answer, or leads, is about to tell
            return False
        self.report(self.move(lanes, timeout_s), lanes)
        return True

    def claim(self, handle: Transfer) -> list[LaneLike]:
        """Lead the lanes that carry a transfer; if one of them carries bulk, all that do.

        It would be the engine's thread that moves the bytes of the others, and two threads need
        the interpreter more often than one.
        """
        with self._lock:
            wanted = self._lanes_of(handle)
            if any(not entry.urgent for entry in wanted) and type(handle) is not Express:
                wanted = {*wanted, *self._own[False]}
            found = [entry.lane for entry in wanted if entry.lane.claim()]
            if len(self._entries) > 1:
                self._release(threading.get_ident(), found)
        return found

    def move(self, lanes: Sequence[object], timeout_s: float) -> Sequence[Finished]:
        """Move the bytes of lanes, of this link or of others like it."""
        return self._kind.progress(cast("Sequence[LaneLike]", lanes), timeout_s)

    def carries(self, item: object) -> bool:
        """Whether it was posted over this link."""
        with self._lock:  # its answer may be here before its post has come to an end
            return item in self._carried or (type(item) is Express and item.link is self)

    def report(self, finished: Sequence[Finished], lanes: Sequence[object]) -> None:
        """Tell the sink what has ended, and of those of the lanes that are broken."""
        with self._lock:
            led = [entry for entry in self._entries if entry.lane in lanes]
        self._report(finished, led)

    def leave(self) -> None:
        """End the leads of the calling thread: the engine's thread takes over."""
        with self._lock:
            self._release(threading.get_ident(), ())

    def attend(self) -> None:
        """Let the engine's thread move the bytes of lanes that nobody leads. At every tick too."""
        with self._lock:
            for entry in self._entries:
                entry.lane.attend()

    def _attend_left(self) -> None:
        """Nobody has waited for a moment: see to what is under way without a leader."""
        with self._lock:
            self._load.attends_soon = False
            self._release(0, ())

    def suspect(self, evidence: str) -> None:
        """Nothing to do: the owner drops what comes a second time."""

    def give_up(self, slices: Sequence[Slice]) -> list[Slice]:
        """Reset the lanes that carry any of these."""
        with self._lock:
            hit = [entry for entry in map(self._lane_of, slices) if entry in self._entries]
            lost = []
            for entry in hit:
                if entry in self._entries:
                    lost += [part for part in self._remove(entry) if part not in slices]
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

    def _least_busy(self, urgent: bool) -> _Entry | None:
        own = self._own[urgent]
        if len(own) != 1 or (not urgent and own[0].lane.in_flight > 1):
            return self._choose(urgent)
        return own[0]

    def _choose(self, urgent: bool) -> _Entry | None:
        if self._first is not None:
            sock, self._first = self._first, None
            self._add(sock, urgent)
        own = self._own[urgent]
        chosen = min(own or self._entries, key=lambda entry: entry.lane.in_flight, default=None)
        if len(own) < (1 if urgent else self._num_bulk):
            self._open_another(urgent)
        return chosen

    def _send(self, lane: LaneLike, part: Slice) -> bool:
        operation, pieces = part.operation, part.pieces
        writes = operation.kind is RequestKind.WRITE
        note = operation.note
        flags, last = flags_of(operation.immediate, len(note))
        header = REQUEST.pack(
            MAGIC, operation.kind, flags, part.idx, operation.num_slices, len(pieces), last,
            part.nbytes, operation.transfer_id, part.oldest, operation.token,
        )  # fmt: skip
        ours, theirs = pieces.source_offsets, pieces.target_offsets
        if not writes:
            ours, theirs = theirs, ours
        base = 0 if operation.region is None else operation.region.start
        return lane.post(part, header, writes, base, ours, theirs, pieces.lengths, note)

    def _lanes_of(self, handle: Transfer) -> set[_Entry]:
        if type(handle) is Express and handle.part is None:
            return {entry for entry in self._entries if entry.lane is handle.lane}
        carried = self._carried.items()
        return {entry for part, entry in carried if part.operation.handle is handle}

    def _lane_of(self, part: Slice) -> _Entry | None:
        entry = self._carried.get(part)
        handle = part.operation.handle
        if entry is None and type(handle) is Express:
            return next((e for e in self._entries if e.lane is handle.lane), None)
        return entry

    def _call_soon(self) -> None:
        if not self._load.attends_soon:
            self._load.attends_soon = True
            self._loop.call_soon(self._attend_left)

    def _release(self, me: int, kept: Sequence[LaneLike]) -> None:
        ended = [entry.lane.leave(me) for entry in self._entries if entry.lane not in kept]
        if any(ended):
            self._call_soon()

    def _on_event(self, entry: _Entry, events: int) -> None:
        """The engine's thread: a lane is ready, and nobody leads it (or it has ended)."""
        if not events & ~(READABLE | WRITABLE) and entry.lane.gives_way():
            return  # until the next tick
        self._report(self._kind.progress([entry.lane], 0.0), [entry])
        with self._lock:
            if entry in self._entries and not (entry.lane.leader and entry.lane.in_flight):
                entry.lane.watch_all()

    def _report(self, finished: Sequence[Finished], entries: Iterable[_Entry]) -> None:
        done = []
        for item, status, place in finished:
            part = item.unfold() if type(item) is Express else cast("Slice", item)
            if place is not None:
                part.operation.place = place
            done.append((part, STATUSES[status]))
        if done:
            with self._lock:
                for part, _ in done:
                    self._carried.pop(part, None)
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
        entry = _Entry(self._kind.make(sock), urgent)
        entry.lane.urgent = urgent
        self._entries.append(entry)
        self._loop.watch(entry.lane, partial(self._on_event, entry), READABLE)
        entry.lane.bind(self._loop.fileno(), partial(self._loop.change, entry.lane))
        self._count_lanes()

    def _remove(self, entry: _Entry) -> list[Slice]:
        self._entries.remove(entry)
        self._loop.unwatch(entry.lane)
        entry.lane.unbind()
        items = entry.lane.close()
        lost = [i.unfold() if type(i) is Express else cast("Slice", i) for i in items]
        for part in lost:
            self._carried.pop(part, None)
        self._count_lanes()
        return lost

    def _count_lanes(self) -> None:
        bulk = [entry for entry in self._entries if not entry.urgent]
        urgent = [entry for entry in self._entries if entry.urgent]
        self._own = (bulk, urgent)
        if self._kind is not PYTHON:
            cast("Any", self._load).carry(
                urgent[0].lane if urgent else None,
                tuple(entry.lane for entry in bulk),
                len(bulk) >= self._num_bulk,
            )

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
