"""What the master knows of the memory that one node lends."""

from __future__ import annotations

from kvstore.allocator import SegmentAllocator, padded
from kvstore.block import Extent, ExtentState
from kvstore.errors import InvariantViolated
from kvstore.eviction import LeastRecentlyUsed


class Segment:
    """One node's segment: its extents, its free space and the order of use. Not thread-safe.

    Args:
        node: The node's incarnation.
        address: Where its transfer engine listens.
        capacity: Bytes lent.
        now: Time of registration.
        placeable_s: Nothing new is placed here before this time.
    """

    def __init__(
        self, node: str, *, address: str, capacity: int, now: float, placeable_s: float
    ) -> None:
        self.node = node
        self.address = address
        self.recency = LeastRecentlyUsed()
        self.heard_s = now
        self.placeable_s = placeable_s
        self._allocator = SegmentAllocator(capacity)
        self._extents: dict[int, Extent] = {}

    @property
    def capacity(self) -> int:
        """Usable bytes."""
        return self._allocator.capacity

    @property
    def free(self) -> int:
        """Bytes in no extent."""
        return self._allocator.free

    def place(self, key: bytes, nbytes: int) -> Extent | None:
        """Open an extent for a block to be written; None if no free range is large enough."""
        offset = self._allocator.allocate(nbytes)
        if offset is None:
            return None
        return self._enter(key, offset, nbytes, ExtentState.OPEN)

    def adopt(self, key: bytes, offset: int, nbytes: int) -> Extent | None:
        """Enter an extent that the node says it holds; None if its range is not free."""
        if not self._allocator.reserve(offset, nbytes):
            return None
        return self._enter(key, offset, nbytes, ExtentState.COMMITTED)

    def release(self, extent: Extent) -> None:
        """Free an extent's bytes for the next block. Nobody may hold a lease on it."""
        assert extent.leases == 0, extent
        self._leave(extent)
        extent.become(ExtentState.FREE)
        self._allocator.release(extent.offset)

    def lose(self) -> list[Extent]:
        """Return all extents, lost with the node. The segment is not used after this."""
        lost = list(self._extents.values())
        for extent in lost:
            self._leave(extent)
            extent.become(ExtentState.LOST)
        return lost

    def oldest_victim(self) -> Extent | None:
        """Return what would be evicted next."""
        return next(self.recency.victims(), None)

    def can_make_room(self, nbytes: int) -> bool:
        """Tell whether evicting could free enough bytes at all, before anything is evicted for it.

        Holes between blocks that stay may still prevent it.
        """
        missing = padded(nbytes) - self.free
        for extent in self.recency.victims():
            if missing <= 0:
                break
            missing -= padded(extent.nbytes)
        return missing <= 0

    def bytes_in(self, state: ExtentState) -> int:
        """Sum up the space of the extents in one state."""
        return sum(padded(e.nbytes) for e in self._extents.values() if e.state is state)

    def extents(self) -> tuple[Extent, ...]:
        """All extents, in no order."""
        return tuple(self._extents.values())

    def check_invariants(self) -> None:
        """Raise InvariantViolated unless every byte is free or in exactly one extent."""
        self._allocator.check_invariants()
        used = sum(padded(extent.nbytes) for extent in self._extents.values())
        if used != self._allocator.used:
            raise InvariantViolated(
                where=f"segment {self.node}",
                problem=f"extents take {used} bytes, the allocator says {self._allocator.used}",
            )
        for extent in self.recency.victims():
            if extent.state is not ExtentState.COMMITTED:
                raise InvariantViolated(
                    where=f"segment {self.node}", problem=f"{extent.state} extent is evictable"
                )

    def _enter(self, key: bytes, offset: int, nbytes: int, state: ExtentState) -> Extent:
        extent = Extent(node=self.node, offset=offset, nbytes=nbytes, key=key, state=state)
        self._extents[offset] = extent
        return extent

    def _leave(self, extent: Extent) -> None:
        self.recency.discard(extent)
        del self._extents[extent.offset]
