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
        lost: It is not renewed any more.
        adrift: Its time is over, but no master was there to be asked: perhaps none is, and nothing
            has moved. Reads go on, and the checksums alone tell whether the bytes are the right
            ones; where they are not, the lease counts as over. Ends with the master's next word.
    """

    __slots__ = ("adrift", "deadline_s", "lease_id", "lost")

    def __init__(self, lease_id: int, deadline_s: float) -> None:
        self.lease_id = lease_id
        self.deadline_s = deadline_s
        self.lost = False
        self.adrift = False

    def renew(self, deadline_s: float) -> None:
        """It runs on until then."""
        self.deadline_s = deadline_s
        self.adrift = False

    def lose(self) -> None:
        """It runs no more, whatever was thought before."""
        self.lost = True
        self.adrift = False

    def expired(self) -> LeaseExpired:
        """Describe it as over."""
        return LeaseExpired(lease_id=self.lease_id, late_s=max(0.0, self.late_s()))

    def late_s(self, clock: Callable[[], float] = time.monotonic) -> float:
        """Seconds since its end; below zero while it runs."""
        return clock() - self.deadline_s

    def check(self) -> None:
        """Raise LeaseExpired unless it runs or is adrift. Asked before *and* after a copy: between
        the two the bytes cannot have moved; if the later look finds it over, they may have.
        """
        if self.late_s() >= 0 and not self.adrift:
            raise self.expired()
