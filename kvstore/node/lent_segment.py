"""A segment as masters are told of it."""

from __future__ import annotations

from typing import Protocol

from kvstore.node.heard_pins import PinnedSegment
from kvstore.wire import messages as m


class LentSegment(PinnedSegment, Protocol):
    """What registration has to know of a segment. All of it is asked for on its own thread."""

    @property
    def number(self) -> int:
        """Its number in the node."""

    @property
    def medium(self) -> m.Medium:
        """What its bytes lie in."""

    @property
    def nbytes(self) -> int:
        """Its size."""

    @property
    def untouched(self) -> bool:
        """Whether nobody was ever given access to it."""

    def held(self) -> m.HeldBlocks:
        """Return what lies in it, as far as it is known and right."""
