"""Which blocks are read so often that one node should not serve them alone."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final, TypeVar

from kvstore.master.books.recent_names import RecentCounts

NAMES_MAX: Final = 1 << 14
NameT = TypeVar("NameT", bound=Hashable)
SAMPLE: Final = 8  # of a long run, every eighth block is counted, with eight times the weight


class HotBlocks:
    """Counts hits, sampled, over a window; tells a block once per window. Not thread-safe.

    Args:
        hits: Per window, for one further replica; 0: none ever.
        window_s: Length of the window.
    """

    def __init__(self, *, hits: int, window_s: float) -> None:
        self._hits = hits
        self._seen = RecentCounts(names_max=NAMES_MAX, span_s=window_s)
        self._turn = 0

    @property
    def enabled(self) -> bool:
        """Whether `hit` has to be told anything."""
        return self._hits > 0

    def hit(self, names: Sequence[NameT], now: float) -> list[NameT]:
        """Count hits of one lookup; return the blocks that earned a further replica."""
        if not self._hits:
            return []
        weight = 1
        if len(names) > SAMPLE:
            self._turn = (self._turn + 1) % SAMPLE
            names, weight = names[self._turn :: SAMPLE], SAMPLE
        hot = [name for name in names if self._seen.see(name, now, weight=weight) >= self._hits]
        for name in hot:  # the next replica needs as many hits again
            self._seen.forget(name)
        return hot
