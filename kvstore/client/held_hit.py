"""A hit whose lease is renewed as long as it is open."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.client.locations import Hit

if TYPE_CHECKING:
    from kvstore.client.lease_keeper import LeaseKeeper


class HeldHit:
    """Blocks that stay where they are until `close`. Use it in a `with` statement.

    Renewal ends by itself after the longest time that was asked for, and when the master does
    not know the lease any more (it was restarted): then `lost` is True, and copies raise
    LeaseExpired once the lease is over. While no master answers, reads go on, see `Lease.adrift`.

    Attributes:
        hit: What was found.
    """

    def __init__(self, hit: Hit, keeper: LeaseKeeper, *, max_s: float) -> None:
        self.hit = hit
        self._keeper = keeper
        self._closed = False
        if hit.lease_id:
            keeper.keep(hit.lease, max_s=max_s)

    @property
    def lost(self) -> bool:
        """Whether the lease is not renewed any more, though this is open."""
        return self.hit.lease.lost

    def close(self) -> None:
        """Let the blocks go; the master is told soon, in the background. Idempotent."""
        if not self._closed:
            self._closed = True
            self._keeper.drop(self.hit.lease)

    def __enter__(self) -> HeldHit:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
