"""Where puts go while DRAM is full of blocks that should go to a disk first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.master.books.segment import Segment


@dataclass(frozen=True, slots=True)
class Overflow:
    """The rule.

    Attributes:
        free_share: A disk takes such puts while more of it than this is free: what is demoted
            evicts older blocks there, what is put does not.
        keeps: Says whether a copy may not be evicted while a disk has room for what is put.
    """

    free_share: float
    keeps: Callable[[int], bool]

    def has_room(self, segment: Segment) -> bool:
        """Tell whether a disk takes such puts."""
        return segment.free > self.free_share * segment.capacity

    def stops(self, segments: Sequence[Segment]) -> bool:
        """Tell whether what these would evict next is kept, or there is nothing to evict."""
        oldest = min(segments, key=Segment.age, default=None)
        victim = None if oldest is None else oldest.victim()
        return victim is None or self.keeps(victim)
