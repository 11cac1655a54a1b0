"""Opens views of values: what is in memory mapped here is read in place, all else is copied.

view ─▶ its place is hot ─────────────▶ lease held ─▶ checksum where it lies ─▶ handed out
     └▶ lookup ─▶ mapped here, or can be ─┘     anything else ─▶ a hit: the caller copies it
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstore.client.locations import Hit
from kvstore.client.mapped_memory import memory_of
from kvstore.client.steps import Steps, work
from kvstore.values.quick_reads import HERE_BYTES_MAX
from kvstore.values.value_operations import got
from kvstore.values.value_view import Origin, PlacedView, TensorView, ValueView, verified

if TYPE_CHECKING:
    from kvstore.client.client_core import ClientCore
    from kvstore.client.lease_keeper import LeaseKeeper
    from kvstore.client.place import Place
    from kvstore.client.segment_keys import SegmentKeys
    from kvstore.values.quick_reads import QuickReads
    from kvstore.values.value_operations import ValueOperations

logger = logging.getLogger(__name__)

Bytes = NDArray[np.uint8]
ViewT = TypeVar("ViewT", bound=PlacedView)
VIEW_S_MAX: Final = 600.0


class Kind(NamedTuple, Generic[ViewT]):
    """What is made of a value.

    Attributes:
        make: Makes the view.
        guarded: Whoever has it might write.
    """

    make: Callable[[Bytes, LeaseKeeper, Origin], ViewT]
    guarded: bool


VALUE: Final = Kind(ValueView, guarded=False)
TENSOR: Final = Kind(TensorView, guarded=True)


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

    def open_hot(self, key: bytes, kind: Kind[ViewT], max_s: float) -> ViewT | None:
        """View a hot value that is mapped here; None if anything must be waited for.

        Args:
            key: Not salted yet.
            kind: Of view.
            max_s: As of `Store.view`.
        """
        hot = self._reads.hot
        place, removals = hot.find(key), hot.removals
        if place is None or place.lease.late_s() >= 0:
            return None
        origin = self._origin(key, place, removals, kind, was_hot=True)
        if origin is None or hot.take(key) is not place:
            return None
        view = self._in_place(origin, kind, max_s)
        if view is None:
            self._leases.drop(place.lease)
        else:
            self._core.record.count(read_blocks=1, hot_blocks=1)
        return view

    def open_here(self, key: bytes, kind: Kind[ViewT], max_s: float) -> ViewT | None:
        """As `open_hot`, between two steps of an event loop: short values only."""
        place = self._reads.hot.find(key)
        if place is None or place.nbytes > HERE_BYTES_MAX:
            return None
        return self.open_hot(key, kind, max_s)

    def value_steps(
        self, key: bytes, max_s: float, timeout_s: float | None
    ) -> Steps[ValueView | None]:
        """View a value, or a copy of it; None if it is not there. Raises as `Store.view`."""
        deadline_s = self._core.deadline(timeout_s)
        found = yield from self._open_steps(key, VALUE, max_s, deadline_s)
        if not isinstance(found, Hit):
            return found
        left_s = self._core.left(deadline_s)
        (result,) = yield from self._operations.get([key], left_s, hit=found)
        value = got(key, result).value
        return None if value is None else ValueView(value, self._leases)

    def tensor_steps(
        self, key: bytes, max_s: float, timeout_s: float | None
    ) -> Steps[TensorView | None]:
        """As `value_steps`, of a tensor. Raises as `Store.view_tensor`."""
        deadline_s = self._core.deadline(timeout_s)
        found = yield from self._open_steps(key, TENSOR, max_s, deadline_s)
        if not isinstance(found, Hit):
            return found
        left_s = self._core.left(deadline_s)
        tensor = yield from self._operations.get_tensor(key, None, left_s, hit=found)
        return None if tensor is None else TensorView(tensor, self._leases)

    def _open_steps(
        self, key: bytes, kind: Kind[ViewT], max_s: float, deadline_s: float
    ) -> Steps[ViewT | Hit | None]:
        """View a value in place; None if it is not there, or else a hit of it, to be copied."""
        removals, left_s = self._reads.hot.removals, self._core.left(deadline_s)
        place = yield from self._reads.find_steps(key, left_s)
        if place is None:
            return None
        was_hot = place.lease.adrift and self._reads.hot.take(key) is not None
        yield from memory_of(self._segments, place.where, place.offset, deadline_s)
        origin = self._origin(key, place, removals, kind, was_hot=was_hot)
        if origin is not None:
            yield from work(place.nbytes)
            view = self._in_place(origin, kind, max_s)
            if view is not None:
                self._core.record.count(hit_blocks=1, read_blocks=1)
                return view
        return place.as_hit(self._core.names([key])[0])

    def _origin(
        self, key: bytes, place: Place, removals: int, kind: Kind[ViewT], *, was_hot: bool
    ) -> Origin | None:
        """Return where a value lies; None if it cannot be read there."""
        memory, guard, hot = self._segments.memory(place.where), None, self._reads.hot
        if memory is None:
            return None
        if kind.guarded:
            try:
                guard = self._segments.copy_on_write(place.where)
            except OSError as error:
                logger.info("values of %s are copied: %s", place.where.node, error)
            if guard is None:
                return None
            memory = guard.array
        return Origin(key, place, memory, hot, removals, was_hot, place.lease.deadline_s, guard)

    def _in_place(self, origin: Origin, kind: Kind[ViewT], max_s: float) -> ViewT | None:
        """Hold, verify, hand out; None if anything is wrong, and the lease is the caller's.

        Raises:
            TooManyHolds, TooManyViews, StoreClosed, InvalidValue: The lease was dropped.
        """
        place, lease = origin.place, origin.place.lease
        value = origin.segment[place.offset : place.offset + place.nbytes]
        try:
            self._leases.keep(lease, max_s=max_s, nbytes=place.nbytes, seen=value)
            if verified(origin) and (lease.late_s() < 0 or lease.adrift) and not lease.lost:
                return kind.make(value, self._leases, origin)
        except BaseException:
            self._leases.drop(lease)
            raise
        self._leases.let(lease)
        return None
