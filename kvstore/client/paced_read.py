"""Reads many blocks of a disk, and takes their checksums while the next ones come.

From a disk of this process, a few at a time:

    disk       [ group 0 ][ group 1 ][ group 2 ][ group 3 ] ...       GROUPS_MAX under way
    processor             [ sum 0 ]  [ sum 1 ]  [ sum 2 ]  ...

One transfer of all would leave the processor idle first, and the disk afterwards. From a disk of
another process they come by way of buffers, one transfer of all, and are summed up in the pass that
copies them out of there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from kvstore.checksum import block_checksums
from kvstore.client.block_sums import BlockSums
from kvstore.client.pieces import Pieces
from kvstore.client.steps import Steps, work
from kvstore.copying import copy_with_checksums

if TYPE_CHECKING:
    from transfer import Region, Transfer
    from transfer.pieces import CopyPieces
    from transfer.pieces import Pieces as MovedPieces

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]

GROUP_BYTES: Final = 4 << 20
# While one is summed up, the others must leave the disk's threads something to take.
GROUPS_MAX: Final = 6


class PacedRead:
    """Whole blocks of one segment into one region.

    Args:
        region: The target.
        pieces: Of it alone; whole blocks without part tables.
        start: Starts the transfer of some rows of `pieces`, which may make its copies by the
            function that it is given. Raises TransferError.
        sums: Where checksums go.
        own_disk: Whether it is of this process.
    """

    def __init__(
        self,
        region: Region,
        pieces: Pieces,
        start: Callable[[Ints, CopyPieces], Transfer],
        sums: BlockSums,
        *,
        own_disk: bool,
    ) -> None:
        self._region = region
        self._pieces = pieces
        self._start = start
        self._sums = sums
        self._summed: dict[tuple[int, int], int] = {}  # by offset and length in the region
        ends = np.cumsum(pieces.lengths)
        rows, cuts = np.arange(len(pieces)), np.flatnonzero(np.diff((ends - 1) // GROUP_BYTES)) + 1
        self._groups = np.split(rows, cuts) if own_disk else [rows]
        self._next = 0
        self._settled = 0

    def more(self) -> Transfer | None:
        """Start the next group; None if all are started. Raises TransferError."""
        if self._next == len(self._groups):
            return None
        rows = self._groups[self._next]
        transfer = self._start(rows, self._copy)
        self._next += 1
        return transfer

    def settled(self) -> Steps[None]:
        """Take the checksums of the group whose transfer has ended; they end in order."""
        rows = self._groups[self._settled]
        self._settled += 1
        offsets, lengths = self._pieces.offsets[rows], self._pieces.lengths[rows]
        places = zip(offsets.tolist(), lengths.tolist(), strict=True)
        # A block that was longer than the buffer came in parts.
        found = [self._summed.pop(place, None) for place in places]
        if None in found:
            yield from work(int(lengths.sum()))
            found[:] = block_checksums(self._region.array, offsets, lengths)
        self._sums.meet(self._pieces.blocks[rows], np.array(found, dtype=np.uint64))

    def _copy(self, target: Bytes, source: Bytes, pieces: MovedPieces) -> None:
        """Copy out of a buffer, in a thread of the engine."""
        to, lengths = pieces.target_offsets, pieces.lengths
        sums = copy_with_checksums(target, source, to, pieces.source_offsets, lengths)
        self._summed.update(zip(zip(to.tolist(), lengths.tolist(), strict=True), sums, strict=True))
