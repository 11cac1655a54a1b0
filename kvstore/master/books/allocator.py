"""Space in one segment: segregated fit over free ranges that grow together again when freed.

    0          a          b                c         capacity
    [  used    )[  free   )[     used      )[  free  )        all half-open, all multiples of 64

Two free ranges never touch (they would be one), and free plus used is always the capacity. Free
ranges are kept by size class: 16 classes for each power of two, so a class spans at most 1/16 of
its sizes. A block takes a range of exactly its size if there is one (a pool of equal blocks never
fragments), else one of the smallest class of which all fit, else it looks at a few of its own
class. Whatever the number of ranges, that is a fixed number of steps. (After Masmano and others,
"TLSF: a new dynamic memory allocator for real-time systems", ECRTS 2004; exact sizes first.)

How long a handed-out range is, is its owner's to know: `release` is told.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import Final

from kvstore.errors import InvariantViolated

ALIGNMENT: Final = 64
CLASS_BITS: Final = 4  # 16 classes for each power of two
LOOKED_AT_MAX: Final = 16  # ranges of a block's own class


def padded(nbytes: int) -> int:
    """Round up to the unit of allocation, a cache line."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def class_of(size: int) -> int:
    """Return the class that a range of this size is in. Classes are in the order of sizes."""
    units = size // ALIGNMENT
    shift = units.bit_length() - CLASS_BITS - 1
    return units if shift <= 0 else (shift << CLASS_BITS) + (units >> shift)


