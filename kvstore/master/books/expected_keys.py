"""Which block comes before which: learned from those who look for a chain and miss its end."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final

EXPECTED_MAX: Final = 1 << 15  # keys looked for in vain whose parent is remembered


class ExpectedKeys:
    """Parents of keys that are not there: who misses a chain often stores it soon."""

    def __init__(self) -> None:
        self._parents: OrderedDict[bytes, bytes] = OrderedDict()

    def miss(self, run: Sequence[bytes]) -> None:
        """Remember the order of a chain's keys, of which all but the first are missing."""
        for parent, key in pairwise(run):
            self._parents[key] = parent
            self._parents.move_to_end(key)
        while len(self._parents) > EXPECTED_MAX:
            self._parents.popitem(last=False)

    def parents(self, keys: Iterable[bytes]) -> Sequence[bytes | None]:
        """Return, and forget, the parents of keys that come now; nothing if none is known."""
        if not self._parents:
            return ()
        pop = self._parents.pop
        return [pop(key, None) for key in keys]
