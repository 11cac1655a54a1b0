"""Scattered pieces of memory: checked, joined and copied, vectorised.

N pieces are three int64 arrays of one length: where each starts at the source, where at the
target, and how long it is. The arrays may be given as plain integers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from transfer import native
from transfer.memory.region import Bytes

Ints = npt.NDArray[np.int64]
IntsLike = int | np.integer | npt.ArrayLike

# Below this many pieces a loop of memmove calls is as fast as one numpy call.
LOOP_PIECES_MAX: Final = 8
# Longer pieces are copied at full speed one by one; the loop costs under 10 % of it.
VECTOR_LENGTH_MAX: Final = 128 << 10
OFFSET_MAX: Final = 2**63 - 1
STAGING_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Pieces:
    """[N] int64 each. Made by `make_pieces`, which checks them."""

    source_offsets: Ints
    target_offsets: Ints
    lengths: Ints

    @property
    def nbytes(self) -> int:
        """Bytes in all pieces."""
        return int(self.lengths[0]) if len(self.lengths) == 1 else int(self.lengths.sum())

    def __len__(self) -> int:
        return len(self.lengths)


# Copies every piece: (target, source, pieces). The caller has checked the bounds.
CopyPieces = Callable[[Bytes, Bytes, Pieces], None]


def make_pieces(source_offsets: IntsLike, target_offsets: IntsLike, lengths: IntsLike) -> Pieces:
    """Bring the arrays to one length; drop pieces of zero bytes.

    Raises:
        ValueError: shapes that do not fit, no integers, or a negative length.
    """
    # Not `isinstance`: a truth value is no offset.
    if type(source_offsets) is int and type(target_offsets) is int and type(lengths) is int:
        return _one_piece(source_offsets, target_offsets, lengths)
    given = (source_offsets, target_offsets, lengths)
    arrays = [np.atleast_1d(np.asarray(numbers)) for numbers in given]
    if any(a.ndim != 1 or (a.size and a.dtype.kind not in "iu") for a in arrays):
        raise ValueError("offsets and lengths must be integers, or 1-d arrays of integers")
    if any(a.dtype == np.uint64 and a.size and int(a.max()) > OFFSET_MAX for a in arrays):
        raise ValueError(f"an offset or a length is beyond {OFFSET_MAX}")
    sizes = [a.size for a in arrays]
    if len({*sizes} - {1}) > 1:
        raise ValueError("{} source offsets, {} target offsets, {} lengths".format(*sizes))
    source, target, length = (
        np.ascontiguousarray(a, dtype=np.int64) for a in np.broadcast_arrays(*arrays)
    )
    if length.size and int(length.min()) < 0:
        raise ValueError(f"negative length {int(length.min())}")
    used = length > 0
    if not used.all():
        source, target, length = source[used], target[used], length[used]
    return Pieces(source, target, length)


def _one_piece(source_offset: int, target_offset: int, length: int) -> Pieces:
    """The message of a busy loop: ten times cheaper than the general way."""
    if length < 0:
        raise ValueError(f"negative length {length}")
    if not (
        -OFFSET_MAX <= source_offset <= OFFSET_MAX
        and -OFFSET_MAX <= target_offset <= OFFSET_MAX
        and length <= OFFSET_MAX
    ):
        raise ValueError(f"an offset or a length is beyond {OFFSET_MAX}")
    table = np.array((source_offset, target_offset, length), dtype=np.int64)
    return Pieces(table[0:1], table[1:2], table[2:3]) if length else EMPTY


def one_piece(our_offset: int, their_offset: int, nbytes: int, *, write: bool) -> Pieces:
    """Return one piece, of more than zero bytes, that is known to lie within its windows."""
    table = np.array((our_offset, their_offset, nbytes), dtype=np.int64)
    ours, theirs, length = table[0:1], table[1:2], table[2:3]
    return Pieces(ours, theirs, length) if write else Pieces(theirs, ours, length)


EMPTY: Final = Pieces(*np.empty((3, 0), dtype=np.int64))


def out_of_bounds(offsets: Ints, lengths: Ints, nbytes: int) -> str | None:
    """Say which piece leaves `[0, nbytes)`, None if none does. Safe against overflow."""
    if len(offsets) == 1:
        start, length = int(offsets[0]), int(lengths[0])
        if start >= 0 and 0 <= length <= nbytes - start:
            return None
    bad = (offsets < 0) | (lengths < 0) | (lengths > nbytes) | (offsets > nbytes - lengths)
    if not bad.any():
        return None
    i = int(np.flatnonzero(bad)[0])
    return f"piece {i} at {int(offsets[i])} + {int(lengths[i])} is not inside {nbytes} bytes"


def packed(lengths: Ints) -> Ints:
    """Return where pieces lie that follow one another without gaps."""
    starts: Ints = np.cumsum(lengths) - lengths
    return starts


def join_neighbours(pieces: Pieces) -> Pieces:
    """Join pieces that follow one another at both ends."""
    source, target, length = pieces.source_offsets, pieces.target_offsets, pieces.lengths
    if len(length) < 2:
        return pieces
    starts = np.ones(len(length), dtype=bool)
    starts[1:] = (source[1:] != source[:-1] + length[:-1]) | (
        target[1:] != target[:-1] + length[:-1]
    )
    if starts.all():
        return pieces
    first = np.flatnonzero(starts)
    return Pieces(source[first], target[first], np.add.reduceat(length, first))


def _is_run(offsets: Ints, lengths: Ints) -> bool:
    return bool((offsets[1:] == offsets[:-1] + lengths[:-1]).all())


def _rows(memory: Bytes, offsets: Ints, length: int) -> tuple[Bytes, Ints]:
    """View `memory` as rows of `length` bytes, and give the row of each offset."""
    if not (offsets % length).any():
        count = len(memory) // length
        return memory[: count * length].reshape(count, length), offsets // length
    # Rows that overlap: row i starts at byte i. Every offset is a row then.
    count = max(len(memory) - length + 1, 0)
    rows = np.lib.stride_tricks.as_strided(
        memory, (count, length), (1, 1), writeable=memory.flags.writeable
    )
    return rows, offsets


def _copy_one_by_one(target: Bytes, source: Bytes, pieces: Pieces) -> None:
    target_start, source_start = target.ctypes.data, source.ctypes.data
    memmove = ctypes.memmove
    for s, t, n in zip(
        (pieces.source_offsets + source_start).tolist(),
        (pieces.target_offsets + target_start).tolist(),
        pieces.lengths.tolist(),
        strict=True,
    ):
        memmove(t, s, n)


def _copy_equal(target: Bytes, source: Bytes, pieces: Pieces, length: int) -> None:
    count = len(pieces)
    target_rows, target_idx = _rows(target, pieces.target_offsets, length)
    source_rows, source_idx = _rows(source, pieces.source_offsets, length)
    if _is_run(pieces.source_offsets, pieces.lengths):
        start = int(pieces.source_offsets[0])
        target_rows[target_idx] = source[start : start + count * length].reshape(count, length)
        return
    step = max(1, STAGING_BYTES // length)
    for first in range(0, count, step):
        chosen = slice(first, first + step)
        target_rows[target_idx[chosen]] = source_rows[source_idx[chosen]]


def copy_pieces(target: Bytes, source: Bytes, pieces: Pieces) -> None:
    """Copy every piece. The caller has checked the bounds. Large copies release the GIL.

    Where target pieces overlap, which one wins is not defined.
    """
    if not len(pieces):
        return
    if native.COMPILED:
        copy_addressed(target.ctypes.data, source.ctypes.data, pieces)
        return
    pieces = join_neighbours(pieces)
    length = int(pieces.lengths[0])
    few = len(pieces) <= LOOP_PIECES_MAX
    if few or length > VECTOR_LENGTH_MAX or (pieces.lengths != length).any():
        _copy_one_by_one(target, source, pieces)
    else:
        _copy_equal(target, source, pieces, length)


def copy_addressed(target: int, source: int, pieces: Pieces) -> None:
    """Copy every piece between two areas, given by their addresses."""
    if len(pieces) == 1:  # the common case of a message, without any array arithmetic
        native.copy_one(
            target + int(pieces.target_offsets[0]),
            source + int(pieces.source_offsets[0]),
            int(pieces.lengths[0]),
        )
    else:
        native.copy_pieces(
            target, source, pieces.target_offsets, pieces.source_offsets, pieces.lengths
        )


def copy_between(
    target: Bytes,
    target_start: int,
    source: Bytes,
    source_start: int,
    pieces: Pieces,
) -> None:
    """Copy every piece between two areas, each given as an array and by its address."""
    if native.COMPILED or len(pieces) == 1:
        copy_addressed(target_start, source_start, pieces)
    else:
        copy_pieces(target, source, pieces)
