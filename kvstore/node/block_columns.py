"""What a writer says of many blocks, checked column by column: no object per block is made here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, repeat
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstore.checksum import CHECKSUM_BYTES
from kvstore.node.indexed_block import IndexedBlock
from kvstore.wire.left_notes import Row
from kvstore.wire.messages import HeldBlocks

Ints = NDArray[np.int64]
Offset = TypeVar("Offset", int, Ints)
CHECKSUM_END: Final = 1 << 64
_PAGE_BITS: Final = 12
_PAGE_SHIFT: Final = 50  # offsets below 1 << 62 differ in their slots


def slot_of(offset: Offset) -> Offset:
    """Return another number for each offset of a segment, as the key of a dictionary; or of many.

    A dictionary looks where the low bits say, and those of offsets are as good as all zero. Here
    those of the page come first, so that neighbours are neighbours.
    """
    return offset >> _PAGE_BITS | (offset & (1 << _PAGE_BITS) - 1) << _PAGE_SHIFT


def block_of(row: Row) -> IndexedBlock:
    """Make a block of what was told of it."""
    offset, length, key, checksum, pinned, chunk_bytes, tenant, group, stamp = row
    return IndexedBlock(
        offset=offset,
        length=length,
        key=key,
        checksum=checksum,
        pinned=pinned,
        chunk_bytes=chunk_bytes,
        tenant=tenant,
        group=group,
        stamp=stamp,
    )


def row_of(block: IndexedBlock) -> Row:
    """Return what `block_of` makes such a block of."""
    return (
        block.offset, block.length, block.key, block.checksum, block.pinned, block.chunk_bytes,
        block.tenant, block.group, block.stamp,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockColumns:
    """Possible blocks of one segment, none over another.

    Attributes:
        offsets: Where each begins; rising.
        ends: First byte behind each.
        slots: `slot_of` each offset.
        rows: All of it, in the same order.
    """

    offsets: list[int]
    ends: list[int]
    slots: list[int]
    rows: list[Row]

    @classmethod
    def of(cls, held: HeldBlocks, nbytes: int, told_ns: int = 0) -> BlockColumns | None:
        """Read what a writer says, at this time, of a segment of this size.

        Returns:
            None if a block is impossible, a column too short, or two blocks share bytes: then each
            has to be looked at by itself.
        """
        count = len(held.keys)
        required = (held.offsets, held.lengths, held.checksums)
        optional = (held.pinned, held.chunk_bytes, held.tenants, held.groups, held.stamps)
        if any(len(column) != count for column in required) or not count:
            return None
        if any(len(column) not in (0, count) for column in optional):
            return None
        places = _places(held, nbytes)
        if places is None or min(held.checksums) < 0 or max(held.checksums) >= CHECKSUM_END:
            return None
        offsets, ends = places
        length = held.lengths[0]  # as a rule all have one, which is one object then
        same = held.lengths.count(length) == count
        rows: list[Row] = list(
            zip(
                held.offsets, repeat(length) if same else held.lengths, held.keys, held.checksums,
                held.pinned or repeat(False), held.chunk_bytes or repeat(0),
                held.tenants or repeat(""), held.groups or repeat(""),
                held.stamps or repeat(told_ns),
                strict=False,  # what repeats has no end
            )
        )  # fmt: skip
        if (offsets[1:] < ends[:-1]).any():
            order = np.argsort(offsets, kind="stable")
            offsets, ends = offsets[order], ends[order]
            if (offsets[1:] < ends[:-1]).any():
                return None
            rows = [rows[position] for position in order.tolist()]
        slots = slot_of(offsets)
        return cls(offsets=offsets.tolist(), ends=ends.tolist(), slots=slots.tolist(), rows=rows)

    def runs(self, wanted: list[int]) -> Iterator[tuple[int, int]]:
        """Split rising rows into runs `[first, last)`, no byte between their blocks."""
        first = 0
        for position, (left, right) in enumerate(pairwise(wanted), start=1):
            if right != left + 1 or self.ends[left] != self.offsets[right]:
                yield wanted[first], left + 1
                first = position
        if wanted:
            yield wanted[first], wanted[-1] + 1


def _places(held: HeldBlocks, nbytes: int) -> tuple[Ints, Ints] | None:
    """Return where each block begins and ends; None if one does not fit into the segment."""
    try:
        offsets = np.array(held.offsets, dtype=np.int64)
        lengths = np.array(held.lengths, dtype=np.int64)
        chunks = np.array(held.chunk_bytes, dtype=np.int64)
    except OverflowError:
        return None
    if int(offsets.min()) < 0 or int(lengths.min()) <= 0 or int(lengths.max()) > nbytes:
        return None
    spaces = lengths
    if len(chunks):
        if int(chunks.min()) < 0:
            return None
        # A chunk longer than the segment is one chunk all the same, and nothing overflows.
        divisor = np.minimum(np.maximum(chunks, 1), max(nbytes, 1))
        spaces = lengths + np.where(chunks > 0, CHECKSUM_BYTES * -(-lengths // divisor), 0)
    if (offsets > nbytes - spaces).any():
        return None
    return offsets, offsets + spaces
