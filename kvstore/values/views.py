"""Opens views of values: what is in memory mapped here is read in place, all else is copied.

view ─▶ its place is hot ─────────────▶ lease held ─▶ checksum where it lies ─▶ handed out
     └▶ lookup ─▶ mapped here, or can be ─┘     anything else ─▶ a hit: the caller copies it
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstore.client.locations import Hit
from kvstore.client.steps import Steps, reach, settle, work
from kvstore.errors import NodeUnreachable
from kvstore.values.quick_reads import HERE_BYTES_MAX
from kvstore.values.value_operations import got
from kvstore.values.value_view import Origin, PlacedView, ValueView, is_right
from kvstore.wire.messages import Medium
from transfer import TransferError

if TYPE_CHECKING:
    from kvstore.client.client_core import ClientCore
    from kvstore.client.lease_keeper import LeaseKeeper
    from kvstore.client.place import Place
    from kvstore.client.segment_keys import SegmentKeys
    from kvstore.values.quick_reads import QuickReads
    from kvstore.values.value_operations import ValueOperations

Bytes = NDArray[np.uint8]
ViewT = TypeVar("ViewT", bound=PlacedView)
Make = Callable[[Bytes, "LeaseKeeper", Origin], ViewT]
VIEW_S_MAX: Final = 600.0


class Views:
    """Thread-safe.

    Args:
        core: The client's operations.
        segments: Keys to the nodes' segments.
        leases: Keeps what is read in place.
        reads: Looks values up, and knows the places of hot ones.
        operations: Copies what cannot be read in place.
    """

    def __init__(
        self,
        core: ClientCore,
        segments: SegmentKeys,
        leases: LeaseKeeper,
        reads: QuickReads,
        operations: ValueOperations,
    ) -> None:
        self._core = core
        self._operations = operations
        self._segments = segments
        self._leases = leases
        self._reads = reads

    def open_hot(
        self, key: bytes, make: Make[ViewT], max_s: float, nbytes_max: int | None = None
    ) -> ViewT | None:
        """View a hot value that is mapped here; None if anything must be waited for.

        Args:
            key: Not salted yet.
            make: Makes the view.
            max_s: As of `Store.view`.
            nbytes_max: No larger one.
        """
        hot = self._reads.hot
        place, removals = hot.find(key), hot.removals
        if place is None or (nbytes_max is not None and place.nbytes > nbytes_max):
            return None
        memory = self._memory(place)
        if memory is None or place.lease.late_s() >= 0 or hot.take(key) is not place:
            return None
        view = self._in_place(
            Origin(key, place, memory, hot, removals, True, place.lease.deadline_s), make, max_s
        )
        if view is None:
            self._leases.drop(place.lease)
        else:
            self._core.record.count(read_blocks=1, hot_blocks=1)
        return view

    def open_here(self, key: bytes, make: Make[ViewT], max_s: float) -> ViewT | None:
        """As `open_hot`, between two steps of an event loop."""
        return self.open_hot(key, make, max_s, HERE_BYTES_MAX)

    def value_steps(
        self, key: bytes, max_s: float, timeout_s: float | None
    ) -> Steps[ValueView | None]:
        """View a value, or a copy of it; None if it is not there. Raises as `Store.view`."""
        deadline_s = self._core.deadline(timeout_s)
        found = yield from self.open_steps(key, ValueView, max_s, timeout_s)
        if not isinstance(found, Hit):
            return found
        left_s = self._core.left(deadline_s)
        (result,) = yield from self._operations.get([key], left_s, hit=found)
        value = got(key, result).value
        return None if value is None else ValueView(value, self._leases)

    def open_steps(
        self, key: bytes, make: Make[ViewT], max_s: float, timeout_s: float | None
    ) -> Steps[ViewT | Hit | None]:
        """View a value in place; None if it is not there, or else a hit of it, to be copied.

        Args:
            key: Not salted yet.
            make: Makes the view.
            max_s: As of `Store.view`.
            timeout_s: For the request to the master, and to reach its node.
        """
        deadline_s, removals = self._core.deadline(timeout_s), self._reads.hot.removals
        place = yield from self._reads.find_steps(key, timeout_s)
        if place is None:
            return None
        known = place.lease.adrift and self._reads.hot.take(key) is not None
        memory = yield from self._mapped(place, deadline_s)
        if memory is not None:
            yield from work(place.nbytes)
            origin = Origin(
                key, place, memory, self._reads.hot, removals, known, place.lease.deadline_s
            )
            view = self._in_place(origin, make, max_s)
            if view is not None:
                self._core.record.count(hit_blocks=1, read_blocks=1)
                return view
        return place.as_hit(self._core.names([key])[0])

    def _in_place(self, origin: Origin, make: Make[ViewT], max_s: float) -> ViewT | None:
        """Hold, verify, hand out; None if anything is wrong, and the lease is the caller's.

        Raises:
            TooManyHolds, TooManyViews, StoreClosed, InvalidValue: The lease was dropped.
        """
        place, lease = origin.place, origin.place.lease
        value = origin.segment[place.offset : place.offset + place.nbytes]
        try:
            self._leases.keep(lease, max_s=max_s, nbytes=place.nbytes, seen=value)
            if is_right(origin) and (lease.late_s() < 0 or lease.adrift) and not lease.lost:
                return make(value, self._leases, origin)
        except BaseException:
            self._leases.drop(lease)
            raise
        self._leases.let(lease)
        return None

    def _memory(self, place: Place) -> Bytes | None:
        """Return the memory that a value lies in, if it is mapped here already."""
        if place.where.medium is not Medium.DRAM:
            return None
        return self._segments.memory(place.where)

    def _mapped(self, place: Place, deadline_s: float) -> Steps[Bytes | None]:
        """Return the memory that a value lies in; None if it cannot be mapped here."""
        memory, where = self._memory(place), place.where
        if memory is not None or where.medium is not Medium.DRAM:
            return memory
        try:
            key = self._segments.known(where)
            if key is None:
                key = yield from reach(where, deadline_s)
            transfer = self._segments.map(where, key, place.offset)
            if transfer is not None:
                yield from settle(transfer)
        except (NodeUnreachable, TransferError):
            return None  # the long way finds out what is wrong
        return self._memory(place)
