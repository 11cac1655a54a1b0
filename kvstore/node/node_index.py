"""What a node remembers of one segment, for the day a new master asks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from kvstore.node.block_columns import BlockColumns, block_of, slot_of
from kvstore.node.indexed_block import IndexedBlock, blocks_of
from kvstore.wire.left_notes import Row
from kvstore.wire.messages import HeldBlocks


class NodeIndex:
    """Blocks that writers said they put here, none over another. Not thread-safe.

        offsets   |        |              |
        blocks    [-- a --)[---- b ----)  [- c -)
        record          [--- d ---)                 a and b are gone: some of their bytes are d's

    The node is not told what the master evicts; it need not be. A range that was written anew
    replaces what it overlaps, and what is left is believed only if the bytes still match the
    checksum. Blocks that were evicted but not yet overwritten thus come back, which is right: a
    key names bytes, and these are the bytes. Where it names others since, the later stamp tells.

    What is told in columns is kept as rows; a block is made of one when somebody asks for it, which
    few are, and stays the same object from then on.

    Args:
        nbytes: Size of the segment; blocks outside of it are ignored.

    Attributes:
        nbytes: As given.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._offsets: list[int] = []  # ascending
        self._blocks: dict[int, IndexedBlock | Row] = {}  # by `slot_of` the offset
        self._ends: dict[int, int] = {}  # so too
        self._held_bytes = 0

    def __len__(self) -> int:
        return len(self._offsets)

    def __iter__(self) -> Iterator[IndexedBlock]:
        """By offset."""
        return (self._made(offset) for offset in self._offsets)

    @property
    def held_bytes(self) -> int:
        """Bytes of all blocks, part tables included."""
        return self._held_bytes

    def at(self, offset: int) -> IndexedBlock | None:
        """Return the block that starts there."""
        is_there = 0 <= offset < self.nbytes and slot_of(offset) in self._blocks
        return self._made(offset) if is_there else None

    def record_all(self, held: HeldBlocks, told_ns: int = 0) -> int:
        """Enter what a writer says of many at a time; return how many were possible."""
        columns = BlockColumns.of(held, self.nbytes, told_ns)
        if columns is None:
            return sum(map(self.record, blocks_of(held, told_ns)))
        return self.enter(columns)

    def enter(self, columns: BlockColumns) -> int:
        """Enter possible blocks of a segment of this size; return how many."""
        slots = columns.slots
        known = list(map(self._ends.get, slots))
        if known != columns.ends:  # else each takes the very place of another: nothing moves
            fresh = [
                position
                for position, (was, end) in enumerate(zip(known, columns.ends, strict=True))
                if was != end
            ]
            for first, last in columns.runs(fresh):
                run = slice(first, last)
                self._make_room(columns.offsets[run], columns.ends[run], slots[run])
        self._blocks.update(zip(slots, columns.rows, strict=True))
        return len(columns.rows)

    def record(self, block: IndexedBlock) -> bool:
        """Enter what a writer says; False if it is impossible."""
        if not block.fits(self.nbytes):
            return False
        slot = slot_of(block.offset)
        if self._ends.get(slot) != block.end:
            self._make_room([block.offset], [block.end], [slot])
        self._blocks[slot] = block
        return True

    def forget_range(self, low: int, high: int) -> int:
        """Forget all blocks with a byte in `[low, high)`; return how many."""
        if low >= high:
            return 0
        first = bisect_left(self._offsets, low)
        if first and self._ends[slot_of(self._offsets[first - 1])] > low:
            first -= 1
        last = bisect_left(self._offsets, high, lo=first)
        for offset in self._offsets[first:last]:
            slot = slot_of(offset)
            del self._blocks[slot]
            self._held_bytes -= self._ends.pop(slot) - offset
        del self._offsets[first:last]
        return last - first

    def forget(self, block: IndexedBlock) -> bool:
        """Forget this very block; False if it is gone or replaced already."""
        if self._blocks.get(slot_of(block.offset)) is not block:
            return False
        self.forget_range(block.offset, block.offset + 1)
        return True

    def after(self, offset: int, limit: int) -> list[IndexedBlock]:
        """Return up to `limit` blocks that start at `offset` or behind it."""
        first = bisect_left(self._offsets, offset)
        return [self._made(at) for at in self._offsets[first : first + limit]]

    def _made(self, offset: int) -> IndexedBlock:
        slot = slot_of(offset)
        found = self._blocks[slot]
        if isinstance(found, tuple):
            found = self._blocks[slot] = block_of(found)
        return found

    def _make_room(self, offsets: list[int], ends: list[int], slots: list[int]) -> None:
        """Forget what lies where blocks without a byte between them come; enter their places."""
        self.forget_range(offsets[0], ends[-1])
        at = bisect_left(self._offsets, offsets[0])
        self._offsets[at:at] = offsets
        self._ends.update(zip(slots, ends, strict=True))
        self._held_bytes += ends[-1] - offsets[0]
