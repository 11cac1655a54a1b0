"""An eviction policy for whoever knows blocks by name: simulations, tests."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Final

from kvstore.eviction.policy import EvictionPolicy
from kvstore.eviction.rows import NOWHERE, EvictionRows

GROWTH_MIN: Final = 64


class NamedPolicy:
    """A policy with rows of its own. Not thread-safe.

    Args:
        rows: The policy's columns, empty yet.
        policy: Empty; belongs to this object from here on.
    """

    def __init__(self, rows: EvictionRows, policy: EvictionPolicy) -> None:
        self._rows = rows
        self._policy = policy
        self._row_of: dict[Hashable, int] = {}
        self._unused: list[int] = []
        rows.find = lambda name, row: self._row_of.get(name, NOWHERE)

    def __len__(self) -> int:
        return len(self._policy)

    def __contains__(self, name: Hashable) -> bool:
        return name in self._row_of

    def admit(self, name: Hashable, parent: Hashable | None = None) -> None:
        """Enter a block that is not known."""
        if not self._unused:
            first = len(self._rows)
            count = max(GROWTH_MIN, first)
            self._rows.grow(count)
            self._rows.names.extend([None] * count)
            self._unused.extend(reversed(range(first, first + count)))
        row = self._unused.pop()
        self._rows.names[row] = name
        self._row_of[name] = row
        self._policy.admit((row,), (parent,))

    def touch(self, name: Hashable) -> None:
        """Count a use of a known block."""
        self._policy.touch((self._row_of[name],))

    def hold(self, name: Hashable) -> None:
        """Make a known block no victim."""
        self._policy.hold(self._row_of[name])

    def unhold(self, name: Hashable) -> None:
        """Make a held block a possible victim again; others are ignored."""
        row = self._row_of.get(name)
        if row is not None:
            self._policy.unhold(row)

    def remove(self, name: Hashable, *, evicted: bool = False) -> None:
        """Forget a block; unknown ones are ignored."""
        row = self._row_of.pop(name, None)
        if row is not None:
            self._policy.remove(row, evicted=evicted)
            self._unused.append(row)

    def victim(self) -> Hashable | None:
        """Return what should go next."""
        row = self._policy.victim()
        return None if row is None else self._rows.names[row]

    def evictable(self) -> Iterator[Hashable]:
        """Yield every block that is not held."""
        return (self._rows.names[row] for row in self._policy.evictable())
