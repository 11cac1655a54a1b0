"""S3-FIFO: a small queue on probation, a main queue with further chances, a queue of names gone.

Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023, algorithm 1. A block
used twice on probation goes to the main queue; others leave soon, and come straight to the main
queue if they return while their name is remembered. Sizes follow the number of known blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from itertools import chain
from typing import Final

PROBATION_SHARE: Final = 0.1
USES_MAX: Final = 3
USES_TO_STAY: Final = 2  # of a block on probation, after it came


class S3Fifo:
    """Three queues; see `EvictionPolicy`. It does not know chains."""

    def __init__(self) -> None:
        self._probation: OrderedDict[Hashable, int] = OrderedDict()  # name -> uses, at most 3
        self._main: OrderedDict[Hashable, int] = OrderedDict()
        self._gone: OrderedDict[Hashable, None] = OrderedDict()
        self._held: dict[Hashable, tuple[OrderedDict[Hashable, int], int]] = {}  # queue, uses

    def __len__(self) -> int:
        return len(self._probation) + len(self._main) + len(self._held)

    def __contains__(self, name: Hashable) -> bool:
        return name in self._probation or name in self._main or name in self._held

    def admit(self, name: Hashable, parent: Hashable | None = None) -> None:
        """Enter a block: on probation, unless it was evicted from there not long ago."""
        del parent
        if name in self._gone:
            del self._gone[name]
            self._main[name] = 0
        else:
            self._probation[name] = 0

    def touch(self, name: Hashable) -> None:
        """Count a use; the block stays where it is."""
        if name in self._held:
            queue, uses = self._held[name]
            self._held[name] = (queue, min(uses + 1, USES_MAX))
            return
        queue = self._probation if name in self._probation else self._main
        queue[name] = min(queue[name] + 1, USES_MAX)

    def hold(self, name: Hashable) -> None:
        """Take a block out of its queue."""
        if name not in self._held:
            queue = self._probation if name in self._probation else self._main
            self._held[name] = (queue, queue.pop(name))

    def unhold(self, name: Hashable) -> None:
        """Enter a held block into its queue again, as the youngest."""
        if name in self._held:
            queue, uses = self._held.pop(name)
            queue[name] = uses

    def remove(self, name: Hashable, *, evicted: bool = False) -> None:
        """Forget a block; remember the name of one that was evicted on probation."""
        if self._probation.pop(name, None) is not None and evicted:
            self._gone[name] = None
            while len(self._gone) > max(1, len(self)):
                self._gone.popitem(last=False)
        self._main.pop(name, None)
        self._held.pop(name, None)

    def victim(self) -> Hashable | None:
        """Return the next to go, after those before it were given the chances they earned.

        Amortised: a use pays for at most one later move, and there are at most three unpaid.
        """
        while self._probation or self._main:
            waiting = len(self._probation) + len(self._main)
            if self._probation and (
                not self._main or len(self._probation) >= PROBATION_SHARE * waiting
            ):
                name, uses = next(iter(self._probation.items()))
                if uses < USES_TO_STAY:
                    return name
                del self._probation[name]
                self._main[name] = 0
            else:
                name, uses = next(iter(self._main.items()))
                if uses == 0:
                    return name
                self._main[name] = uses - 1
                self._main.move_to_end(name)
        return None

    def evictable(self) -> Iterator[Hashable]:
        """Yield what is not held."""
        return chain(self._probation, self._main)
