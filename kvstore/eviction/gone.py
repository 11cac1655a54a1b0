"""What is remembered of blocks that were evicted; those gone longest are forgotten first.

    ring    print, number      in the order of going; the number of one that returned is -1
    slots   place in the ring  an open hash table over the prints

Of a name 32 bits of its hash are kept, so a block takes 20 to 25 bytes; in a dictionary of names it
took 190. With a million of them remembered, one in four thousand blocks that were never here is
taken for another that was: it then has that one's uses, nothing else.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from typing import Final

from kvstore import row_loops

ROOM_MIN: Final = 64
EMPTY: Final = -1
Columns = tuple["array[int]", "array[int]", "array[int]"]  # prints, numbers, slots


class GoneBlocks:
    """A number, 0 or above, for each name. O(1) amortised. Not thread-safe."""

    __slots__ = ("_columns", "_end", "_length", "_room", "_start")

    def __init__(self) -> None:
        self._room = 0
        self._columns = _columns(0)
        self._start = self._end = 0  # of what the ring holds; the place is the rest by its room
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def extend(self, names: Sequence[Hashable], numbers: Sequence[int]) -> None:
        """Remember blocks, none of which is remembered, with numbers from 0 on."""
        if self._end - self._start + len(names) > self._room:
            self._close_up(len(names))
        done = 0
        while done < len(names):
            place = self._end % self._room
            count = min(len(names) - done, self._room - place)
            part = slice(done, done + count)
            row_loops.remember(*self._columns, list(names[part]), list(numbers[part]), place)
            self._end += count
            done += count
        self._length += len(names)

    def returned(self, names: Sequence[Hashable]) -> list[int | None]:
        """Forget blocks; return the number of each, None for one that is not remembered."""
        if not self._length:
            return [None] * len(names)
        found = row_loops.recall(*self._columns, names)
        self._length -= len(found) - found.count(None)
        return found

    def shrink(self, length: int) -> list[int]:
        """Forget the oldest until so many are left; return their numbers."""
        forgotten: list[int] = []
        while self._length > length:
            place = self._start % self._room
            end = min(self._room, place + self._end - self._start)
            numbers, reached = row_loops.forget(*self._columns, place, end, self._length - length)
            self._start += reached - place
            self._length -= len(numbers)
            forgotten += numbers
        return forgotten

    def _close_up(self, count: int) -> None:
        """Make room for so many more: without those that returned, and a little larger."""
        before, room = self._columns, self._room
        needed = self._length + count
        self._room = needed + max(ROOM_MIN, needed // 8)
        self._columns = _columns(self._room)
        place = self._start % room if room else 0
        end = place + self._end - self._start
        kept = row_loops.close_up(*before, *self._columns, place, min(end, room), 0)
        kept = row_loops.close_up(*before, *self._columns, 0, max(0, end - room), kept)
        assert kept == self._length, (kept, self._length)
        self._start, self._end = 0, kept


def _columns(room: int) -> Columns:
    slots = room + room // 3 + 1  # three quarters in use at most
    empty = array("i", [EMPTY])
    return array("I", bytes(4 * room)), array("q", bytes(8 * room)), empty * slots
