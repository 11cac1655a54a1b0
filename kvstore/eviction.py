"""Which block makes room for another: the least recently used one that may go."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from kvstore.block import Extent


class LeastRecentlyUsed:
    """Order of use of one node's evictable extents; every operation is O(1).

    Pinned blocks are never entered. Leased ones stay in: a lease is recent use, so they gather at
    the young end, where a search for victims seldom gets.

    Whoever touches a prefix chain touches it from its last block to its first. The root is then
    the youngest, and a chain is eaten from its leaf: what is left is always a usable prefix.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[Extent, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, extent: Extent) -> bool:
        return extent in self._order

    def touch(self, extent: Extent) -> None:
        """Enter an extent, or make it the most recently used."""
        self._order[extent] = None
        self._order.move_to_end(extent)

    def discard(self, extent: Extent) -> None:
        """Take an extent out, if it is in."""
        self._order.pop(extent, None)

    def victims(self) -> Iterator[Extent]:
        """Yield what may be evicted, oldest first. The order must not change meanwhile."""
        return (extent for extent in self._order if extent.leases == 0)
