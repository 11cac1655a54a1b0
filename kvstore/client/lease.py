"""A client's side of a lease: until when the bytes that it was told about stay where they are."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvstore.errors import LeaseExpired


class Lease:
    """One lease, perhaps renewed. The reader counts from before its request: it gives up first.

    Attributes:
        lease_id: The master's number; 0 is no lease, of nothing.
        deadline_s: Its end on this process's monotonic clock, on the safe side.
        lost: The master said that it does not run any more, or could not be asked in time.
    """

    __slots__ = ("deadline_s", "lease_id", "lost")

    def __init__(self, lease_id: int, deadline_s: float) -> None:
        self.lease_id = lease_id
        self.deadline_s = deadline_s
        self.lost = False

    def late_s(self, clock: Callable[[], float] = time.monotonic) -> float:
        """Seconds since its end; below zero while it runs."""
        return clock() - self.deadline_s

    def check(self) -> None:
        """Raise LeaseExpired unless it runs. Asked before *and* after a copy: between the two
        the bytes cannot have moved; if the later look finds it over, they may have.
        """
        late_s = self.late_s()
        if late_s >= 0:
            raise LeaseExpired(lease_id=self.lease_id, late_s=late_s)
