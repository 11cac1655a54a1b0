"""The least recently used block goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator


class LeastRecentlyUsed:
    """One queue in the order of use; see `EvictionPolicy`.

    A chain is touched from its leaf to its root, so it is eaten from the leaf: what is left is
    always a usable prefix.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[Hashable, None] = OrderedDict()
        self._held: set[Hashable] = set()

    def __len__(self) -> int:
        return len(self._order) + len(self._held)

    def __contains__(self, name: Hashable) -> bool:
        return name in self._order or name in self._held

    def admit(self, name: Hashable, parent: Hashable | None = None) -> None:
        """Enter a block as the youngest."""
        del parent
        self._order[name] = None

    def touch(self, name: Hashable) -> None:
        """Make a block the youngest."""
        if name not in self._held:
            self._order.move_to_end(name)

    def hold(self, name: Hashable) -> None:
        """Take a block out of the queue."""
        if name not in self._held:
            del self._order[name]
            self._held.add(name)

    def unhold(self, name: Hashable) -> None:
        """Enter a held block as the youngest."""
        if name in self._held:
            self._held.remove(name)
            self._order[name] = None

    def remove(self, name: Hashable, *, evicted: bool = False) -> None:
        """Forget a block."""
        del evicted
        self._order.pop(name, None)
        self._held.discard(name)

    def victim(self) -> Hashable | None:
        """Return the oldest."""
        return next(iter(self._order), None)

    def evictable(self) -> Iterator[Hashable]:
        """Yield what is not held, the oldest first."""
        return iter(self._order)
