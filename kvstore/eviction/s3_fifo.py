"""S3-FIFO: a small queue on probation, a main queue with further chances, a queue of names gone.

Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023, algorithm 1. A block
used twice on probation goes to the main queue; others leave soon, and come straight to the main
queue if they return while their name is remembered. Sizes follow the number of known blocks.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator, Sequence
from itertools import chain
from typing import Final

from kvstore.eviction.gone import GoneBlocks
from kvstore.eviction.policy import MayGo
from kvstore.eviction.rows import FIRST_QUEUE, HELD, UNKNOWN, EvictionRows, RowQueue

PROBATION_SHARE: Final = 0.1
USES_MAX: Final = 3
USES_TO_STAY: Final = 2  # of a block on probation, after it came
PROBATION: Final = FIRST_QUEUE
MAIN: Final = FIRST_QUEUE + 1
FROM_MAIN: Final = 0x80  # in `uses` of a held block: the queue that it goes back to


class S3Fifo:
    """Three queues; see `EvictionPolicy`. It does not know chains.

    Args:
        rows: Its columns.
    """

    __slots__ = (
        "_evicted",
        "_gone",
        "_main",
        "_names",
        "_num_held",
        "_place",
        "_probation",
        "_uses",
    )

    def __init__(self, rows: EvictionRows) -> None:
        self._probation = RowQueue(rows.older, rows.newer)
        self._main = RowQueue(rows.older, rows.newer)
        self._place, self._uses, self._names = rows.place, rows.uses, rows.names
        self._gone = GoneBlocks()
        self._evicted = 0  # so many went on probation
        self._num_held = 0

    def __len__(self) -> int:
        return self._probation.length + self._main.length + self._num_held

    def admit(self, rows: Sequence[int], parents: Sequence[Hashable | None] = ()) -> None:
        """Enter blocks: on probation, but those evicted from there not long ago."""
        del parents
        uses, place, names = self._uses, self._place, self._names
        new: list[int] = []
        returned = self._gone.returned([names[row] for row in rows])
        for row, before in zip(rows, returned, strict=True):
            uses[row] = 0
            if before is None:
                place[row] = PROBATION
                new.append(row)
            else:
                self._enter(row, MAIN)
        self._probation.extend(new)

    def touch(self, rows: Sequence[int]) -> None:
        """Count a use; the blocks stay where they are."""
        uses = self._uses
        for row in rows:
            if uses[row] & ~FROM_MAIN < USES_MAX:
                uses[row] += 1

    def hold(self, row: int) -> None:
        """Take a block out of its queue."""
        place = self._place[row]
        if place == HELD:
            return
        self._leave(row)
        self._place[row] = HELD
        self._num_held += 1
        if place == MAIN:
            self._uses[row] |= FROM_MAIN

    def unhold(self, row: int) -> None:
        """Enter a held block into its queue again, as the youngest."""
        if self._place[row] != HELD:
            return
        self._num_held -= 1
        was_main = self._uses[row] & FROM_MAIN
        self._uses[row] &= ~FROM_MAIN
        self._enter(row, MAIN if was_main else PROBATION)

    def remove(self, row: int, *, evicted: bool = False) -> None:
        """Forget a block; remember the name of one that was evicted on probation."""
        place = self._place[row]
        if place == HELD:
            self._num_held -= 1
        else:
            self._leave(row)
        self._place[row] = UNKNOWN
        if evicted and place == PROBATION:
            self._remember([self._names[row]], len(self))

    def evict(self, count: int, busy: array[int], may_go: MayGo) -> list[int]:
        """Forget what `victim` names; remember the names of those that were on probation."""
        place, names, probation, main = self._place, self._names, self._probation, self._main
        rows: list[int] = []
        gone: list[Hashable] = []
        known = left = len(self)
        while len(rows) < count and (row := self.victim()) is not None:
            if busy[row]:
                self.hold(row)
                continue
            if not may_go(row):
                break
            if place[row] == PROBATION:
                gone.append(names[row])
                probation.remove(row)
                left = known - len(rows) - 1
            else:
                main.remove(row)
            place[row] = UNKNOWN
            rows.append(row)
        if gone:
            self._remember(gone, left)
        return rows

    def victim(self) -> int | None:
        """Return the next to go, after those before it were given the chances they earned.

        Amortised: a use pays for at most one later move, and there are at most three unpaid.
        """
        probation, main, uses = self._probation, self._main, self._uses
        while probation.length or main.length:
            waiting = probation.length + main.length
            if probation.length and (
                not main.length or probation.length >= PROBATION_SHARE * waiting
            ):
                row = probation.oldest
                if uses[row] < USES_TO_STAY:
                    return row
                probation.remove(row)
                uses[row] = 0
                self._enter(row, MAIN)
            else:
                row = main.oldest
                if uses[row] == 0:
                    return row
                uses[row] -= 1
                main.renew(row)
        return None

    def evictable(self) -> Iterator[int]:
        """Yield what is not held."""
        return chain(self._probation, self._main)

    def _enter(self, row: int, place: int) -> None:
        self._place[row] = place
        (self._main if place == MAIN else self._probation).push(row)

    def _leave(self, row: int) -> None:
        (self._main if self._place[row] == MAIN else self._probation).remove(row)

    def _remember(self, names: Sequence[Hashable], length: int) -> None:
        first = self._evicted
        self._evicted += len(names)
        self._gone.extend(names, range(first, self._evicted))
        self._gone.shrink(max(1, length))
