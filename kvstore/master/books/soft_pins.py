"""When soft pins end."""

from __future__ import annotations

import math
from heapq import heappop, heappush


class SoftPins:
    """Ends of the soft pins by key. O(log n) per pin. Not thread-safe.

    Args:
        duration_s: How long a pin lasts if nobody says.

    Attributes:
        first_end_s: No pin ends before this.
    """

    def __init__(self, duration_s: float) -> None:
        self._duration_s = duration_s
        self._ends: dict[bytes, float] = {}
        self._heap: list[tuple[float, bytes]] = []  # one entry per `set`; old ones are skipped
        self.first_end_s = math.inf

    def __len__(self) -> int:
        return len(self._ends)

    def __contains__(self, key: bytes) -> bool:
        return key in self._ends

    def set(self, key: bytes, pin_s: float, now: float, *, at_least: bool = False) -> None:
        """Let the pin of a block end so many seconds from now; 0 is the usual time.

        Args:
            key: The block.
            pin_s: Seconds.
            now: The master's clock.
            at_least: Never earlier than it would have ended.
        """
        end = now + (pin_s if pin_s > 0 else self._duration_s)
        if at_least:
            end = max(end, self._ends.get(key, end))
        self._ends[key] = end
        heappush(self._heap, (end, key))
        self.first_end_s = min(self.first_end_s, end)
        if len(self._heap) > 2 * len(self._ends) + 64:  # mostly old entries
            self._heap = sorted((end, key) for key, end in self._ends.items())

    def clear(self, key: bytes) -> None:
        """A block is gone, or pinned otherwise."""
        self._ends.pop(key, None)

    def due(self, now: float) -> list[bytes]:
        """Return the blocks whose pins end, and forget these pins."""
        ended = []
        while self._heap and self._heap[0][0] <= now:
            end, key = heappop(self._heap)
            if self._ends.get(key) == end:
                del self._ends[key]
                ended.append(key)
        self.first_end_s = self._heap[0][0] if self._heap else math.inf
        return ended
