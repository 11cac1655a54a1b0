"""Small pieces of pages go by a buffer in which each block is one run of bytes.

A token of one head may be 256 bytes: a page then has thousands of pieces, and what every piece
costs by itself (a row of a transfer, a step of a checksum) comes to many times the copy of its
bytes. One compiled loop moves them between the pages and the buffer; the pool sees whole blocks.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kvstore.client.pieces import Ints, Pieces
from transfer import Region
from transfer.pieces import Pieces as Moves
from transfer.pieces import copy_pieces

# Shorter pieces (on average) go by the buffer: from here on their own cost is small beside a copy.
DIRECT_BYTES_MIN: Final = 64 << 10
BUFFER_BYTES_MAX: Final = 32 << 20  # of one put or read; longer ones go in parts


def are_small(pieces: Pieces) -> bool:
    """Whether pieces are better copied by a buffer."""
    return bool(pieces.lengths.sum() < DIRECT_BYTES_MIN * len(pieces))


def gather(pieces: Pieces, buffer: Region, block_bytes: int) -> None:
    """Copy pieces of whole blocks to where their blocks lie in the buffer, one after the other."""
    for region, rows, inside in _by_region(pieces, block_bytes):
        moves = Moves(pieces.offsets[rows], inside, pieces.lengths[rows])
        copy_pieces(buffer.array, region.array, moves)


def scatter(pieces: Pieces, buffer: Region, block_bytes: int) -> None:
    """Undo `gather`."""
    for region, rows, inside in _by_region(pieces, block_bytes):
        moves = Moves(inside, pieces.offsets[rows], pieces.lengths[rows])
        copy_pieces(region.array, buffer.array, moves)


def _by_region(pieces: Pieces, block_bytes: int) -> list[tuple[Region, Ints, Ints]]:
    inside = pieces.blocks * block_bytes + pieces.starts
    return [
        (region, rows, inside[rows]) for region, rows in pieces.by_region(np.arange(len(pieces)))
    ]
