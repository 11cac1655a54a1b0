"""The segments of all nodes, and where in them the next block goes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from kvstore.master.block import Extent
from kvstore.master.segment import Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Where blocks of one batch may go: anywhere but the writer's own node first.

    A block exists to outlive its writer, so evicting an old block elsewhere comes before using
    free space at home.
    """

    others: tuple[Segment, ...]  # most free space first, so that a batch stays on few nodes
    own: tuple[Segment, ...]


class SegmentPool:
    """All segments. Not thread-safe.

    Args:
        evict: Called with an extent that has to go; it must be free or retired afterwards.
    """

    def __init__(self, *, evict: Callable[[Extent], None]) -> None:
        self._evict = evict
        self._segments: dict[str, Segment] = {}

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._segments.values())

    def __len__(self) -> int:
        return len(self._segments)

    def get(self, node: str) -> Segment | None:
        """Return a node's segment."""
        return self._segments.get(node)

    def of(self, extent: Extent) -> Segment:
        """Return the segment in which a living extent lies."""
        return self._segments[extent.node]

    def add(self, segment: Segment) -> None:
        """Take a new node's segment into the pool."""
        assert segment.node not in self._segments, segment.node
        self._segments[segment.node] = segment

    def remove(self, node: str) -> Segment | None:
        """Take a node's segment out, if it is in."""
        return self._segments.pop(node, None)

    def silent_since(self, deadline_s: float) -> list[str]:
        """Nodes not heard of after this time."""
        return [s.node for s in self if s.heard_s <= deadline_s]

    def pardon(self, now: float) -> None:
        """Count every node as heard of now: it was us who did not listen."""
        for segment in self:
            segment.heard_s = now

    def candidates(self, writer: str, avoid: Collection[str], now: float) -> Candidates:
        """Return the segments in which a writer may place blocks now."""
        usable = [s for s in self if s.placeable_s <= now and s.node not in avoid]
        others = sorted((s for s in usable if s.node != writer), key=lambda s: (-s.free, s.node))
        own = tuple(s for s in usable if s.node == writer)
        return Candidates(others=tuple(others), own=own)

    def place(self, key: bytes, nbytes: int, candidates: Candidates) -> Extent | None:
        """Open an extent for a block, evicting older blocks where that is what it takes."""
        for group in (candidates.others, candidates.own):
            for segment in group:
                extent = segment.place(key, nbytes)
                if extent is not None:
                    return extent
            for segment in sorted(group, key=_age):
                extent = self._make_room(segment, key, nbytes)
                if extent is not None:
                    return extent
        return None

    def _make_room(self, segment: Segment, key: bytes, nbytes: int) -> Extent | None:
        if not segment.can_make_room(nbytes):
            return None
        while (victim := segment.oldest_victim()) is not None:
            self._evict(victim)
            extent = segment.place(key, nbytes)
            if extent is not None:
                return extent
        return None


def _age(segment: Segment) -> float:
    victim = segment.oldest_victim()
    return math.inf if victim is None else victim.used_at
