"""Names seen lately, in two generations: bounded, and forgotten without a search.

    older    names of the generation before      ──▶ forgotten when the younger one is full or old
    younger  names since then

So a name is remembered for at least one generation after it was last seen, and at most two.
"""

from __future__ import annotations

from collections.abc import Hashable


class RecentCounts:
    """Counts how often names were seen lately. Not thread-safe.

    Args:
        names_max: Most names of one generation.
        span_s: Longest time of one generation.
    """

    def __init__(self, *, names_max: int, span_s: float = float("inf")) -> None:
        assert names_max > 0, names_max
        self._names_max = names_max
        self._span_s = span_s
        self._younger: dict[Hashable, int] = {}
        self._older: dict[Hashable, int] = {}
        self._began_s = float("-inf")

    def __len__(self) -> int:
        return len(self._younger.keys() | self._older.keys())

    def see(self, name: Hashable, now: float = 0.0, *, weight: int = 1) -> int:
        """Count a name; return how often it was seen in both generations."""
        younger = self._younger
        if now - self._began_s >= self._span_s or len(younger) >= self._names_max:
            self._turn(now)
            younger = self._younger
        count = younger.get(name, 0) + weight
        younger[name] = count
        return count + self._older.get(name, 0)

    def count(self, name: Hashable) -> int:
        """Return how often a name was seen in both generations."""
        return self._younger.get(name, 0) + self._older.get(name, 0)

    def forget(self, name: Hashable) -> None:
        """Begin with this name anew."""
        self._younger.pop(name, None)
        self._older.pop(name, None)

    def _turn(self, now: float) -> None:
        # After a silence of two spans, not even the younger generation is recent.
        stale = now - self._began_s >= 2 * self._span_s
        self._older = {} if stale else self._younger
        self._younger = {}
        self._began_s = now
