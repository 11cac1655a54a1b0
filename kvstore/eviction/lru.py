"""The least recently used block goes first."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from kvstore.eviction.rows import FIRST_QUEUE, HELD, NOWHERE, UNKNOWN, EvictionRows, RowQueue


class LeastRecentlyUsed:
    """One queue in the order of use; see `EvictionPolicy`.

    A chain is touched from its leaf to its root, so it is eaten from the leaf: what is left is
    always a usable prefix.

    Args:
        rows: Its columns.
    """

    __slots__ = ("_num_held", "_place", "_queue")

    def __init__(self, rows: EvictionRows) -> None:
        self._queue = RowQueue(rows.older, rows.newer)
        self._place = rows.place
        self._num_held = 0

    def __len__(self) -> int:
        return self._queue.length + self._num_held

    def admit(self, row: int, parent: Hashable | None = None) -> None:
        """Enter a block as the youngest."""
        del parent
        self._place[row] = FIRST_QUEUE
        self._queue.push(row)

    def touch(self, row: int) -> None:
        """Make a block the youngest."""
        if self._place[row] == FIRST_QUEUE:
            self._queue.renew(row)

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

    def victim(self) -> int | None:
        """Return the oldest."""
        oldest = self._queue.oldest
        return None if oldest == NOWHERE else oldest

    def evictable(self) -> Iterator[int]:
        """Yield what is not held, the oldest first."""
        return iter(self._queue)
