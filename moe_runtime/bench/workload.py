"""What is measured: sizes, scattered pieces and where they lie, and the bytes they hold.

window   |--- lane 0 ---|--- lane 1 ---|      a lane for each operation in flight
lane     [  2 ][    ][ 0 ][ 1 ][    ][ 3 ]    pieces in random order, gaps between them
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
SIZE_BYTES_MAX: Final = 1 << 40
# Twice the pieces' own bytes, so that scattered pieces do not follow one another.
SPREAD: Final = 2
_MIX: Final = np.uint64(0x9E3779B97F4A7C15)
_LATE_BYTES: Final = 4096


def parse_size(text: str) -> int:
    """Return the bytes of "4096", "64K", "1M", "16MiB" or "1G".

    Raises:
        ValueError: not a size, or not positive.
    """
    match = re.fullmatch(r"(\d+)([KMG]?)(?:I?B)?", text.strip().upper())
    nbytes = int(match[1]) * UNITS[match[2]] if match and len(match[1]) < 16 else 0
    if not 0 < nbytes <= SIZE_BYTES_MAX:
        raise ValueError(f"{text.strip()!r} is not a size (4096, 64K, 1M, 1G)")
    return nbytes


def shown_size(nbytes: int) -> str:
    """Return the shortest exact form, as `parse_size` reads it."""
    for unit in ("G", "M", "K"):
        if nbytes % UNITS[unit] == 0:
            return f"{nbytes // UNITS[unit]}{unit}"
    return str(nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the table.

    Attributes:
        operation: "write" or "read".
        size: bytes of a piece.
        blocks: pieces per operation.
        batch: operations in flight.
    """

    operation: str
    size: int
    blocks: int
    batch: int

    @property
    def nbytes(self) -> int:
        """Bytes of one operation."""
        return self.size * self.blocks

    @property
    def lane_bytes(self) -> int:
        """Bytes of the window that one operation in flight has for itself."""
        return self.nbytes * (SPREAD if self.blocks > 1 else 1)

    @property
    def window_bytes(self) -> int:
        """Bytes of memory that the case needs on each side."""
        return self.lane_bytes * self.batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the pieces of one lane lie.

    Attributes:
        source: [blocks] int64, offsets where the bytes come from.
        target: [blocks] int64, offsets where they go.
        size: bytes of each.
    """

    source: Ints
    target: Ints
    size: int


def placements(case: Case, seed: int) -> list[Placement]:
    """Place the pieces of every lane; distinct, in random order."""
    rng = np.random.default_rng(seed)
    slots = case.lane_bytes // case.size

    def offsets(lane: int) -> Ints:
        chosen: Ints = rng.permutation(slots)[: case.blocks].astype(np.int64)
        return lane * case.lane_bytes + chosen * case.size

    return [
        Placement(source=offsets(lane), target=offsets(lane), size=case.size)
        for lane in range(case.batch)
    ]


def pattern(offset: int, nbytes: int, seed: int) -> Bytes:
    """Return the bytes that belong at `[offset, offset + nbytes)`; other seeds, other bytes."""
    first, last = offset // 8, -(-(offset + nbytes) // 8)
    words = np.arange(first, last, dtype=np.uint64)
    words += np.uint64(seed)
    words *= _MIX
    words ^= words >> np.uint64(29)
    skipped = offset - first * 8
    return words.view(np.uint8)[skipped : skipped + nbytes]


def fill(memory: Bytes, offsets: Ints, size: int, seed: int) -> None:
    """Write the pattern of each piece's own place."""
    for offset in offsets.tolist():
        memory[offset : offset + size] = pattern(offset, size, seed)


def differing_piece(memory: Bytes, placement: Placement, seed: int) -> int | None:
    """Look whether every piece has arrived; None if so, else the index of one that has not.

    The ends of all pieces are looked at first, the last piece foremost: what is still under way
    shows there.
    """
    for part in (_ends(placement), _whole(placement)):
        for i, source, target, nbytes in part:
            found = memory[target : target + nbytes]
            if not np.array_equal(found, pattern(source, nbytes, seed)):
                return i
    return None


def _ends(placement: Placement) -> Iterator[tuple[int, int, int, int]]:
    nbytes = min(placement.size, _LATE_BYTES)
    for i, source, target, size in _whole(placement):
        yield i, source + size - nbytes, target + size - nbytes, nbytes


def _whole(placement: Placement) -> Iterator[tuple[int, int, int, int]]:
    for i in reversed(range(len(placement.source))):
        yield i, int(placement.source[i]), int(placement.target[i]), placement.size
