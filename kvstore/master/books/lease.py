"""Leases: for a while, the bytes that a reader was told about stay where they are.

All leases of a master last equally long, so they end in the order in which they were granted or
renewed, and expiry looks at the oldest only. The reader counts from *before* its request, the
master from when it handles it: the reader always gives up first, whatever the two clocks show.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Lease:
    """The right of one client to read these copies until `deadline_s` of the awake time.

    `is_last`: It is not renewed any more.
    """

    client: str
    deadline_s: float
    rows: Sequence[int]
    is_last: bool = False


class LeaseTable:
    """All running leases. Who calls keeps `CopyTable.leases`. Not thread-safe.

    Deadlines are in *awake time*: the master's clock less what `excuse` was told of, since nobody
    could renew a lease with a master that did not run.

    Args:
        duration_s: How long a lease lasts unless released or renewed.

    Attributes:
        last_id: Leases get higher numbers.
    """

    def __init__(self, duration_s: float) -> None:
        self.duration_s = duration_s
        self._leases: OrderedDict[int, Lease] = OrderedDict()  # in the order of their ends
        self.last_id = 0
        self._excused_s = 0.0

    def __len__(self) -> int:
        return len(self._leases)

    def excuse(self, seconds: float) -> None:
        """Do not count time in which the master did not run."""
        self._excused_s += seconds

    def awake(self, now: float) -> float:
        """Return the awake time."""
        return now - self._excused_s

    def grant(self, client: str, rows: Sequence[int], now: float) -> int:
        """Lease the copies to the client from now on; return the lease's id."""
        self.last_id += 1
        deadline_s = now - self._excused_s + self.duration_s
        self._leases[self.last_id] = Lease(client=client, deadline_s=deadline_s, rows=rows)
        return self.last_id

    def renew(self, client: str, lease_id: int, now: float) -> bool:
        """Start a lease's time again; False if it is not running, or another's."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.client != client or lease.is_last:
            return False
        lease.deadline_s = now - self._excused_s + self.duration_s
        self._leases.move_to_end(lease_id)
        return True

    def running(self) -> Iterable[Lease]:
        """All of them."""
        return self._leases.values()

    def release(self, client: str, lease_id: int) -> Lease | None:
        """End and return a lease of this client; unknown and ended ones are ignored."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.client != client:
            return None
        return self._leases.pop(lease_id)

    def expire(self, now: float) -> list[Lease]:
        """End and return all leases whose time has come."""
        ended = []
        awake = now - self._excused_s
        while self._leases:
            oldest_id, oldest = next(iter(self._leases.items()))
            if oldest.deadline_s > awake:
                break
            ended.append(self._leases.pop(oldest_id))
        return ended

    def drop_client(self, client: str) -> list[Lease]:
        """End and return all leases of a client that is out of the cluster."""
        theirs = [i for i, lease in self._leases.items() if lease.client == client]
        return [self._leases.pop(lease_id) for lease_id in theirs]

    def next_end_s(self) -> float | None:
        """When the next lease ends, on the master's clock, if nobody renews or releases it."""
        if not self._leases:
            return None
        return next(iter(self._leases.values())).deadline_s + self._excused_s

    def counts(self) -> Counter[int]:
        """Count the leases on each row anew, for checking."""
        return Counter(row for lease in self._leases.values() for row in lease.rows)
