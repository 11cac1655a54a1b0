"""What is remembered of blocks that were evicted; those gone longest are forgotten first.

    ring    print, number      in the order of going; the number of one that returned is -1
    slots   place in the ring  an open hash table over the prints

A full ring is followed by another one, with a place in front for each name of the first. With every
name that comes some of these move over, so no single call has to move a million of them:

    former   [ . . . d - e f ]          a, b, c have moved; the - has returned
    ring     [ a b c | . . . | g h ]    d, e, f go to the places that wait for them

Of a name 32 bits of its hash are kept, so a block takes 20 to 25 bytes, twice that while names
move; in a dictionary of names it took 190. With a million of them remembered, one in four thousand
blocks that were never here is taken for another that was: it then has that one's uses, nothing
else.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from typing import Final

from kvstore import row_loops

ROOM_MIN: Final = 64
MOVED_PER_NAME: Final = 32  # all have moved when a fourth of the new ring's spare room is used
EMPTY: Final = -1


class GoneBlocks:
    """A number, 0 or above, for each name. O(1) a name, but for making a ring. Not thread-safe."""

    __slots__ = ("_former", "_length", "_moved", "_ring", "_waiting")

    def __init__(self) -> None:
        self._ring = _Ring(0)
        self._former: _Ring | None = None  # all of it went before what came to the ring by itself
        self._moved = 0  # place of the ring for the next that moves
        self._waiting = 0  # end of these places
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def extend(self, names: Sequence[Hashable], numbers: Sequence[int]) -> None:
        """Remember blocks, none of which is remembered, with numbers from 0 on."""
        if self._ring.num_free < len(names):
            self._begin_ring(len(names))
        self._ring.extend(names, numbers)
        self._length += len(names)
        self._move(MOVED_PER_NAME * len(names))

    def returned(self, names: Sequence[Hashable]) -> list[int | None]:
        """Forget blocks; return the number of each, None for one that is not remembered."""
        if not self._length:
            return [None] * len(names)
        found = row_loops.recall(*self._ring.columns, names)
        if self._former is not None:
            missing = [i for i, number in enumerate(found) if number is None]
            before = row_loops.recall(*self._former.columns, [names[i] for i in missing])
            for i, number in zip(missing, before, strict=True):
                found[i] = number
        self._length -= len(found) - found.count(None)
        return found

    def shrink(self, length: int) -> list[int]:
        """Forget the oldest until so many are left; return their numbers."""
        excess = self._length - length
        if excess <= 0:
            return []
        self._move(excess)  # those before them may have returned: that many have moved now at least
        forgotten = self._ring.forget(excess)
        self._length -= len(forgotten)
        return forgotten

    def _begin_ring(self, count: int) -> None:
        """Make room for so many more, in a ring of what is remembered and a little more."""
        self._move(self._length + 1)  # more than there are: all, if very many came at once
        needed = self._length + count
        self._former, self._ring = self._ring, _Ring(needed + max(ROOM_MIN, needed // 8))
        self._moved, self._waiting = 0, self._length
        self._ring.end = self._length

    def _move(self, count: int) -> None:
        """Move so many of the oldest, or all, from the former ring to the places for them."""
        former = self._former
        while former is not None and count > 0:
            if former.start == former.end:
                self._ring.leave_out(self._moved, self._waiting)
                self._former = former = None
            else:
                place, end = former.oldest_run(count)
                moved = row_loops.close_up(
                    *former.columns, *self._ring.columns, place, end, self._moved
                )
                count -= moved - self._moved
                self._moved = moved
                former.start += end - place


class _Ring:
    """Names and numbers in places that follow one another, round and round.

    Attributes:
        columns: Prints, numbers, slots.
        start, end: Of what it holds, counted on from round to round.
    """

    __slots__ = ("_room", "columns", "end", "start")

    def __init__(self, room: int) -> None:
        self._room = room
        num_slots = room + room // 3 + 1  # three quarters in use at most
        self.columns = (
            array("I", [0]) * room,
            array("q", [0]) * room,
            array("i", [EMPTY]) * num_slots,
        )
        self.start = self.end = 0

    @property
    def num_free(self) -> int:
        """How many more it can take."""
        return self._room - (self.end - self.start)

    def extend(self, names: Sequence[Hashable], numbers: Sequence[int]) -> None:
        """Enter as many as are free at most."""
        done = 0
        while done < len(names):
            place = self.end % self._room
            count = min(len(names) - done, self._room - place)
            part = slice(done, done + count)
            row_loops.remember(*self.columns, list(names[part]), list(numbers[part]), place)
            self.end += count
            done += count

    def forget(self, most: int) -> list[int]:
        """Take out that many of the oldest, which are there; return their numbers."""
        forgotten: list[int] = []
        while len(forgotten) < most:
            place, end = self.oldest_run(self.end - self.start)
            numbers, reached = row_loops.forget(*self.columns, place, end, most - len(forgotten))
            self.start += reached - place
            forgotten += numbers
        return forgotten

    def oldest_run(self, most: int) -> tuple[int, int]:
        """Return first place and end of the oldest that lie in one piece."""
        place = self.start % self._room
        return place, min(self._room, place + most, place + self.end - self.start)

    def leave_out(self, place: int, end: int) -> None:
        """Count these places as those of names that returned."""
        self.columns[1][place:end] = array("q", [row_loops.RETURNED]) * (end - place)
