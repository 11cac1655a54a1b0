"""Copies within this process: a rank that sends to itself uses the same calls.

Host memory is copied in the caller's thread, before the call returns: handing the copy to another
thread costs more than a small one, and a large one takes the memory's bandwidth either way (the
GIL is free meanwhile). A batch behaves like one memmove: whatever pieces overlap, the target gets
what the source held before the call. Where target pieces overlap one another, which of them wins
is not defined.
"""

from __future__ import annotations

import numpy as np

from transfer.errors import AccessRefused, RegionUnknown
from transfer.memory.region import Access, Bytes, Offer, OfferTable, Region, RegionKey
from transfer.pieces import Ints, Pieces, copy_pieces, out_of_bounds


class LocalBackend:
    """Reads and writes what this process has offered to itself. Thread-safe."""

    def __init__(self, name: str, offers: OfferTable) -> None:
        self._name = name
        self._offers = offers

    def write(self, source: Region, target: RegionKey, pieces: Pieces) -> None:
        """Copy into an offered window.

        Raises:
            AccessRefused, RegionUnknown: as of any peer; nothing was copied.
        """
        with self._offers.landing:
            offer = self.find(target, Access.WRITE, pieces.target_offsets, pieces.lengths)
            copy_within(offer.window, source.array, pieces)

    def read(self, target: Region, source: RegionKey, pieces: Pieces) -> None:
        """Copy out of an offered window. Raises as `write`."""
        offer = self.find(source, Access.READ, pieces.source_offsets, pieces.lengths)
        copy_within(target.array, offer.window, pieces)

    def find(self, key: RegionKey, needed: Access, offsets: Ints, lengths: Ints) -> Offer:
        """Return the offer behind a key, if it gives the right and holds the pieces.

        Raises:
            AccessRefused, RegionUnknown: it does not.
        """
        offer = self._offers.find(key.token, to=self._name)
        if offer is None:
            raise RegionUnknown(self._name, "the key was withdrawn, or never offered to us")
        if needed not in offer.access:
            raise AccessRefused(self._name, f"the key does not give the right to {needed.name}")
        problem = out_of_bounds(offsets, lengths, offer.nbytes)
        if problem is not None:
            raise AccessRefused(self._name, problem)
        return offer


def copy_within(target: Bytes, source: Bytes, pieces: Pieces) -> None:
    """Copy pieces between arrays that may be the same memory, as if all at once."""
    if len(pieces) > 1 and _disturbs(target, source, pieces):
        packed = np.empty(pieces.nbytes, dtype=np.uint8)
        places = np.cumsum(pieces.lengths) - pieces.lengths
        copy_pieces(packed, source, Pieces(pieces.source_offsets, places, pieces.lengths))
        copy_pieces(target, packed, Pieces(places, pieces.target_offsets, pieces.lengths))
    else:
        copy_pieces(target, source, pieces)


def _disturbs(target: Bytes, source: Bytes, pieces: Pieces) -> bool:
    """Whether the copy of one piece overwrites the source of another."""
    shift = target.ctypes.data - source.ctypes.data
    if shift >= len(source) or -shift >= len(target):
        return False
    starts = pieces.target_offsets + shift
    ends, source_ends = starts + pieces.lengths, pieces.source_offsets + pieces.lengths
    low, high = int(pieces.source_offsets.min()), int(source_ends.max())
    if int(starts.min()) >= high or int(ends.max()) <= low:
        return False
    order = np.argsort(starts)
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    # Of the targets that begin before a source ends, does any end after it begins?
    before = np.searchsorted(starts, source_ends, side="left")
    return bool(((before > 0) & (ends[before - 1] > pieces.source_offsets)).any())
