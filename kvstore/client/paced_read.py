"""Reads many blocks of a disk a few at a time, and takes their checksums while the next come.

    disk       [ group 0 ][ group 1 ][ group 2 ][ group 3 ] ...       GROUPS_MAX under way
    processor             [ sum 0 ]  [ sum 1 ]  [ sum 2 ]  ...

One transfer of all would leave the processor idle first, and the disk afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from kvstore.checksum import block_checksums
from kvstore.client.pieces import Pieces
from kvstore.client.steps import Steps, work

if TYPE_CHECKING:
    from transfer import Region, Transfer

Ints = NDArray[np.int64]

GROUP_BYTES: Final = 4 << 20
GROUPS_MAX: Final = 3


class PacedRead:
    """Whole blocks of one segment into one region.

    Args:
        region: The target.
        pieces: Of it alone; whole blocks without part tables.
        start: Starts the transfer of some rows of `pieces`. Raises TransferError.
        found: Where checksums go, by block.
    """

    def __init__(
        self,
        region: Region,
        pieces: Pieces,
        start: Callable[[Ints], Transfer],
        found: dict[int, int],
    ) -> None:
        self._region = region
        self._pieces = pieces
        self._start = start
        self._found = found
        ends = np.cumsum(pieces.lengths)
        cuts = np.flatnonzero(np.diff(ends // GROUP_BYTES)) + 1
        self._groups = np.split(np.arange(len(pieces)), cuts)
        self._next = 0
        self._settled = 0

    def more(self) -> Transfer | None:
        """Start the next group; None if all are started. Raises TransferError."""
        if self._next == len(self._groups):
            return None
        rows = self._groups[self._next]
        transfer = self._start(rows)
        self._next += 1
        return transfer

    def settled(self) -> Steps[None]:
        """Take the checksums of the group whose transfer has ended; they end in order."""
        rows = self._groups[self._settled]
        self._settled += 1
        lengths = self._pieces.lengths[rows]
        yield from work(int(lengths.sum()))
        found = block_checksums(self._region.array, self._pieces.offsets[rows], lengths)
        self._found.update(zip(self._pieces.blocks[rows].tolist(), found, strict=True))
