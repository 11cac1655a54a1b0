"""Space in one segment: best fit over free ranges that grow together again when freed.

    0          a          b                c         capacity
    [  used    )[  free   )[     used      )[  free  )        all half-open, all multiples of 64

Two free ranges never touch (they would be one), and free plus used is always the capacity. Best
fit keeps large holes for large blobs, and hands out neighbouring ranges to a batch of equal blocks.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Final

from kvstore.errors import InvariantViolated

ALIGNMENT: Final = 64


def padded(nbytes: int) -> int:
    """Round up to the unit of allocation, a cache line."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class SegmentAllocator:
    """Hands out byte ranges of a segment. Not thread-safe.

    Args:
        capacity: Size of the segment; what is beyond the last full unit is left unused.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity // ALIGNMENT * ALIGNMENT
        self.used = 0
        self._sizes: list[tuple[int, int]] = []  # (size, offset) of the free ranges, sorted
        self._free_at: dict[int, int] = {}  # start -> size
        self._free_until: dict[int, int] = {}  # end -> start
        self._used_at: dict[int, int] = {}  # start -> size
        if self.capacity:
            self._insert(0, self.capacity)

    @property
    def free(self) -> int:
        """Bytes not handed out, perhaps in many pieces."""
        return self.capacity - self.used

    @property
    def largest_free(self) -> int:
        """Size of the largest block that fits now."""
        return self._sizes[-1][0] if self._sizes else 0

    def allocate(self, nbytes: int) -> int | None:
        """Return the offset of a range of at least `nbytes` (> 0), or None if none fits."""
        assert nbytes > 0, nbytes
        size = padded(nbytes)
        found = bisect_left(self._sizes, (size, 0))
        if found == len(self._sizes):
            return None
        hole, offset = self._sizes[found]
        self._delete(offset, hole)
        if hole > size:
            self._insert(offset + size, hole - size)
        self._take(offset, size)
        return offset

    def reserve(self, offset: int, nbytes: int) -> bool:
        """Take exactly the range at `offset`; False if any of it is used or outside."""
        size = padded(nbytes)
        if nbytes <= 0 or offset < 0 or offset % ALIGNMENT or offset + size > self.capacity:
            return False
        # Newest first: whoever reserves in order of offset always cuts the hole made last.
        for start, hole in reversed(self._free_at.items()):
            if start <= offset and offset + size <= start + hole:
                break
        else:
            return False
        self._delete(start, hole)
        if offset > start:
            self._insert(start, offset - start)
        if start + hole > offset + size:
            self._insert(offset + size, start + hole - offset - size)
        self._take(offset, size)
        return True

    def release(self, offset: int) -> None:
        """Give back what `allocate` or `reserve` handed out at this offset."""
        size = self._used_at.pop(offset, None)
        if size is None:
            raise InvariantViolated(
                where="SegmentAllocator", problem=f"no allocation at offset {offset}"
            )
        self.used -= size
        start, end = offset, offset + size
        before = self._free_until.get(start)
        if before is not None:
            self._delete(before, start - before)
            start = before
        after = self._free_at.get(end)
        if after is not None:
            self._delete(end, after)
            end += after
        self._insert(start, end - start)

    def check_invariants(self) -> None:
        """Raise InvariantViolated unless the ranges tile the segment exactly."""
        free = [(start, size, False) for start, size in self._free_at.items()]
        used = [(start, size, True) for start, size in self._used_at.items()]
        position, previous_used = 0, True
        for start, size, is_used in sorted(free + used):
            if start != position or size <= 0 or size % ALIGNMENT:
                self._fail(f"range [{start}, {start + size}) after {position}")
            if not is_used and not previous_used:
                self._fail(f"two free ranges touch at {start}")
            position, previous_used = start + size, is_used
        if position != self.capacity:
            self._fail(f"ranges end at {position} of {self.capacity}")
        if self.used != sum(self._used_at.values()):
            self._fail(f"used is {self.used}, ranges say {sum(self._used_at.values())}")
        expected = sorted((size, start) for start, size in self._free_at.items())
        if self._sizes != expected:
            self._fail("the index by size differs from the free ranges")
        if self._free_until != {start + size: start for start, size in self._free_at.items()}:
            self._fail("the index by end differs from the free ranges")

    def _take(self, offset: int, size: int) -> None:
        self._used_at[offset] = size
        self.used += size

    def _insert(self, start: int, size: int) -> None:
        assert start not in self._free_at, start
        insort(self._sizes, (size, start))
        self._free_at[start] = size
        self._free_until[start + size] = start

    def _delete(self, start: int, size: int) -> None:
        found = bisect_left(self._sizes, (size, start))
        assert self._sizes[found] == (size, start), (size, start)
        del self._sizes[found]
        del self._free_at[start]
        del self._free_until[start + size]

    @staticmethod
    def _fail(problem: str) -> None:
        raise InvariantViolated(where="SegmentAllocator", problem=problem)
