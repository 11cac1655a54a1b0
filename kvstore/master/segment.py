"""What the master knows of the memory that one node lends."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from kvstore.errors import InvariantViolated
from kvstore.eviction import EvictionPolicy
from kvstore.master.allocator import SegmentAllocator, padded
from kvstore.master.block import Extent, ExtentState


class Segment:
    """One node's segment: its extents, its free space and the order of use. Not thread-safe.

    Args:
        node: The node's incarnation.
        address: Where its transfer engine listens.
        capacity: Bytes lent.
        now: Time of registration.
        placeable_s: Nothing new is placed here before this time.
        policy: Decides which block goes next; the segment's own from here on.
    """

    def __init__(
        self,
        node: str,
        *,
        address: str,
        capacity: int,
        now: float,
        placeable_s: float,
        policy: EvictionPolicy,
    ) -> None:
        self.node = node
        self.address = address
        self._policy = policy
        self._unpinned: dict[Hashable, Extent] = {}  # what the policy knows
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

    # -- what may be evicted ------------------------------------------------------------------

    def use(self, extent: Extent, *, parent: bytes | None = None) -> None:
        """Count a use of a block that is not pinned, or let it be evicted from now on."""
        if self.may_evict(extent):
            self._policy.touch(extent.key)
        else:
            self._policy.admit(extent.key, parent)
            self._unpinned[extent.key] = extent

    def keep(self, extent: Extent, *, evicted: bool = False) -> None:
        """Let a block be evicted no more: it is pinned, or on its way out."""
        if self.may_evict(extent):
            self._policy.remove(extent.key, evicted=evicted)
            del self._unpinned[extent.key]

    def hold(self, extent: Extent) -> None:
        """Keep a block while it is leased."""
        if self.may_evict(extent):
            self._policy.hold(extent.key)

    def unhold(self, extent: Extent) -> None:
        """Let a block be evicted again after its last lease."""
        if self.may_evict(extent):
            self._policy.unhold(extent.key)

    def may_evict(self, extent: Extent) -> bool:
        """Tell whether a block is neither pinned nor gone; it may be leased."""
        return self._unpinned.get(extent.key) is extent

    def oldest_victim(self) -> Extent | None:
        """Return what would be evicted next."""
        name = self._policy.victim()
        return None if name is None else self._unpinned[name]

    def can_make_room(self, nbytes: int) -> bool:
        """Tell whether evicting could free enough bytes at all, before anything is evicted for it.

        Holes between blocks that stay may still prevent it.
        """
        missing = padded(nbytes) - self.free
        for extent in self._evictable():
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
        for extent in self._evictable():
            if extent.state is not ExtentState.COMMITTED or extent.leases:
                raise InvariantViolated(
                    where=f"segment {self.node}", problem=f"evictable: {extent}"
                )

    def _enter(self, key: bytes, offset: int, nbytes: int, state: ExtentState) -> Extent:
        extent = Extent(node=self.node, offset=offset, nbytes=nbytes, key=key, state=state)
        self._extents[offset] = extent
        return extent

    def _leave(self, extent: Extent) -> None:
        self.keep(extent)
        del self._extents[extent.offset]

    def _evictable(self) -> Iterator[Extent]:
        return (self._unpinned[name] for name in self._policy.evictable())
