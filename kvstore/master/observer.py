"""Who wants to know what happens to copies: the policies that plan further ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvstore.master.books.segment import Segment


class PoolObserver(Protocol):
    """Told by the catalog, in the middle of a step: it takes notes, and changes nothing."""

    def stored(self, row: int) -> None:
        """A copy was committed: by a put, by a node's registration, or as a planned copy."""

    def hit(self, rows: Sequence[int]) -> None:
        """These copies were given to a reader."""

    def evicting(self, row: int) -> None:
        """A copy is about to make room for another block; `dropped` follows."""

    def dropped(self, row: int) -> None:
        """A committed copy is not one any more, for whatever reason. The row may be reused."""

    def joined(self, segment: Segment) -> None:
        """A segment came, and all that it held is told."""

    def left(self, segment: Segment) -> None:
        """A segment went."""
