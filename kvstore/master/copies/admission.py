"""Which blocks that leave DRAM are worth a write to the SSD."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from configs.kvstore_policies import Admission
from kvstore.master.books.recent_names import RecentCounts


class SsdAdmission:
    """The rule, and what it remembers of uses. Not thread-safe.

    Most blocks are stored and never used again. `second_hit` spares the SSD these writes (and the
    place of what is used), for the price that a first use after the block left DRAM is a miss.

    Args:
        rule: Which blocks.
        names_max: Used names that are remembered in each of two generations.
    """

    def __init__(self, rule: Admission, *, names_max: int) -> None:
        self._rule = rule
        self._used = RecentCounts(names_max=names_max)

    @property
    def counts_uses(self) -> bool:
        """Whether `used` has to be told anything."""
        return self._rule is Admission.SECOND_HIT

    def used(self, names: Iterable[Hashable]) -> None:
        """Note that blocks were hit."""
        if self.counts_uses:
            for name in names:
                self._used.see(name)

    def admits(self, name: Hashable) -> bool:
        """Tell whether a block that leaves DRAM should be written to the SSD."""
        if self._rule is Admission.SECOND_HIT:
            return self._used.count(name) > 0
        return self._rule is Admission.ALWAYS
