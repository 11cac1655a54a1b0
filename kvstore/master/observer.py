"""Who wants to know what happens to copies: the policies that plan further ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvstore.master.books.segment import Segment


class PoolObserver(Protocol):
    """Told by the catalog, in the middle of a step: it takes notes, and changes nothing."""

    def stored(self, rows: Sequence[int]) -> None:
        """Copies were committed: by a put, by a node's registration, or as a planned copy."""

    def hit(self, rows: Sequence[int]) -> None:
        """These copies were given to a reader."""

    def evicted(self, rows: Sequence[int]) -> None:
        """Copies make room for other blocks: they are none any more. The rows may be reused."""

    def dropped(self, row: int) -> None:
        """A copy is none any more, for any other reason. The row may be reused."""

    def joined(self, segment: Segment) -> None:
        """A segment came, and all that it held is told."""

    def left(self, segment: Segment) -> None:
        """A segment went."""
