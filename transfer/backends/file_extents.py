"""Which system calls move a batch of pieces between memory and a file. Pure, vectorised.

Pieces are sorted by their place in the file, cut at the multiples of the largest call, and joined
to extents: runs of blocks that one call moves.

    file      |....block....|....block....|....block....|....block....|
    pieces       [--- 0 ---)[- 1 -)                     [---- 2 -----)
    extents   [--------- bounced ---------)             [-- direct ---)

An extent is *direct* if its pieces cover its blocks exactly and their memory is aligned: the call
works on the caller's memory itself. All others go through an aligned buffer, and an extent that is
written without covering its blocks is *partial*: its edges are read first.
No two extents of a batch share a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from transfer.backends.direct_io import Alignment
from transfer.pieces import Ints

# Vectors in one call; the kernel takes 1024.
VECTORS_MAX: Final = 512
CALLS_MAX: Final = 32  # up to here a loop is faster than columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Extents:
    """The calls of one batch.

    Attributes:
        memory_offsets: [N] where each piece lies in memory, pieces sorted by `file_offsets`.
        file_offsets: [N] where it lies in the file.
        lengths: [N] its bytes.
        bounds: [E + 1] pieces of extent e are [bounds[e], bounds[e + 1]).
        lows: [E] first byte of its first block.
        highs: [E] end of its last block.
        direct: [E] whether it needs no buffer.
        partial: [E] whether its pieces leave bytes of its blocks out.
        gaps: [E] whether they do so between two pieces, not only at the ends.
    """

    memory_offsets: Ints
    file_offsets: Ints
    lengths: Ints
    bounds: Ints
    lows: Ints
    highs: Ints
    direct: npt.NDArray[np.bool_]
    partial: npt.NDArray[np.bool_]
    gaps: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.lows)


def make_extents(
    memory_start: int,
    memory_offsets: Ints,
    file_offsets: Ints,
    lengths: Ints,
    *,
    alignment: Alignment,
    io_bytes: int,
) -> Extents:
    """Plan the calls of a batch of non-empty pieces.

    Args:
        memory_start: address that `memory_offsets` count from.
        memory_offsets: [N] int64.
        file_offsets: [N] int64, inside the file.
        lengths: [N] int64, positive.
        alignment: of the file.
        io_bytes: largest extent; a multiple of the block.
    """
    assert io_bytes % alignment.block == 0
    if len(file_offsets) == 1 and int(file_offsets[0]) % io_bytes + int(lengths[0]) <= io_bytes:
        return _one_extent(memory_start, memory_offsets, file_offsets, lengths, alignment)
    if len(file_offsets) <= CALLS_MAX:
        whole = _calls(memory_start, memory_offsets, file_offsets, lengths, alignment, io_bytes)
        if whole is not None:
            return whole
    memory, file, length = _cut(memory_offsets, file_offsets, lengths, io_bytes)
    order = np.argsort(file, kind="stable")
    memory, file, length = memory[order], file[order], length[order]
    block = alignment.block
    first_block, window = file // block, file // io_bytes
    last_block = np.maximum.accumulate((file + length - 1) // block)
    starts = np.ones(len(file), dtype=bool)
    starts[1:] = (first_block[1:] > last_block[:-1] + 1) | (window[1:] != window[:-1])
    # An extent's vectors are bounded too, but blocks must stay whole: cut only between blocks.
    starts = _bound_vectors(starts, first_block, last_block)
    bounds = np.flatnonzero(starts)
    ends = np.maximum.accumulate(file + length)
    lows = first_block[bounds] * block
    tails = np.append(bounds[1:], len(file)) - 1
    highs = (last_block[tails] + 1) * block
    # A piece that starts exactly where the previous one ended, within the same extent.
    follows, covers = starts.copy(), starts.copy()
    follows[1:] |= file[1:] == file[:-1] + length[:-1]
    covers[1:] |= file[1:] <= ends[:-1]
    whole = (file[bounds] == lows) & (ends[tails] == highs)
    gaps = ~np.logical_and.reduceat(covers, bounds)
    aligned = (memory_start + memory) % alignment.memory == 0
    aligned &= (length % block == 0) & follows
    return Extents(
        memory_offsets=memory,
        file_offsets=file,
        lengths=length,
        bounds=np.append(bounds, len(file)),
        lows=lows,
        highs=highs,
        direct=whole & np.logical_and.reduceat(aligned, bounds),
        partial=~whole | gaps,
        gaps=gaps,
    )


def _calls(
    memory_start: int,
    memory: Ints,
    file: Ints,
    lengths: Ints,
    alignment: Alignment,
    io_bytes: int,
) -> Extents | None:
    """A few blocks of a large cache: each is one call, nothing to cut or to join. Else None."""
    block, end = alignment.block, -1
    pieces = sorted(zip(file.tolist(), memory.tolist(), lengths.tolist(), strict=True))
    for start, place, length in pieces:
        aligned = not (start % block or length % block or (memory_start + place) % alignment.memory)
        # Of two in one window, one is not longer than half of it.
        alone = start >= end and io_bytes // 2 < length <= io_bytes - start % io_bytes
        if not aligned or not alone:
            return None
        end = start + length
    file, memory, lengths = np.array(pieces, dtype=np.int64).T.copy()
    truths = np.zeros((3, len(pieces)), dtype=bool)
    truths[0] = True
    direct, partial, gaps = truths
    return Extents(
        memory_offsets=memory,
        file_offsets=file,
        lengths=lengths,
        bounds=np.arange(len(pieces) + 1),
        lows=file,
        highs=file + lengths,
        direct=direct,
        partial=partial,
        gaps=gaps,
    )


def _one_extent(
    memory_start: int, memory: Ints, file: Ints, lengths: Ints, alignment: Alignment
) -> Extents:
    """A single block at a time is what a cache reads: ten times cheaper than the general way."""
    block, start, length = alignment.block, int(file[0]), int(lengths[0])
    low, high = start // block * block, -(-(start + length) // block) * block
    whole = (low, high) == (start, start + length)
    direct = whole and (memory_start + int(memory[0])) % alignment.memory == 0
    numbers = np.array((0, 1, low, high), dtype=np.int64)
    truths = np.array((direct, not whole, False), dtype=bool)
    return Extents(
        memory_offsets=memory,
        file_offsets=file,
        lengths=lengths,
        bounds=numbers[:2],
        lows=numbers[2:3],
        highs=numbers[3:],
        direct=truths[:1],
        partial=truths[1:2],
        gaps=truths[2:],
    )


def _cut(memory: Ints, file: Ints, lengths: Ints, io_bytes: int) -> tuple[Ints, Ints, Ints]:
    """Cut pieces where the file offset is a multiple of `io_bytes`."""
    first = file // io_bytes
    counts = (file + lengths - 1) // io_bytes - first + 1
    if (counts == 1).all():
        return memory, file, lengths
    owner = np.repeat(np.arange(len(file)), counts)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.maximum(file[owner], (first[owner] + nth) * io_bytes)
    ends = np.minimum(file[owner] + lengths[owner], (first[owner] + nth + 1) * io_bytes)
    return memory[owner] + starts - file[owner], starts, ends - starts


def _bound_vectors(
    starts: npt.NDArray[np.bool_], first_block: Ints, last_block: Ints
) -> npt.NDArray[np.bool_]:
    run, since = np.flatnonzero(starts), 0
    if int(np.diff(run, append=len(starts)).max()) <= VECTORS_MAX:
        return starts
    starts = starts.copy()
    for i in range(len(starts)):
        if starts[i]:
            since = i
        elif i - since >= VECTORS_MAX and first_block[i] > last_block[i - 1]:
            starts[i], since = True, i
    return starts
