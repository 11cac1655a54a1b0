"""What the master is made of: parts that each carry out some kinds of requests."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from kvstore.wire import messages as m

Transition = Callable[[Any, float], m.Reply]  # (request, now)
UNSIGNED_END: Final = 1 << 64
NEVER: Final = math.inf


class MasterPart(Protocol):
    """A part of the master: no clock, no I/O; `now` never goes back."""

    def transitions(self) -> Mapping[type, Transition]:
        """Return what carries out which type of request."""

    def advance(self, now: float) -> float:
        """Do what is due, before any request is looked at. O(1) amortised.

        Returns:
            When something is due again, as far as is known now; never too late, `NEVER` if nothing.
        """


def malformed(problem: str) -> m.Refused:
    """Refuse a request that is not legal."""
    return m.Refused(m.RefusalReason.MALFORMED, problem)


def not_entered(client: str) -> m.Refused:
    """Refuse a client that acts for nobody."""
    return m.Refused(m.RefusalReason.NOT_ENTERED, f"client {client} has not entered")


def equally_long(*columns: Sequence[object]) -> bool:
    """Tell whether columns have one length."""
    return len({len(column) for column in columns}) == 1


def are_checksums(values: Sequence[int]) -> bool:
    """Tell whether all are unsigned 64-bit numbers."""
    try:
        array("Q", values)
    except OverflowError:
        return False
    return True
