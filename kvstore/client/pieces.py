"""Bytes of blocks in local memory: what a put gathers, and where a get scatters to.

    block b    |--------------------------------------|        payload of b
    piece          [start ........ start + length)             of block `blocks[i]` = b
    region                 [offset ... offset + length)        of `regions[region_idx[i]]`

Columns of one row per piece; pieces of one block stand together, in the order of their starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import InvalidValue

if TYPE_CHECKING:
    from transfer import Region

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]
IntsLike = Sequence[int] | Ints
INT64_MAX: Final = (1 << 63) - 1


def integers(values: int | IntsLike) -> Ints:
    """Return a column of offsets or lengths. Raises InvalidValue if they are no such integers."""
    if isinstance(values, np.ndarray) and values.dtype == np.int64:  # as nearly always
        return values
    try:
        found = np.asarray(values)
        if found.size and (found.dtype.kind not in "iu" or int(found.max()) > INT64_MAX):
            raise InvalidValue(problem=f"offsets and lengths are integers, not {values!r:.80}")
        return found.astype(np.int64)
    except (TypeError, ValueError) as error:  # of rows that differ in length
        raise InvalidValue(problem=f"offsets and lengths are integers: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pieces:
    """Columns; see the module. All int64 of one length.

    Attributes:
        regions: The memory.
        region_idx: Which of the regions.
        blocks: Which block; not falling.
        starts: First byte in the block's payload.
        offsets: First byte in the region.
        lengths: Bytes.
        one_each: Row i is all of block i; then nothing need be looked up by block.
    """

    regions: tuple[Region, ...]
    region_idx: Ints
    blocks: Ints
    starts: Ints
    offsets: Ints
    lengths: Ints
    one_each: bool = False

    @classmethod
    def of_blocks(cls, region: Region, offsets: IntsLike, lengths: Ints) -> Pieces:
        """One piece per block: all of it, in one region."""
        count = len(lengths)
        if not hasattr(region, "nbytes"):
            raise InvalidValue(problem=f"a {type(region).__name__}, which is no region")
        zeros = np.zeros(count, dtype=np.int64)
        return cls(
            regions=(region,),
            region_idx=zeros,
            blocks=np.arange(count),
            starts=zeros,
            offsets=integers(offsets),
            lengths=lengths,
            one_each=True,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return int(self.lengths.sum())

    def __len__(self) -> int:
        return len(self.lengths)

    def check(self) -> None:
        """Raise InvalidValue unless every piece has bytes and lies in its region."""
        columns = (self.region_idx, self.blocks, self.starts, self.offsets)
        if any(column.shape != self.lengths.shape for column in columns):
            raise InvalidValue(
                problem=f"columns of blocks differ: {len(self.lengths)} lengths, "
                f"but offsets of shape {self.offsets.shape}"
            )
        if not len(self):
            return
        if int(self.lengths.min()) <= 0:
            raise InvalidValue(problem="a block must have at least one byte")
        sizes = np.array([region.nbytes for region in self.regions], dtype=np.int64)
        room = sizes[self.region_idx]
        # Not offset + length: it could overflow.
        if int(self.offsets.min()) < 0 or (self.lengths > room - self.offsets).any():
            raise InvalidValue(problem=f"a block lies outside of its region of {room.max()} bytes")

    def of(self, chosen: Ints) -> Pieces:
        """Keep only some rows."""
        return Pieces(
            regions=self.regions,
            region_idx=self.region_idx[chosen],
            blocks=self.blocks[chosen],
            starts=self.starts[chosen],
            offsets=self.offsets[chosen],
            lengths=self.lengths[chosen],
        )

    def renumbered(self, blocks: Ints) -> Pieces:
        """Keep the pieces of these blocks (rising); `blocks[i]` is block i from now on."""
        numbers = np.full(int(max(self.blocks.max(initial=-1), blocks.max(initial=-1))) + 1, -1)
        numbers[blocks] = np.arange(len(blocks))
        kept = self.of(np.flatnonzero(numbers[self.blocks] >= 0))
        return kept.naming(numbers[kept.blocks])

    def starting_at(self, starts: Ints) -> Pieces:
        """Say which byte of its block is each row's first."""
        return replace(self, starts=starts, one_each=False)

    def naming(self, blocks: Ints, *, one_each: bool = False) -> Pieces:
        """Say of which block each row is."""
        return replace(self, blocks=blocks, one_each=one_each)

    def followed_by(self, more: Pieces) -> Pieces:
        """Add rows that lie in other regions, behind these."""
        return Pieces(
            regions=(*self.regions, *more.regions),
            region_idx=np.concatenate([self.region_idx, more.region_idx + len(self.regions)]),
            blocks=np.concatenate([self.blocks, more.blocks]),
            starts=np.concatenate([self.starts, more.starts]),
            offsets=np.concatenate([self.offsets, more.offsets]),
            lengths=np.concatenate([self.lengths, more.lengths]),
        )

    def by_region(self, rows: Ints) -> Iterator[tuple[Region, Ints]]:
        """Split rows by the region in which they lie."""
        if len(self.regions) == 1:
            if len(rows):
                yield self.regions[0], rows
            return
        for index in np.unique(self.region_idx[rows]).tolist():
            yield self.regions[index], rows[self.region_idx[rows] == index]

    def arrays(self, rows: Sequence[int]) -> list[Bytes]:
        """View the memory of some rows. Host memory only."""
        return [
            self.regions[self.region_idx[row]].array[
                self.offsets[row] : self.offsets[row] + self.lengths[row]
            ]
            for row in rows
        ]
