"""What is remembered of blocks that were evicted; those gone longest are forgotten first."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from typing import Final

STALE_MIN: Final = 64


class GoneBlocks:
    """A number for each name, in the order of going. O(1) amortised. Not thread-safe.

    The order is a queue beside the dictionary. The entry of a name that returned stays in it, and
    is told from a later one of the same name by its number, until it is the oldest or most of the
    queue is like it.
    """

    __slots__ = ("_names", "_numbers", "_order")

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._names: deque[Hashable] = deque()
        self._order: deque[int] = deque()  # the number of each of `_names`

    def __len__(self) -> int:
        return len(self._numbers)

    def extend(self, names: Sequence[Hashable], numbers: Sequence[int]) -> None:
        """Remember blocks, none of which is remembered; the numbers of a name only ever grow."""
        self._numbers.update(zip(names, numbers, strict=True))
        self._names.extend(names)
        self._order.extend(numbers)
        if len(self._names) > 2 * len(self._numbers) + STALE_MIN:
            self._tidy()

    def returned(self, names: Sequence[Hashable]) -> list[int | None]:
        """Forget blocks; return the number of each, None for one that is not remembered."""
        if not self._numbers:
            return [None] * len(names)
        pop = self._numbers.pop
        return [pop(name, None) for name in names]

    def shrink(self, length: int) -> list[int]:
        """Forget the oldest until so many are left; return their numbers."""
        forgotten: list[int] = []
        numbers = self._numbers
        while len(numbers) > length:
            name, number = self._names.popleft(), self._order.popleft()
            if numbers.get(name) == number:
                del numbers[name]
                forgotten.append(number)
        return forgotten

    def _tidy(self) -> None:
        entries = zip(self._names, self._order, strict=True)
        current = [(name, number) for name, number in entries if self._numbers.get(name) == number]
        self._names = deque(name for name, _ in current)
        self._order = deque(number for _, number in current)
