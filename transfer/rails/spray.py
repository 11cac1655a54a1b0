"""Which slice goes over which rail, and when: the scheduling core. Pure: no threads, no clock.

Classes of traffic share the rails by weighted fair queueing: each class has a virtual time that
advances by bytes over weight, and the class that is behind goes first. A class that was idle
starts at the others' time, so it waits for nobody's backlog and saves up nothing. Bulk classes
are held to a bounded number of bytes under way per rail; urgent slices are not.

A slice takes the rail on which it should be done first: bytes ahead of it over the measured
bandwidth. If that rail has no room now the slice waits, unless another would still be faster.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from transfer.memory.region import Region
from transfer.priority import Priority
from transfer.rails.books import Tiers, make_books
from transfer.rails.bulk import URGENT_MEMORY_S
from transfer.rails.express import Express
from transfer.rails.rail import RailState
from transfer.rails.record import STALL_S, RailRecord
from transfer.rails.slices import Operation, Slice
from transfer.wire import SLICE_BYTES

# Bulk that gave way to urgent traffic moves again so long after the last of it, at most.
GIVES_WAY_S: Final = 0.2
# A slice should take about this long on the fastest rail.
SLICE_S: Final = 2e-3
# One of a class that nobody waits for may take longer: each that ends takes the interpreter from
# what is urgent.
SLICE_S_BACKGROUND: Final = 8e-3
SLICE_BYTES_MIN: Final = 64 << 10
SLICE_BYTES_FIRST: Final = min(1 << 20, SLICE_BYTES)
# What a slice costs its class at least: a message is not free.
COST_BYTES_MIN: Final = 4096
# A rail that was not measured for so long gets a slice even if it is thought to be slow.
REMEASURE_S: Final = 1.0
# Each tier down a list of preferred rails counts as so many times the time.
PREFERENCE_FACTOR: Final = 2.0
# The rail that has just lost a slice gets it again only where nothing else is.
AVOID_FACTOR: Final = 1e6


@dataclass(slots=True, eq=False)
class _Class:
    priority: Priority
    weight: float
    queue: deque[Slice] = field(default_factory=deque)
    virtual: float = 0.0


class SprayCore:
    """Queues, rails and the choice between them. Not thread-safe; `now` in seconds, monotonic.

    Args:
        num_rails: how many rails lead to the peer.
        shares: weight of each class.
        room: how many slices a rail's link would take: (rail, urgent) -> number.
        prefer, on_room: of the books.
    """

    def __init__(
        self,
        num_rails: int,
        *,
        shares: Mapping[Priority, float],
        room: Callable[[int, bool], int],
        prefer: Callable[[Region], Tiers] | None = None,
        on_room: Callable[[], None] | None = None,
    ) -> None:
        self.rails = [RailRecord(idx=i) for i in range(num_rails)]
        self._classes = [_Class(priority, shares[priority]) for priority in Priority]
        self._room = room
        self._virtual = 0.0
        self.operations: dict[int, Operation] = {}
        self.books = make_books([rail.load for rail in self.rails], prefer=prefer, on_room=on_room)

    @property
    def num_queued(self) -> int:
        """How many slices wait for a rail."""
        return self.books.num_queued

    def slice_bytes(self, priority: Priority) -> int:
        """How large slices of a class should be now: a power of two."""
        if len(self.rails) == 1:  # nothing to spread: the fewer the better
            only = self.rails[0]
            fast = only.measured and only.bandwidth * SLICE_S >= SLICE_BYTES
            return SLICE_BYTES if fast else SLICE_BYTES // 2
        known = [r for r in self.rails if r.measured and r.state is RailState.HEALTHY]
        if not known:
            return SLICE_BYTES_FIRST
        if priority >= Priority.WEIGHTS:
            # Not what they had beside urgent traffic: the shorter they are the more of them end.
            wanted = int(max(rail.pace for rail in known) * SLICE_S_BACKGROUND)
        else:
            wanted = int(max(rail.bandwidth for rail in known) * SLICE_S)
        return min(max(1 << max(wanted, 1).bit_length() - 1, SLICE_BYTES_MIN), SLICE_BYTES)

    def add(self, operation: Operation) -> None:
        """Take an operation and number it."""
        operation.transfer_id = self.books.take()
        self.operations[operation.transfer_id] = operation

    def enqueue(self, operation: Operation) -> None:
        """Queue all slices of an operation."""
        waiting = self._classes[operation.priority]
        self._begin(waiting)
        parts = operation.slices if operation.signal is None else operation.slices[:-1]
        for part in parts:
            part.queued = True
        waiting.queue.extend(parts)
        self._count_queued(waiting, len(parts))

    def next(self, now: float) -> tuple[Slice, RailRecord] | None:
        """Take the slice that goes out next and note it under way; None if none can now."""
        bulk_waits = False
        for waiting in sorted(
            (c for c in self._classes if c.queue), key=lambda c: (c.virtual, c.priority)
        ):
            # The bulk class whose turn it is must not be overtaken by another one with a
            # smaller slice: only urgent ones have room of their own.
            if bulk_waits and not waiting.priority.urgent:
                continue
            self._skip_done(waiting)
            if not waiting.queue:
                continue
            part = waiting.queue[0]
            rail = self.choose(part, now)
            if rail is None:
                bulk_waits = bulk_waits or not waiting.priority.urgent
                continue
            waiting.queue.popleft()
            part.queued = False
            self._count_queued(waiting, -1)
            self._post(part, rail, waiting, now)
            return part, rail
        return None

    def post_at_once(self, part: Slice, now: float) -> RailRecord | None:
        """Let the only slice of an operation go out, if a rail has room and none is overtaken.

        What is urgent does not wait behind bulk.
        """
        books = self.books
        waits = books.urgent_queued if part.urgent else books.num_queued
        rail = None if waits else self.choose(part, now)
        if rail is not None:
            waiting = self._classes[part.operation.priority]
            self._begin(waiting)
            self._post(part, rail, waiting, now)
        return rail

    def unfold(self, message: Express) -> Operation:
        """Keep the books of any other operation for one that has met trouble; idempotent."""
        part = message.unfold()
        if self.books.pull(message):
            self.operations[message.transfer_id] = part.operation
            for rail in self.rails:
                if rail.load is message.load:
                    rail.post(part, message.started)
        return part.operation

    def unfold_slow(self, now: float) -> None:
        """Do so for those that may have stalled, where there is another rail to go to."""
        if len(self.rails) > 1:
            for message in self.books.messages():
                if now - message.started > STALL_S:
                    self.unfold(message)

    def unfold_all(self) -> None:
        """Do so for all that are under way, and close the short way until `resume`."""
        for message in self.books.stop():
            self.unfold(message)

    def resume(self) -> None:
        """Open the short way again."""
        self.books.stopped = False

    def choose(self, part: Slice, now: float) -> RailRecord | None:
        """Return the rail on which a slice should be done first; None if it is to wait."""
        best, best_finish = None, float("inf")
        rails = self.rails
        for rail in rails:
            if not rail.usable or part in rail.out:
                continue
            ahead = rail.urgent_bytes if part.urgent else rail.out_bytes
            finish = (ahead + part.nbytes + COST_BYTES_MIN) / rail.bandwidth
            if len(rails) > 1:
                finish = self._biased(finish, part, rail, now)
            if finish < best_finish:
                best, best_finish = rail, finish
        if best is None or self._room(best.idx, part.urgent) <= 0:
            return None
        if not part.urgent and not self._bulk_fits(best, part.nbytes, now):
            return None
        return best

    def finish(self, part: Slice, rail: RailRecord | None, now: float) -> bool:
        """A slice was answered over a rail; True if that completes its operation."""
        if rail is not None:
            self.complete(part, rail, now)
        if part.done:
            return False
        part.done = True
        operation = part.operation
        operation.num_finished += 1
        if operation.signal is not None and operation.num_finished == operation.num_slices - 1:
            self._queue_signal(operation.signal)
        return operation.num_finished == operation.num_slices

    def complete(self, part: Slice, rail: RailRecord, now: float) -> None:
        """A rail has done its part for a slice."""
        rail.complete(part, now, gave_way=not part.urgent and self._is_beside_urgent(now))

    def fail(self, parts: list[Slice], rail: RailRecord) -> list[Slice]:
        """Slices were lost on a rail; returns those that go out again."""
        return self._again([part for part in parts if rail.forget(part)], rail)

    def break_rail(self, rail: RailRecord, now: float) -> list[Slice]:
        """A rail's link is over; returns the slices that go out again."""
        rail.cool(now)
        return self.close_rail(rail)

    def close_rail(self, rail: RailRecord) -> list[Slice]:
        """A rail's link is closed; returns the slices that go out again."""
        rail.is_open = rail.stalled = False
        return self.fail(list(rail.out), rail)

    def opened(self, rail: RailRecord) -> None:
        """A link stands: a first one is trusted, one after a failure is tried with one slice."""
        rail.is_open, rail.opening, rail.stalled = True, False, False
        if rail.state is RailState.COOLING:
            rail.become(RailState.PROBING)

    def not_opened(self, rail: RailRecord, now: float) -> None:
        """No link could be made."""
        rail.opening = False
        rail.cool(now)

    def to_open(self, now: float) -> list[RailRecord]:
        """Return the rails for which a link should be made now."""
        return [
            rail
            for rail in self.rails
            if not rail.is_open
            and not rail.opening
            and (rail.state is not RailState.COOLING or rail.cooling_until <= now)
        ]

    def find_stalled(self, now: float) -> list[tuple[RailRecord, list[Slice]]]:
        """Find rails that have stalled while another one is well; their slices go elsewhere.

        Where all are silent it is the peer that is slow, and moving its slices would not help.

        Returns:
            Each newly stalled rail, with the slices that were queued again. Where late writes
            would land they are not: the link has to end first, and tells them then.
        """
        gives_way = now - self.books.urgent_at < GIVES_WAY_S
        silent = [rail for rail in self.rails if rail.is_silent(now, gives_way=gives_way)]
        if not silent or not any(r.usable and r not in silent for r in self.rails):
            return []
        found = []
        for rail in silent:
            if rail.state is RailState.COOLING:
                continue
            out = rail.cool(now)
            rail.suspect()
            found.append((rail, self._again(out, rail) if rail.repeats else []))
        return found

    def find_dead(self, now: float) -> list[RailRecord]:
        """Return stalled rails whose link has had time enough: to be closed and opened anew."""
        return [
            rail
            for rail in self.rails
            if rail.is_open and rail.repeats and rail.stalled and rail.cooling_until <= now
        ]

    def late(self, now: float) -> list[Operation]:
        """Return the operations that are beyond their deadlines."""
        late = [op for op in self.operations.values() if op.handle.deadline <= now]
        return late + [self.unfold(m) for m in self.books.messages() if m.deadline <= now]

    def end(self, operation: Operation) -> list[tuple[RailRecord, list[Slice]]]:
        """Forget an operation that ends, with its queued slices.

        Returns:
            Per rail the slices of it that are still under way.
        """
        self.operations.pop(operation.transfer_id, None)
        self.books.end(operation.transfer_id)
        whole = operation.num_finished == operation.num_slices
        if whole and operation.handle.attempts <= 1:
            return []
        if any(part.queued for part in operation.slices):
            waiting = self._classes[operation.priority]
            kept = deque(part for part in waiting.queue if part.operation is not operation)
            self._count_queued(waiting, len(kept) - len(waiting.queue))
            waiting.queue = kept
        for part in operation.slices:
            part.done, part.queued = True, False
        under_way = []
        for rail in self.rails:
            parts = [part for part in rail.out if part.operation is operation]
            if parts:
                under_way.append((rail, parts))
        return under_way

    def _queue_signal(self, signal: Slice) -> None:
        waiting = self._classes[signal.operation.priority]
        self._begin(waiting)
        signal.queued = True
        waiting.queue.append(signal)
        self._count_queued(waiting, 1)

    def _count_queued(self, waiting: _Class, change: int) -> None:
        self.books.num_queued += change
        if waiting.priority.urgent:
            self.books.urgent_queued += change

    def _again(self, lost: list[Slice], rail: RailRecord) -> list[Slice]:
        again = [part for part in lost if self._is_nowhere(part, rail)]
        for part in reversed(again):
            part.avoid, part.queued = rail.idx, True
            waiting = self._classes[part.operation.priority]
            self._begin(waiting)
            waiting.queue.appendleft(part)
            self._count_queued(waiting, 1)
        rail.retries += len(again)
        return again

    def _post(self, part: Slice, rail: RailRecord, waiting: _Class, now: float) -> None:
        self._virtual = max(self._virtual, waiting.virtual)
        waiting.virtual += max(part.nbytes, COST_BYTES_MIN) / waiting.weight
        part.attempts += 1
        part.posted_at = now
        if part.urgent:
            self.books.urgent_at = now
        if not rail.out and now - rail.measured_at > REMEASURE_S:
            rail.measured_at = now
        rail.post(part, now)

    def _is_nowhere(self, part: Slice, lost_on: RailRecord) -> bool:
        if part.done or part.queued:
            return False
        return not any(part in rail.out for rail in self.rails if rail is not lost_on)

    def _begin(self, waiting: _Class) -> None:
        if not waiting.queue:
            waiting.virtual = max(waiting.virtual, self._virtual)

    def _skip_done(self, waiting: _Class) -> None:
        # A slice that was queued again may have come to its end over the rail that was late.
        while waiting.queue and waiting.queue[0].done:
            waiting.queue.popleft().queued = False
            self._count_queued(waiting, -1)

    def _biased(self, finish: float, part: Slice, rail: RailRecord, now: float) -> float:
        if part.avoid == rail.idx:
            return finish * AVOID_FACTOR
        stale = now - rail.measured_at > REMEASURE_S and not rail.out
        if stale and part.nbytes >= SLICE_BYTES_MIN and not part.urgent:
            return 0.0
        order = part.operation.rails
        return finish * _handicap(order, rail) if order else finish

    def _bulk_fits(self, rail: RailRecord, nbytes: int, now: float) -> bool:
        under_way = rail.out_bytes - rail.urgent_bytes
        if not under_way:
            return True
        load, beside_urgent = rail.load, self._is_beside_urgent(now)
        most = load.bulk_bytes_max_beside_urgent if beside_urgent else load.bulk_bytes_max
        return under_way + nbytes <= most

    def _is_beside_urgent(self, now: float) -> bool:
        return now - self.books.urgent_at < URGENT_MEMORY_S


def _handicap(order: Tiers, rail: RailRecord) -> float:
    """So many times its time counts a rail, for memory that others suit better."""
    place = next((i for i, tier in enumerate(order) if rail.idx in tier), len(order))
    return float(PREFERENCE_FACTOR**place)
