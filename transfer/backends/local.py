"""Copies within this process: a rank that sends to itself uses the same calls."""

from __future__ import annotations

from transfer.errors import AccessRefused, RegionUnknown
from transfer.pieces import Pieces, copy_pieces, out_of_bounds
from transfer.region import Access, Offer, OfferTable, Region, RegionKey


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
            offer = self._find(target, Access.WRITE)
            self._check(out_of_bounds(pieces.target_offsets, pieces.lengths, offer.nbytes))
            copy_pieces(offer.window, source.array, pieces)

    def read(self, target: Region, source: RegionKey, pieces: Pieces) -> None:
        """Copy out of an offered window. Raises as `write`."""
        offer = self._find(source, Access.READ)
        self._check(out_of_bounds(pieces.source_offsets, pieces.lengths, offer.nbytes))
        copy_pieces(target.array, offer.window, pieces)

    def _find(self, key: RegionKey, needed: Access) -> Offer:
        offer = self._offers.find(key.token, to=self._name)
        if offer is None:
            raise RegionUnknown(self._name, "the key was withdrawn, or never offered to us")
        if needed not in offer.access:
            raise AccessRefused(self._name, f"the key does not give the right to {needed.name}")
        return offer

    def _check(self, problem: str | None) -> None:
        if problem is not None:
            raise AccessRefused(self._name, problem)
