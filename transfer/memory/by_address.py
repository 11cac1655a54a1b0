"""Things that lie at addresses and never overlap, found by any address inside of them."""

from __future__ import annotations

import bisect
import threading
from typing import Generic, TypeVar

T = TypeVar("T")


class ByAddress(Generic[T]):
    """Thread-safe; may be called by a collector anywhere, even inside of its own calls."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._starts: list[int] = []
        self._items: dict[int, T] = {}

    def add(self, start: int, item: T) -> None:
        """Enter what begins there, in place of what did before."""
        with self._lock:
            if start not in self._items:
                bisect.insort(self._starts, start)
            self._items[start] = item

    def discard(self, start: int) -> None:
        """Forget what begins there, if there is anything."""
        with self._lock:
            if self._items.pop(start, None) is not None:
                del self._starts[bisect.bisect_left(self._starts, start)]

    def discard_if(self, start: int, item: T) -> None:
        """Forget what begins there, if it is this."""
        with self._lock:
            if self._items.get(start) == item:
                self.discard(start)

    def at_or_below(self, start: int) -> T | None:
        """Return the only candidate for what an address is inside of; None if there is none."""
        with self._lock:
            found = bisect.bisect_right(self._starts, start) - 1
            return self._items[self._starts[found]] if found >= 0 else None
