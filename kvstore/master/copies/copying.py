"""Copies by the master's order: who waits, who is under way, within which bounds.

    order ─▶ queue of its source node, by urgency ─▶ under way ─▶ done: commit, source may go
               ▲                                        │
               │ tried too rarely                       ├─▶ failed: space is free again ──┐
               │                                        └─▶ too late: quarantined         │
               └──────────────────────────────────────────────────────────────────────────┘

The source node asks for work, so nobody is told more than it asked for, and a dead node makes no
copies. A copy is opened (its target space taken) only when its turn has come.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from configs.kvstore_policies import CopyBounds
from kvstore.errors import InvariantViolated
from kvstore.master.copies.copy_order import CopyOrder, Outcome, Purpose


class CopyPool(Protocol):
    """What copying needs of the pool. Rows are committed copies, segments are numbers."""

    def row_in(self, key: bytes, segment: int) -> int | None:
        """Return the copy of a block in a segment."""

    def stored_bytes(self, row: int) -> int:
        """Return the size of a copy, part table included."""

    def node_of(self, segment: int) -> str | None:
        """Return the node that lends a segment; None if it is gone."""

    def open_copy(self, row: int, target: int, now: float, purpose: Purpose) -> int | None:
        """Take space in `target` for a further copy; None if there is none."""

    def commit_copy(self, copy_id: int, now: float) -> bool:
        """Make a written copy count; False if it is too late, or its segment is gone."""

    def abort_copy(self, copy_id: int, *, at_rest: bool) -> None:
        """Give a copy up; what may still be written is quarantined unless `at_rest`."""

    def settle_late(self, node: str, copy_id: int) -> None:
        """Free what is quarantined for a copy that its node reports after all."""

    def drop(self, row: int) -> None:
        """Let one copy go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A copy under way; `node` makes it."""

    copy_id: int
    node: str
    order: CopyOrder
    target: int
    nbytes: int
    deadline_s: float


class Copying:
    """All copies that are wanted or under way. Not thread-safe.

    At most one per block: what else is wanted of it is ordered again when that one is over.

    Args:
        bounds: How much at once.
        pool: Opens, commits and gives up copies.
        targets: Returns the segments that the order of a row may go to, the best first.
        ended: Told how each order ended.
        nodes_with_work: Kept up to date: nodes for which something waits.
    """

    def __init__(
        self,
        bounds: CopyBounds,
        pool: CopyPool,
        *,
        targets: Callable[[CopyOrder, int], Iterable[int]],
        ended: Callable[[CopyOrder, Outcome], None],
        nodes_with_work: set[str],
    ) -> None:
        self._bounds = bounds
        self._pool = pool
        self._targets = targets
        self._ended = ended
        self._with_work = nodes_with_work
        self._queues: dict[str, tuple[deque[CopyOrder], ...]] = {}
        self._queued = 0
        self._waiting: dict[bytes, CopyOrder] = {}  # what counts of the queues
        self._moving: dict[bytes, CopyOrder] = {}  # opened
        self._sourceless: set[bytes] = set()  # of these: what was copied is none any more
        self._ready: dict[str, deque[Started]] = {}  # opened ahead of their turn
        self._started: dict[int, Started] = {}  # in the order of their deadlines; also the ready
        self._busy: dict[str, Counter[int]] = {}  # node -> copy id -> bytes
        self._busy_bytes: Counter[str] = Counter()  # their sums
        self.counts: Counter[tuple[Purpose, Outcome]] = Counter()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._moving)

    def purpose_of(self, key: bytes) -> Purpose | None:
        """Return why a block is being copied, or waits for it; None if it is not."""
        order = self._moving.get(key) or self._waiting.get(key)
        return None if order is None else order.purpose

    def order(self, order: CopyOrder) -> bool:
        """Queue a copy; False if there is one of this block, or too many are waiting.

        A more urgent one takes the place of one that waits.
        """
        node = self._pool.node_of(order.source)
        if node is None or self._queued >= self._bounds.queued_max or self._is_behind(order):
            return False
        self._enqueue(node, order)
        return True

    def order_at_once(self, order: CopyOrder, row: int, now: float) -> bool:
        """Open a copy ahead of its turn, so that its source stays in place from now on.

        False if there is one of this block, its node has no hand free, or there is no room.
        """
        node = self._pool.node_of(order.source)
        if node is None or self._is_behind(order):
            return False
        if not self._has_hand_free(node, self._pool.stored_bytes(row)):
            return False
        copy = self._open(order, row, node, now)
        if copy is None:
            return False
        self._ready.setdefault(node, deque()).append(copy)
        self._with_work.add(node)
        return True

    def start(self, node: str, *, limit: int, now: float) -> list[Started]:
        """Return the next copies that a node should make, opened."""
        ready = self._ready.get(node, deque())
        started = [ready.popleft() for _ in range(min(limit, len(ready)))]
        for queue in self._queues.get(node, ()):
            while queue and len(started) < limit:
                order = queue[0]
                if self._waiting.get(order.key) is not order:  # another took its place
                    self._dequeue(queue)
                    continue
                row = self._pool.row_in(order.key, order.source)
                if row is None:  # evicted or removed meanwhile
                    self._end(self._dequeue(queue), Outcome.GONE)
                    continue
                if not self._has_hand_free(node, self._pool.stored_bytes(row)):
                    return started
                copy = self._open(self._dequeue(queue), row, node, now)
                if copy is not None:
                    started.append(copy)
        self._forget_if_idle(node)
        return started

    def finish(
        self,
        node: str,
        *,
        done: Sequence[int],
        failed: Sequence[int],
        corrupt: Sequence[int],
        now: float,
    ) -> None:
        """Take a node's report. What the deadline ended is settled; unknown ids are ignored."""
        for copy_id in done:
            copy = self._take(node, copy_id)
            if copy is not None:
                self._commit(copy, now)
        for copy_id in failed:
            copy = self._take(node, copy_id)
            if copy is not None:
                self._pool.abort_copy(copy_id, at_rest=True)
                self._try_again(copy.order)
        for copy_id in corrupt:
            copy = self._take(node, copy_id)
            if copy is not None:
                self._pool.abort_copy(copy_id, at_rest=True)
                row = self._pool.row_in(copy.order.key, copy.order.source)
                if row is not None and copy.order.key not in self._sourceless:
                    self._pool.drop(row)
                self._end(copy.order, Outcome.CORRUPT)

    def dropped(self, key: bytes, source: int) -> None:
        """A block's copy in a segment goes. One that is put there anew is not what was ordered."""
        moving, waiting = self._moving.get(key), self._waiting.get(key)
        if moving is not None and moving.source == source:
            self._sourceless.add(key)
        elif waiting is not None and waiting.source == source and not waiting.purpose.moves:
            self._leave_queue(waiting, Outcome.GONE)

    def expire(self, now: float) -> None:
        """Give up what should have been reported by now; its target may still be written."""
        while self._started:
            copy = next(iter(self._started.values()))
            if copy.deadline_s > now:
                return
            # What was never handed out is written by nobody.
            at_rest = copy in self._ready.get(copy.node, ())
            self._remove(copy)
            self._pool.abort_copy(copy.copy_id, at_rest=at_rest)
            self._try_again(copy.order)

    def cancel(self, purpose: Purpose, source: int) -> None:
        """Forget what waits for a purpose in one segment; what is under way ends by itself."""
        node = self._pool.node_of(source)
        queues = self._queues.get(node, ()) if node is not None else ()
        if not queues:
            return
        queue = queues[purpose]
        kept = [order for order in queue if order.source != source]
        for order in queue:
            if order.source == source:
                self._queued -= 1
                self._leave_queue(order, Outcome.CANCELLED)
        queue.clear()
        queue.extend(kept)

    def lose_node(self, node: str) -> None:
        """Forget what a lost node should have copied; the pool counts what it had opened."""
        for queue in self._queues.pop(node, ()):
            while queue:
                self._leave_queue(self._dequeue(queue), Outcome.GONE)
        for copy_id in list(self._busy.get(node, ())):
            copy = self._started[copy_id]
            self._remove(copy)
            self._end(copy.order, Outcome.GONE)
        self._forget_if_idle(node)

    def check_invariants(self) -> None:
        """Raise InvariantViolated unless queues, keys and what is under way agree."""
        queued = [o for queues in self._queues.values() for queue in queues for o in queue]
        waiting = [o for o in queued if self._waiting.get(o.key) is o]
        if len(queued) != self._queued or len(waiting) != len(self._waiting):
            self._fail("what waits is not what is queued")
        if not self._sourceless <= self._moving.keys():
            self._fail("what lost its source is not under way")
        if {c.order.key: c.order for c in self._started.values()} != self._moving:
            self._fail("what moves is not what was opened")
        if len(self._started) != len(self._moving) or self._moving.keys() & self._waiting.keys():
            self._fail("two copies of one block are ordered")
        busy = {copy_id for copies in self._busy.values() for copy_id in copies}
        if busy != set(self._started):
            self._fail("the copies under way are not those of the nodes")
        if self._busy_bytes != {node: sum(copies.values()) for node, copies in self._busy.items()}:
            self._fail("the bytes under way are miscounted")
        for node, copies in self._busy.items():
            many = len(copies) > 1 and sum(copies.values()) > self._bounds.bytes_per_node
            if len(copies) > self._bounds.per_node or many:
                self._fail(f"{node} makes {len(copies)} copies of {sum(copies.values())} bytes")

    # -- inside -------------------------------------------------------------------------------

    def _is_behind(self, order: CopyOrder) -> bool:
        """Tell whether an order has to stand back; else nothing waits for this block any more."""
        waiting = self._waiting.get(order.key)
        if order.key in self._moving or (waiting and waiting.purpose <= order.purpose):
            return True
        if waiting is not None:
            self._leave_queue(waiting, Outcome.CANCELLED)
        return False

    def _leave_queue(self, order: CopyOrder, outcome: Outcome) -> None:
        if self._waiting.get(order.key) is order:
            self._end(order, outcome)

    def _enqueue(self, node: str, order: CopyOrder) -> None:
        queues = self._queues.get(node)
        if queues is None:
            queues = self._queues[node] = tuple(deque() for _ in Purpose)
        queues[order.purpose].append(order)
        self._with_work.add(node)
        self._queued += 1
        self._waiting[order.key] = order

    def _dequeue(self, queue: deque[CopyOrder]) -> CopyOrder:
        self._queued -= 1
        return queue.popleft()

    def _open(self, order: CopyOrder, row: int, node: str, now: float) -> Started | None:
        nbytes = self._pool.stored_bytes(row)
        targets = (order.target,) if order.target is not None else self._targets(order, row)
        for target in targets:
            copy_id = self._pool.open_copy(row, target, now, order.purpose)
            if copy_id is None:
                continue
            copy = Started(
                copy_id=copy_id,
                node=node,
                order=order,
                target=target,
                nbytes=nbytes,
                deadline_s=now + self._bounds.deadline_s,
            )
            self._waiting.pop(order.key, None)
            self._moving[order.key] = order
            self._started[copy_id] = copy
            self._busy.setdefault(node, Counter())[copy_id] = nbytes
            self._busy_bytes[node] += nbytes
            return copy
        self._end(order, Outcome.NO_SPACE)
        return None

    def _commit(self, copy: Started, now: float) -> None:
        order = copy.order
        if not self._pool.commit_copy(copy.copy_id, now):
            self._end(order, Outcome.GONE)
            return
        if order.purpose.moves:
            row = self._pool.row_in(order.key, order.source)
            if row is not None:
                self._pool.drop(row)
        self._end(order, Outcome.DONE)

    def _try_again(self, order: CopyOrder) -> None:
        node = self._pool.node_of(order.source)
        if node is None or order.attempts + 1 >= self._bounds.attempts:
            self._end(order, Outcome.FAILED)
            return
        self.counts[order.purpose, Outcome.RETRIED] += 1
        self._moving.pop(order.key, None)
        self._sourceless.discard(order.key)
        self._enqueue(node, replace(order, attempts=order.attempts + 1))

    def _take(self, node: str, copy_id: int) -> Started | None:
        if copy_id not in self._busy.get(node, ()):
            self._pool.settle_late(node, copy_id)
            return None
        copy = self._started[copy_id]
        self._remove(copy)
        return copy

    def _remove(self, copy: Started) -> None:
        del self._started[copy.copy_id]
        copies = self._busy[copy.node]
        self._busy_bytes[copy.node] -= copies.pop(copy.copy_id)
        if not copies:
            del self._busy[copy.node]
            del self._busy_bytes[copy.node]
        ready = self._ready.get(copy.node)
        if ready is not None and copy in ready:
            ready.remove(copy)

    def _end(self, order: CopyOrder, outcome: Outcome) -> None:
        self._waiting.pop(order.key, None)
        self._moving.pop(order.key, None)
        self._sourceless.discard(order.key)
        self.counts[order.purpose, outcome] += 1
        self._ended(order, outcome)

    def _has_hand_free(self, node: str, nbytes: int) -> bool:
        copies = self._busy.get(node)
        if not copies:
            return True
        fits = self._busy_bytes[node] + nbytes <= self._bounds.bytes_per_node
        return fits and len(copies) < self._bounds.per_node

    def _forget_if_idle(self, node: str) -> None:
        if not self._ready.get(node, True):
            del self._ready[node]
        if not any(self._queues.get(node, ())):
            self._queues.pop(node, None)
            if node not in self._ready:
                self._with_work.discard(node)

    @staticmethod
    def _fail(problem: str) -> None:
        raise InvariantViolated(where="Copying", problem=problem)
