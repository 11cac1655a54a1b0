"""Leases: for a while, the bytes that a reader was told about stay where they are.

All leases of a master last equally long, so they end in the order in which they were granted,
and expiry looks at the oldest only. The reader counts from *before* its request, the master from
when it handles it: the reader always gives up first, whatever the two clocks show.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.master.block import Extent


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right of one client to read these extents until `deadline_s` of the master's clock."""

    lease_id: int
    client: str
    deadline_s: float
    extents: tuple[Extent, ...]


class LeaseTable:
    """All running leases; keeps `Extent.leases` equal to the number of leases on each.

    Methods that end leases return the extents that nobody reads any more.

    Args:
        duration_s: How long a lease lasts unless released.
    """

    def __init__(self, duration_s: float) -> None:
        self.duration_s = duration_s
        self._leases: dict[int, Lease] = {}  # in the order of their ends
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, client: str, extents: tuple[Extent, ...], now: float) -> Lease:
        """Lease the extents to the client from now on."""
        self._last_id += 1
        lease = Lease(
            lease_id=self._last_id,
            client=client,
            deadline_s=now + self.duration_s,
            extents=extents,
        )
        self._leases[lease.lease_id] = lease
        for extent in extents:
            extent.leases += 1
        return lease

    def release(self, client: str, lease_id: int) -> list[Extent]:
        """End a lease of this client; unknown and ended ones are ignored."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.client != client:
            return []
        return self._end(lease)

    def expire(self, now: float) -> list[Extent]:
        """End all leases whose time has come."""
        idle = []
        while self._leases:
            oldest = next(iter(self._leases.values()))
            if oldest.deadline_s > now:
                break
            idle += self._end(oldest)
        return idle

    def drop_client(self, client: str) -> list[Extent]:
        """End all leases of a client that is out of the cluster."""
        theirs = [lease for lease in self._leases.values() if lease.client == client]
        return [extent for lease in theirs for extent in self._end(lease)]

    def counts(self) -> dict[Extent, int]:
        """Count the leases on each extent anew, for checking."""
        found: dict[Extent, int] = {}
        for lease in self._leases.values():
            for extent in lease.extents:
                found[extent] = found.get(extent, 0) + 1
        return found

    def _end(self, lease: Lease) -> list[Extent]:
        del self._leases[lease.lease_id]
        for extent in lease.extents:
            assert extent.leases > 0, extent
            extent.leases -= 1
        return [extent for extent in lease.extents if extent.leases == 0]
