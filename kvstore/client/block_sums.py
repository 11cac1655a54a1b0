"""Checksums of the blocks of one put or copy, as far as somebody has seen their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Sums = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class BlockSums:
    """Columns of one row per block. Not thread-safe.

    Attributes:
        values: [N] uint64, xxh3_64 of each.
        known: [N] bool, which of them.
    """

    values: Sums
    known: NDArray[np.bool_]

    @classmethod
    def unknown(cls, num_blocks: int) -> BlockSums:
        """Of blocks that nobody has looked at."""
        return cls(np.zeros(num_blocks, dtype=np.uint64), np.zeros(num_blocks, dtype=bool))

    @classmethod
    def told(cls, values: Sequence[int]) -> BlockSums:
        """Of blocks whose checksums are known."""
        return cls(np.array(values, dtype=np.uint64), np.ones(len(values), dtype=bool))

    @property
    def complete(self) -> bool:
        """Whether all are known."""
        return bool(self.known.all())

    def of(self, blocks: Ints) -> BlockSums:
        """Keep only some blocks."""
        return BlockSums(self.values[blocks], self.known[blocks])

    def missing(self, blocks: Ints) -> Ints:
        """Return those of some blocks whose checksums are not known, rising, each once."""
        return np.unique(blocks[~self.known[blocks]])

    def meet(self, blocks: Ints, found: Sums) -> Ints:
        """Note what was found; return the positions in `blocks` at which it was something else.

        Args:
            blocks: Which. One that is named twice has one checksum, and the other differs.
            found: [len(blocks)], the checksums of the bytes that were copied.
        """
        fresh = ~self.known[blocks]
        self.values[blocks[fresh]] = found[fresh]
        self.known[blocks] = True
        return np.flatnonzero(self.values[blocks] != found)
