"""When a block that is read from the SSD should come back to DRAM."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

from kvstore.master.books.recent_names import RecentCounts

NAMES_MAX: Final = 1 << 16


class Promotion:
    """Counts hits on the SSD; the last one that is needed says so. Not thread-safe.

    Args:
        hits: How many within the window; 0: a block is never promoted.
        window_s: Hits longer ago than this to twice this do not count.
    """

    def __init__(self, *, hits: int, window_s: float) -> None:
        self._hits = hits
        self._seen = RecentCounts(names_max=NAMES_MAX, span_s=window_s)

    def hit(self, name: Hashable, now: float) -> bool:
        """Count a hit on the SSD; True if the block should come to DRAM now."""
        if not self._hits:
            return False
        if self._hits > 1 and self._seen.see(name, now) < self._hits:
            return False
        self._seen.forget(name)
        return True
