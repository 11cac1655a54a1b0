"""Gets of one small value: the shortest way, where nothing is unusual.

get ─▶ its place is hot ─────────▶ one-sided read ─▶ checksum ─▶ lease still runs ─▶ value
    └▶ lookup at the master ─▶ place ─┘      anything else ─▶ a hit: the caller goes the long way
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

from kvstore.client.locations import Hit
from kvstore.client.place import ONE_PASS_BYTES_MIN, PLACE_BYTES_MAX, Place
from kvstore.errors import MasterUnavailable
from kvstore.values.hot_places import HotPlaces
from kvstore.values.values import Part, RegionPiece
from kvstore.wire import messages as m

if TYPE_CHECKING:
    from kvstore.client.client_core import ClientCore
    from kvstore.client.driver import Driver
    from kvstore.client.lease_keeper import LeaseKeeper
    from kvstore.client.segment_keys import SegmentKeys

T = TypeVar("T")
STAGED_BYTES_MAX: Final = 256 << 10


class QuickReads:
    """Thread-safe.

    Args:
        core: The client's operations.
        driver: Asks the master.
        segments: Keys to the nodes' segments.
        leases: Releases what was read.
    """

    def __init__(
        self, core: ClientCore, driver: Driver, segments: SegmentKeys, leases: LeaseKeeper
    ) -> None:
        self._core = core
        self._driver = driver
        self._segments = segments
        self.hot = HotPlaces(leases.drop)

    def get(self, key: bytes, timeout_s: float | None) -> bytes | Hit | None:
        """Return the bytes of a block, None if it is not there, or else a hit of it.

        Args:
            key: Not salted yet.
            timeout_s: For the request to the master.
        """
        return self._run(key, self._read, timeout_s)

    def get_into(
        self, key: bytes, target: Part, piece: RegionPiece | None, timeout_s: float | None
    ) -> int | Hit | None:
        """Copy a block into memory; return its size, otherwise as `get`.

        Args:
            key: Not salted yet.
            target: Where to; `piece` if it is not registered.
            piece: The same in a region, if it is registered.
            timeout_s: For the request to the master.
        """

        def read(place: Place) -> int | None:
            if place.nbytes > target.nbytes:
                return None  # the long way says so
            if piece is not None:
                offset = piece.offset
                good = place.read_into(self._core.engine, self._segments, piece.region, offset)
                return place.nbytes if good else None
            if isinstance(target, RegionPiece):
                return None
            if place.nbytes >= ONE_PASS_BYTES_MIN:
                part = target[: place.nbytes]
                if place.copy_to(self._core.engine, self._segments, part):
                    return place.nbytes
            if place.nbytes > STAGED_BYTES_MAX:
                return None  # it is moved straight to where it is wanted
            value = self._read(place)
            if value is None:
                return None
            target[: place.nbytes] = np.frombuffer(value, dtype=np.uint8)
            return place.nbytes

        return self._run(key, read, timeout_s)

    def _run(
        self, key: bytes, read: Callable[[Place], T | None], timeout_s: float | None
    ) -> T | Hit | None:
        place = self.hot.find(key)
        is_hot = place is not None and place.lease.late_s() < 0
        if place is None or not is_hot:
            place = self._look_up(key, place, timeout_s)
            if place is None:
                self._core.record.count(missed_blocks=1)
                return None
        value = read(place)
        if value is None:
            self.hot.take(key)
            return place.as_hit(self._core.names([key])[0])
        if is_hot:
            self._core.record.count(read_blocks=1, hot_blocks=1)
        elif place.lease.adrift:
            self._core.record.count(read_blocks=1)
        else:
            self._core.record.count(hit_blocks=1, read_blocks=1)
            self.hot.offer(key, place)
        return value

    def _look_up(self, key: bytes, last: Place | None, timeout_s: float | None) -> Place | None:
        """Ask the master; while none answers, the last place will do if its bytes are right."""
        record = self._core.record
        asked_s = time.monotonic()
        request = m.Lookup(record.name, self._core.names([key]), record.avoided(), True)
        try:
            reply = self._driver.ask(self._core.master, request, m.Located, timeout_s=timeout_s)
        except MasterUnavailable:
            if last is None:
                raise
            last.lease.adrift = True
            return last
        if last is not None:
            self.hot.forget([key])
        return Place.of_reply(reply, asked_s=asked_s) if reply.lease_id else None

    def _read(self, place: Place) -> bytes | None:
        with self._core.staging.borrow(min(place.nbytes, PLACE_BYTES_MAX)) as region:
            if place.read_into(self._core.engine, self._segments, region, 0):
                return region.array[: place.nbytes].tobytes()
        return None
