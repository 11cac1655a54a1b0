"""S3-FIFO: a small queue on probation, a main queue with further chances, a queue of names gone.

Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023, algorithm 1. A block
used twice on probation goes to the main queue; others leave soon, and come straight to the main
queue if they return while their name is remembered. Sizes follow the number of known blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from itertools import chain
from typing import Final

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

    __slots__ = ("_gone", "_main", "_names", "_num_held", "_place", "_probation", "_uses")

    def __init__(self, rows: EvictionRows) -> None:
        self._probation = RowQueue(rows.older, rows.newer)
        self._main = RowQueue(rows.older, rows.newer)
        self._place, self._uses, self._names = rows.place, rows.uses, rows.names
        self._gone: OrderedDict[Hashable, None] = OrderedDict()
        self._num_held = 0

    def __len__(self) -> int:
        return self._probation.length + self._main.length + self._num_held

    def admit(self, row: int, parent: Hashable | None = None) -> None:
        """Enter a block: on probation, unless it was evicted from there not long ago."""
        del parent
        self._uses[row] = 0
        name = self._names[row]
        if name in self._gone:
            del self._gone[name]
            self._enter(row, MAIN)
        else:
            self._enter(row, PROBATION)

    def touch(self, row: int) -> None:
        """Count a use; the block stays where it is."""
        if self._uses[row] & ~FROM_MAIN < USES_MAX:
            self._uses[row] += 1

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
            self._gone[self._names[row]] = None
            while len(self._gone) > max(1, len(self)):
                self._gone.popitem(last=False)

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
