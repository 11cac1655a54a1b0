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
from kvstore.master.copy_order import CopyOrder, Outcome, Purpose


class CopyPool(Protocol):
    """What copying needs of the pool. Rows are committed copies, segments are numbers."""

    def row_in(self, key: bytes, segment: int) -> int | None:
        """Return the copy of a block in a segment."""

    def stored_bytes(self, row: int) -> int:
        """Return the size of a copy, part table included."""

    def node_of(self, segment: int) -> str | None:
        """Return the node that lends a segment; None if it is gone."""

    def open_copy(self, row: int, target: int, now: float) -> int | None:
        """Take space in `target` for a further copy; None if there is none."""

    def commit_copy(self, copy_id: int) -> bool:
        """Make a written copy count; False if it is too late, or its segment is gone."""

    def abort_copy(self, copy_id: int, *, at_rest: bool) -> None:
        """Give a copy up; what may still be written is quarantined unless `at_rest`."""

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
    """

    def __init__(
        self,
        bounds: CopyBounds,
        pool: CopyPool,
        *,
        targets: Callable[[CopyOrder, int], Iterable[int]],
        ended: Callable[[CopyOrder, Outcome], None],
    ) -> None:
        self._bounds = bounds
        self._pool = pool
        self._targets = targets
        self._ended = ended
        self._queues: dict[str, tuple[deque[CopyOrder], ...]] = {}
        self._queued = 0
        self._keys: dict[bytes, Purpose] = {}  # of all orders, queued and under way
        self._started: dict[int, Started] = {}  # in the order of their deadlines
        self._busy: dict[str, Counter[int]] = {}  # node -> copy id -> bytes
        self.counts: Counter[tuple[Purpose, Outcome]] = Counter()

    def __len__(self) -> int:
        return len(self._keys)

    def purpose_of(self, key: bytes) -> Purpose | None:
        """Return why a block is being copied, or waits for it; None if it is not."""
        return self._keys.get(key)

    def has_work(self, node: str) -> bool:
        """Tell whether a node should ask for work now."""
        queues = self._queues.get(node)
        return queues is not None and any(queues) and self._has_hand_free(node, 0)

    def order(self, order: CopyOrder) -> bool:
        """Queue a copy; False if there is one of this block, or too many are waiting."""
        node = self._pool.node_of(order.source)
        if node is None or order.key in self._keys or self._queued >= self._bounds.queued_max:
            return False
        self._enqueue(node, order)
        return True

    def start(self, node: str, *, limit: int, now: float) -> list[Started]:
        """Open the next copies that a node should make."""
        started: list[Started] = []
        for queue in self._queues.get(node, ()):
            while queue and len(started) < limit:
                order = queue[0]
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
    ) -> None:
        """Take a node's report. Ids that are unknown (ended by the deadline, or another node's)
        are ignored.
        """
        for copy_id in done:
            copy = self._take(node, copy_id)
            if copy is not None:
                self._commit(copy)
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
                if row is not None:
                    self._pool.drop(row)
                self._end(copy.order, Outcome.CORRUPT)

    def expire(self, now: float) -> None:
        """Give up what should have been reported by now; its target may still be written."""
        while self._started:
            copy = next(iter(self._started.values()))
            if copy.deadline_s > now:
                return
            self._remove(copy)
            self._pool.abort_copy(copy.copy_id, at_rest=False)
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
                self._end(order, Outcome.CANCELLED)
        queue.clear()
        queue.extend(kept)

    def lose_node(self, node: str) -> None:
        """Forget what a lost node should have copied; the pool counts what it had opened."""
        for queue in self._queues.pop(node, ()):
            while queue:
                self._end(self._dequeue(queue), Outcome.GONE)
        for copy_id in list(self._busy.get(node, ())):
            copy = self._started[copy_id]
            self._remove(copy)
            self._end(copy.order, Outcome.GONE)

    def check_invariants(self) -> None:
        """Raise InvariantViolated unless queues, keys and what is under way agree."""
        queued = [o for queues in self._queues.values() for queue in queues for o in queue]
        orders = [*queued, *(copy.order for copy in self._started.values())]
        if len(queued) != self._queued or {o.key: o.purpose for o in orders} != self._keys:
            self._fail("the keys are not those of the orders")
        if len(orders) != len(self._keys):
            self._fail("two copies of one block are ordered")
        busy = {copy_id for copies in self._busy.values() for copy_id in copies}
        if busy != set(self._started):
            self._fail("the copies under way are not those of the nodes")
        for node, copies in self._busy.items():
            many = len(copies) > 1 and sum(copies.values()) > self._bounds.bytes_per_node
            if len(copies) > self._bounds.per_node or many:
                self._fail(f"{node} makes {len(copies)} copies of {sum(copies.values())} bytes")

    # -- inside -------------------------------------------------------------------------------

    def _enqueue(self, node: str, order: CopyOrder) -> None:
        queues = self._queues.get(node)
        if queues is None:
            queues = self._queues[node] = tuple(deque() for _ in Purpose)
        queues[order.purpose].append(order)
        self._queued += 1
        self._keys[order.key] = order.purpose

    def _dequeue(self, queue: deque[CopyOrder]) -> CopyOrder:
        self._queued -= 1
        return queue.popleft()

    def _open(self, order: CopyOrder, row: int, node: str, now: float) -> Started | None:
        nbytes = self._pool.stored_bytes(row)
        targets = (order.target,) if order.target is not None else self._targets(order, row)
        for target in targets:
            copy_id = self._pool.open_copy(row, target, now)
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
            self._started[copy_id] = copy
            self._busy.setdefault(node, Counter())[copy_id] = nbytes
            return copy
        self._end(order, Outcome.NO_SPACE)
        return None

    def _commit(self, copy: Started) -> None:
        order = copy.order
        if not self._pool.commit_copy(copy.copy_id):
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
        self._enqueue(node, replace(order, attempts=order.attempts + 1))

    def _take(self, node: str, copy_id: int) -> Started | None:
        if copy_id not in self._busy.get(node, ()):
            return None
        copy = self._started[copy_id]
        self._remove(copy)
        return copy

    def _remove(self, copy: Started) -> None:
        del self._started[copy.copy_id]
        copies = self._busy[copy.node]
        del copies[copy.copy_id]
        if not copies:
            del self._busy[copy.node]

    def _end(self, order: CopyOrder, outcome: Outcome) -> None:
        del self._keys[order.key]
        self.counts[order.purpose, outcome] += 1
        self._ended(order, outcome)

    def _has_hand_free(self, node: str, nbytes: int) -> bool:
        copies = self._busy.get(node)
        if not copies:
            return True
        fits = sum(copies.values()) + nbytes <= self._bounds.bytes_per_node
        return fits and len(copies) < self._bounds.per_node

    def _forget_if_idle(self, node: str) -> None:
        if node in self._queues and not any(self._queues[node]):
            del self._queues[node]

    @staticmethod
    def _fail(problem: str) -> None:
        raise InvariantViolated(where="Copying", problem=problem)
