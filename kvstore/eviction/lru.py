"""The least recently used block goes first."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator, Sequence

from kvstore import row_loops
from kvstore.eviction.policy import MayGo
from kvstore.eviction.rows import FIRST_QUEUE, HELD, NOWHERE, UNKNOWN, EvictionRows, RowQueue


class LeastRecentlyUsed:
    """One queue in the order of use; see `EvictionPolicy`.

    A chain is touched from its leaf to its root, so it is eaten from the leaf: what is left is
    always a usable prefix.

    Args:
        rows: Its columns.
    """

    __slots__ = ("_newer", "_num_held", "_place", "_queue")

    def __init__(self, rows: EvictionRows) -> None:
        self._queue = RowQueue(rows.older, rows.newer)
        self._place, self._newer = rows.place, rows.newer
        self._num_held = 0

    def __len__(self) -> int:
        return self._queue.length + self._num_held

    def admit(self, rows: Sequence[int], parents: Sequence[Hashable | None] = ()) -> None:
        """Enter blocks as the youngest."""
        del parents
        row_loops.fill(self._place, rows, FIRST_QUEUE)
        self._queue.extend(rows)

    def touch(self, rows: Sequence[int]) -> None:
        """Make blocks the youngest."""
        self._queue.renew_all(row_loops.where(self._place, rows, FIRST_QUEUE))

    def hold(self, row: int) -> None:
        """Take a block out of the queue."""
        if self._place[row] == FIRST_QUEUE:
            self._queue.remove(row)
            self._place[row] = HELD
            self._num_held += 1

    def unhold(self, row: int) -> None:
        """Enter a held block as the youngest."""
        if self._place[row] == HELD:
            self._num_held -= 1
            self._place[row] = FIRST_QUEUE
            self._queue.push(row)

    def remove(self, row: int, *, evicted: bool = False) -> None:
        """Forget a block."""
        del evicted
        if self._place[row] == HELD:
            self._num_held -= 1
        else:
            self._queue.remove(row)
        self._place[row] = UNKNOWN

    def evict(self, count: int, busy: array[int], may_go: MayGo) -> list[int]:
        """Forget the oldest."""
        queue, place, newer = self._queue, self._place, self._newer
        rows = queue.first(count + 1)
        following = rows.pop() if len(rows) > count else NOWHERE
        if row_loops.all_are(busy, rows, 0) and may_go.all_may(rows):  # as nearly always
            row_loops.fill(place, rows, UNKNOWN)
            queue.cut(len(rows), following)
            return rows
        rows = []
        row = queue.oldest
        while row != NOWHERE and len(rows) < count:
            following = newer[row]
            if busy[row]:
                self.hold(row)
            elif may_go(row):
                place[row] = UNKNOWN
                rows.append(row)
            else:
                break
            row = following
        queue.cut(len(rows), row)
        return rows

    def victim(self) -> int | None:
        """Return the oldest."""
        oldest = self._queue.oldest
        return None if oldest == NOWHERE else oldest

    def evictable(self) -> Iterator[int]:
        """Yield what is not held, the oldest first."""
        return iter(self._queue)
