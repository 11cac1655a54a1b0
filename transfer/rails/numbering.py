"""The numbers of transfers to one peer, within what its owner remembers. Pure.

1 ......... oldest ................. following ......... oldest + ahead_max
 finished  |  unfinished or finished |  free            |  refused by the owner
"""

from __future__ import annotations

from collections.abc import Mapping

from transfer.wire import TRANSFERS_AHEAD_MAX


class Numbering:
    """Hands out ascending numbers.

    Args:
        unfinished: the transfers that are, by number, ascending; changed by their owner.
        ahead_max: how far a number may be ahead of the oldest of them.
    """

    def __init__(
        self, unfinished: Mapping[int, object], *, ahead_max: int = TRANSFERS_AHEAD_MAX
    ) -> None:
        self._unfinished = unfinished
        self._ahead_max = ahead_max
        self._following = 1
        # Only looked at again when it is reached: the oldest never gets younger.
        self._limit = 1 + ahead_max

    @property
    def oldest(self) -> int:
        """The lowest number that is unfinished; what is below can be forgotten."""
        return next(iter(self._unfinished), self._following)

    @property
    def is_exhausted(self) -> bool:
        """Whether the next number has to wait for the oldest transfer to end."""
        if self._following < self._limit:
            return False
        self._limit = self.oldest + self._ahead_max
        return self._following >= self._limit

    def take(self) -> int:
        """Return the next number."""
        number = self._following
        self._following = number + 1
        return number
