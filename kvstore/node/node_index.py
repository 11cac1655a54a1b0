"""What a node remembers of one segment, for the day a new master asks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from kvstore.node.indexed_block import IndexedBlock


class NodeIndex:
    """Blocks that writers said they put here, none over another. Not thread-safe.

        offsets   |        |              |
        blocks    [-- a --)[---- b ----)  [- c -)
        record          [--- d ---)                 a and b are gone: some of their bytes are d's

    The node is not told what the master evicts; it need not be. A range that was written anew
    replaces what it overlaps, and what is left is believed only if the bytes still match the
    checksum. Blocks that were evicted but not yet overwritten thus come back, which is right: a
    key names bytes, and these are the bytes.

    Args:
        nbytes: Size of the segment; blocks outside of it are ignored.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._offsets: list[int] = []  # ascending
        self._blocks: dict[int, IndexedBlock] = {}  # by offset
        self._held_bytes = 0

    def __len__(self) -> int:
        return len(self._offsets)

    def __iter__(self) -> Iterator[IndexedBlock]:
        """By offset."""
        return (self._blocks[offset] for offset in self._offsets)

    @property
    def held_bytes(self) -> int:
        """Bytes of all blocks, part tables included."""
        return self._held_bytes

    def at(self, offset: int) -> IndexedBlock | None:
        """Return the block that starts there."""
        return self._blocks.get(offset)

    def record(self, block: IndexedBlock) -> bool:
        """Enter what a writer says; False if it is impossible."""
        if not block.fits(self._nbytes):
            return False
        same = self._blocks.get(block.offset)
        if same is not None and same.end == block.end:  # usual where blocks are of one size
            self._held_bytes += block.nbytes - same.nbytes
            self._blocks[block.offset] = block
            return True
        self.forget_range(block.offset, block.end)
        self._offsets.insert(bisect_left(self._offsets, block.offset), block.offset)
        self._blocks[block.offset] = block
        self._held_bytes += block.nbytes
        return True

    def forget_range(self, low: int, high: int) -> int:
        """Forget all blocks with a byte in `[low, high)`; return how many."""
        first = bisect_left(self._offsets, low)
        if first and self._blocks[self._offsets[first - 1]].end > low:
            first -= 1
        last = bisect_left(self._offsets, high, lo=first)
        for offset in self._offsets[first:last]:
            self._held_bytes -= self._blocks.pop(offset).nbytes
        del self._offsets[first:last]
        return last - first

    def forget(self, block: IndexedBlock) -> bool:
        """Forget this very block; False if it is gone or replaced already."""
        if self._blocks.get(block.offset) is not block:
            return False
        self.forget_range(block.offset, block.offset + 1)
        return True

    def after(self, offset: int, limit: int) -> list[IndexedBlock]:
        """Return up to `limit` blocks that start at `offset` or behind it."""
        first = bisect_left(self._offsets, offset)
        return [self._blocks[at] for at in self._offsets[first : first + limit]]