class SegmentAllocator:
    """Hands out byte ranges of a segment. Not thread-safe.

    Args:
        capacity: Size of the segment; what is beyond the last full unit is left unused.
        used: Ranges `(start, size)` that are taken already: in order, disjoint, aligned.
    """

    def __init__(self, capacity: int, used: Iterable[tuple[int, int]] = ()) -> None:
        self.capacity = capacity // ALIGNMENT * ALIGNMENT
        self.used = 0
        self._sizes: dict[int, int] = {}  # of the free ranges, by start
        self._starts: dict[int, int] = {}  # of the free ranges, by end
        self._classes: dict[int, dict[int, dict[int, None]]] = {}  # class -> size -> starts
        self.filled = 0  # bit i: class i has a range; read it only
        position = 0
        for start, size in used:
            if start > position:
                self._insert(position, start - position)
            position = start + size
            self.used += size
        if position < self.capacity:
            self._insert(position, self.capacity - position)

    @property
    def free(self) -> int:
        """Bytes not handed out, perhaps in many pieces."""
        return self.capacity - self.used

    @property
    def largest_free(self) -> int:
        """Size of the largest block that fits now. O(ranges of the largest class)."""
        return max(self._classes[self.filled.bit_length() - 1]) if self.filled else 0

    @property
    def free_ranges(self) -> int:
        """In how many pieces the free bytes are."""
        return len(self._sizes)

    def allocate(self, nbytes: int) -> int | None:
        """Return the offset of a range of at least `nbytes` (> 0), or None if none is found.

        None although one would fit is possible only if it is larger by less than 1/16 and hidden
        behind `LOOKED_AT_MAX` others that are too small.
        """
        offset, count = self.allocate_run(nbytes, 1)
        return offset if count else None

    def allocate_run(self, nbytes: int, count: int) -> tuple[int, int]:
        """Return where up to so many blocks of this size lie one behind the other, and how many.

        One range is cut; 0 blocks if none is found, as with `allocate`.
        """
        assert nbytes > 0, nbytes
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        number = class_of(size)
        if not self.filled >> number:
            return 0, 0
        own = self._classes.get(number)
        if own is not None and size in own:
            hole = size
        else:
            number, hole = self._larger(number, size)
            if hole == 0:
                return 0, 0
        offset = next(reversed(self._classes[number][hole]))
        self._delete(offset, hole)
        count = min(count, hole // size)
        taken = count * size
        if hole > taken:
            self._insert(offset + taken, hole - taken)
        self.used += taken
        return offset, count

    def release(self, offset: int, nbytes: int) -> None:
        """Give back what `allocate` handed out, or what was taken from the start.

        Raises:
            InvariantViolated: Part of it is free already, or outside.
        """
        size = padded(nbytes)
        start, end = offset, offset + size
        if size > self.used or start < 0 or end > self.capacity or start in self._sizes:
            self._fail(f"[{start}, {end}) was not handed out")
        before = self._starts.get(start)
        if before is not None:
            self._delete(before, start - before)
            start = before
        after = self._sizes.get(end)
        if after is not None:
            self._delete(end, after)
            end += after
        self._insert(start, end - start)
        self.used -= size

    def check_invariants(self, used: Iterable[tuple[int, int]]) -> None:
        """Raise InvariantViolated unless these ranges and the free ones tile the segment."""
        taken = list(used)
        ranges = [(start, size, True) for start, size in taken]
        ranges += [(start, size, False) for start, size in self._sizes.items()]
        position, previous_used = 0, True
        for start, size, is_used in sorted(ranges):
            if start != position or size <= 0 or size % ALIGNMENT:
                self._fail(f"range [{start}, {start + size}) after {position}")
            if not is_used and not previous_used:
                self._fail(f"two free ranges touch at {start}")
            position, previous_used = start + size, is_used
        if position != self.capacity:
            self._fail(f"ranges end at {position} of {self.capacity}")
        if self.used != sum(size for _, size in taken):
            self._fail(f"used is {self.used}, ranges say {sum(size for _, size in taken)}")
        by_class = {
            start: size
            for number, sizes in self._classes.items()
            for size, starts in sizes.items()
            for start in starts
            if number == class_of(size)
        }
        if by_class != self._sizes or self.filled != sum(1 << i for i in self._classes):
            self._fail("the index by size differs from the free ranges")
        if self._starts != {start + size: start for start, size in self._sizes.items()}:
            self._fail("the index by end differs from the free ranges")

    def _larger(self, number: int, size: int) -> tuple[int, int]:
        """Return class and size of the free range to cut, none being exact; size 0: none found."""
        larger = self.filled >> (number + 1)
        if larger:
            lowest = number + (larger & -larger).bit_length()
            return lowest, next(reversed(self._classes[lowest]))
        for _, hole in zip(range(LOOKED_AT_MAX), reversed(self._classes[number]), strict=False):
            if hole > size:
                return number, hole
        return number, 0

    def _insert(self, start: int, size: int) -> None:
        self._sizes[start] = size
        self._starts[start + size] = start
        number = class_of(size)
        sizes = self._classes.get(number)
        if sizes is None:
            self._classes[number] = {size: {start: None}}
            self.filled |= 1 << number
        elif size in sizes:
            sizes[size][start] = None
        else:
            sizes[size] = {start: None}

    def _delete(self, start: int, size: int) -> None:
        del self._sizes[start]
        del self._starts[start + size]
        number = class_of(size)
        sizes = self._classes[number]
        starts = sizes[size]
        del starts[start]
        if not starts:
            del sizes[size]
            if not sizes:
                del self._classes[number]
                self.filled ^= 1 << number

    @staticmethod
    def _fail(problem: str) -> None:
        raise InvariantViolated(where="SegmentAllocator", problem=problem)


class ReservedRanges:
    """Ranges that a node says are taken, in any order, before anything is allocated.

    Enough while a segment's blocks are still being told: adding in order of offset is O(1), else
    O(log n) and a short move. Same figures as `SegmentAllocator`, which takes over afterwards.
    Not thread-safe.

    Args:
        capacity: Size of the segment.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity // ALIGNMENT * ALIGNMENT
        self.used = 0
        self._ranges: list[tuple[int, int]] = []  # (start, size), sorted

    def reserve(self, offset: int, nbytes: int) -> bool:
        """Take exactly the range at `offset`; False if any of it is used or outside."""
        size = padded(nbytes)
        end = offset + size
        if nbytes <= 0 or offset < 0 or offset % ALIGNMENT or end > self.capacity:
            return False
        ranges = self._ranges
        if not ranges or offset >= ranges[-1][0] + ranges[-1][1]:
            ranges.append((offset, size))
        else:
            place = bisect_left(ranges, (offset, 0))
            if place < len(ranges) and ranges[place][0] < end:
                return False
            if place and ranges[place - 1][0] + ranges[place - 1][1] > offset:
                return False
            insort(ranges, (offset, size))
        self.used += size
        return True

    def release(self, offset: int, nbytes: int) -> None:
        """Give a range back."""
        place = bisect_left(self._ranges, (offset, padded(nbytes)))
        assert self._ranges[place] == (offset, padded(nbytes)), (offset, nbytes)
        self.used -= self._ranges.pop(place)[1]

    def allocator(self) -> SegmentAllocator:
        """Return an allocator of the rest."""
        return SegmentAllocator(self.capacity, self._ranges)
