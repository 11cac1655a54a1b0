"""What eviction keeps per block: columns over row numbers, and queues linked through them.

Blocks are known by row, a small int that their owner gives out. All queues of all segments share
the columns, since a row is in one queue at a time:

    oldest ──▶ 7 ──next──▶ 2 ──next──▶ 9 ◀── youngest        -1 ends both ways
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Final

from kvstore import row_loops
from kvstore.row_loops import NOWHERE as NOWHERE

UNKNOWN: Final = 0  # in `EvictionRows.place`: the row is known to no policy
HELD: Final = 1  # known, and in no queue
FIRST_QUEUE: Final = 2  # further values number the queues of a policy
LOOKED_AT_MAX: Final = 64  # rows that one search may find in use


class EvictionRows:
    """Columns that policies write. Not thread-safe.

    Attributes:
        names: What each row's block is called; the owner's.
        older, newer: Neighbours in the queue.
        place: UNKNOWN, HELD, or the policy's number of the queue that the row is in.
        uses: How often the block was used, as far as the policy counts.
        ticks: When it was used last, by the clock of its policy; see `keep_chains`.
        parents: What the block before it in its chain is called; see `keep_chains`.
        children: How many blocks that the row's policy knows name it so; see `keep_chains`.
        find: (name, row) -> the row of the block of this name in the policy that knows this row,
            perhaps not admitted yet; NOWHERE if there is none. The owner's; for chains only.
    """

    __slots__ = (
        "_has_chains",
        "children",
        "find",
        "names",
        "newer",
        "older",
        "parents",
        "place",
        "ticks",
        "uses",
    )

    def __init__(self) -> None:
        self.names: list[Hashable] = []
        self.older = array("i")
        self.newer = array("i")
        self.place = array("B")
        self.uses = array("B")
        self.ticks = array("q")
        self.parents: list[Hashable | None] = []
        self.children = array("i")
        self.find: Callable[[Hashable, int], int] = _knows_nobody
        self._has_chains = False

    def keep_chains(self) -> None:
        """Have the columns of chains, which not every policy needs, from now on."""
        if not self._has_chains:
            self._has_chains = True
            self._grow_chains(len(self))

    def __len__(self) -> int:
        return len(self.place)

    def grow(self, count: int) -> None:
        """Add rows that are unknown."""
        for column in (self.older, self.newer, self.place, self.uses):
            column.frombytes(bytes(column.itemsize * count))
        if self._has_chains:
            self._grow_chains(count)

    def _grow_chains(self, count: int) -> None:
        self.ticks.frombytes(bytes(self.ticks.itemsize * count))
        self.children.frombytes(bytes(self.children.itemsize * count))
        self.parents.extend([None] * count)


def _knows_nobody(name: Hashable, row: int) -> int:
    del name, row
    return NOWHERE


class RowQueue:
    """Rows in an order. All operations are O(1). Not thread-safe.

    Args:
        older: Column of neighbours; belongs to all queues that no row is in two of.
        newer: Likewise.
    """

    __slots__ = ("_newer", "_older", "length", "oldest", "youngest")

    def __init__(self, older: array[int], newer: array[int]) -> None:
        self._older = older
        self._newer = newer
        self.oldest = NOWHERE
        self.youngest = NOWHERE
        self.length = 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        row = self.oldest
        while row != NOWHERE:
            following = self._newer[row]
            yield row
            row = following

    def push(self, row: int) -> None:
        """Enter a row as the youngest."""
        before = self.youngest
        self._older[row] = before
        self._newer[row] = NOWHERE
        if before == NOWHERE:
            self.oldest = row
        else:
            self._newer[before] = row
        self.youngest = row
        self.length += 1

    def extend(self, rows: Sequence[int]) -> None:
        """Enter rows, the last one as the youngest."""
        if not rows:
            return
        ends = self.oldest, self.youngest
        self.oldest, self.youngest = row_loops.extend(self._older, self._newer, rows, *ends)
        self.length += len(rows)

    def push_oldest(self, row: int) -> None:
        """Enter a row as the oldest."""
        after = self.oldest
        self._older[row] = NOWHERE
        self._newer[row] = after
        if after == NOWHERE:
            self.youngest = row
        else:
            self._older[after] = row
        self.oldest = row
        self.length += 1

    def remove(self, row: int) -> None:
        """Take out a row that is in this queue."""
        before, after = self._older[row], self._newer[row]
        if before == NOWHERE:
            self.oldest = after
        else:
            self._newer[before] = after
        if after == NOWHERE:
            self.youngest = before
        else:
            self._older[after] = before
        self.length -= 1

    def cut(self, count: int, oldest: int) -> None:
        """Take out the `count` oldest rows, after which this one is the oldest."""
        self.oldest = oldest
        self.length -= count
        if oldest == NOWHERE:
            self.youngest = NOWHERE
        else:
            self._older[oldest] = NOWHERE

    def renew(self, row: int) -> None:
        """Make a row of this queue the youngest."""
        if row != self.youngest:
            self.remove(row)
            self.push(row)

    def renew_all(self, rows: Sequence[int]) -> None:
        """Make rows of this queue the youngest, one after the other."""
        ends = self.oldest, self.youngest
        self.oldest, self.youngest = row_loops.renew(self._older, self._newer, rows, *ends)

    def first(self, count: int) -> list[int]:
        """Return the oldest rows in their order, at most so many."""
        return row_loops.follow(self._newer, self.oldest, count)

    def oldest_where(self, may_go: Callable[[int], bool]) -> int | None:
        """Return the oldest row that may go, or None if none of the oldest `LOOKED_AT_MAX` may.

        Those that may not are in use, and become the youngest: the next search meets others.
        """
        for _ in range(min(self.length, LOOKED_AT_MAX)):
            row = self.oldest
            if may_go(row):
                return row
            self.renew(row)
        return None
