"""Copies that can be made together: of one segment, into one segment, of bounded size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvstore.node.block_check import ALIGNMENT
from kvstore.node.indexed_block import IndexedBlock
from kvstore.wire.messages import Copy, NodeAddress
from transfer.pieces import Pieces

COPIES_MAX: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyBatch:
    """Copies from one segment into another; never empty."""

    source: int
    target: NodeAddress
    copies: tuple[Copy, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all, part tables included."""
        return sum(copy.nbytes for copy in self.copies)

    def places(self) -> list[int]:
        """Where each lies in a buffer that holds all of them."""
        places, at = [], 0
        for copy in self.copies:
            places.append(at)
            at += _taken(copy)
        return places

    def only(self, positions: Iterable[int]) -> CopyBatch:
        """Return some of it."""
        copies = tuple(self.copies[i] for i in positions)
        return CopyBatch(source=self.source, target=self.target, copies=copies)


@dataclass(slots=True, kw_only=True)
class CopyResults:
    """Copies by what became of them, by id.

    Those in none of the lists may still be under way: nobody may say what their target holds, and
    the master finds out by its own deadline.
    """

    done: list[int]
    failed: list[int]
    corrupt: list[int]

    @classmethod
    def none(cls) -> CopyResults:
        """Nothing happened yet."""
        return cls(done=[], failed=[], corrupt=[])

    @property
    def number(self) -> int:
        """How many ended."""
        return len(self.done) + len(self.failed) + len(self.corrupt)

    def __add__(self, other: CopyResults) -> CopyResults:
        return CopyResults(
            done=self.done + other.done,
            failed=self.failed + other.failed,
            corrupt=self.corrupt + other.corrupt,
        )


def batches_of(copies: Iterable[Copy], nbytes: int) -> Iterator[CopyBatch]:
    """Group copies by segments, and cut the groups; a larger copy is a batch of its own."""
    groups: defaultdict[tuple[int, NodeAddress], list[Copy]] = defaultdict(list)
    for copy in copies:
        groups[copy.source_segment, copy.target].append(copy)
    for (source, target), group in groups.items():
        chosen: list[Copy] = []
        filled = 0
        for copy in group:
            if chosen and (filled + _taken(copy) > nbytes or len(chosen) == COPIES_MAX):
                yield CopyBatch(source=source, target=target, copies=tuple(chosen))
                chosen, filled = [], 0
            chosen.append(copy)
            filled += _taken(copy)
        yield CopyBatch(source=source, target=target, copies=tuple(chosen))


def pieces_between(
    sources: Iterable[int], targets: Iterable[int], lengths: Iterable[int]
) -> Pieces:
    """Describe moving runs of bytes."""
    return Pieces(
        *(np.array(list(column), dtype=np.int64) for column in (sources, targets, lengths))
    )


def payload_bytes(copy: Copy) -> int | None:
    """Return the bytes of a copy without its part table; None if it cannot be."""
    if not copy.chunk_bytes:
        return copy.nbytes if copy.nbytes > 0 else None
    # nbytes = length + 8 * ceil(length / chunk): the number of chunks follows from that.
    chunks = -(-copy.nbytes // (copy.chunk_bytes + 8))
    length = copy.nbytes - 8 * chunks
    return length if length > 0 and -(-length // copy.chunk_bytes) == chunks else None


def block_of(copy: Copy, known: IndexedBlock | None) -> IndexedBlock | None:
    """Return the block to be copied as it lies at its source; None if it cannot be.

    Args:
        copy: What the master ordered.
        known: What lies there as far as the node knows: it also knows whose the block is.
    """
    length = payload_bytes(copy)
    if length is None:
        return None
    block = IndexedBlock(
        key=copy.key,
        offset=copy.source_offset,
        length=length,
        checksum=copy.checksum,
        chunk_bytes=copy.chunk_bytes,
    )
    if known is not None and block.is_copy_of(known):
        block.pinned, block.tenant, block.group = known.pinned, known.tenant, known.group
        block.stamp = known.stamp
    return block


def _taken(copy: Copy) -> int:
    return -(-copy.nbytes // ALIGNMENT) * ALIGNMENT
