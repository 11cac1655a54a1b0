"""Gets of one small value: the shortest way, where nothing is unusual.

get ─▶ its place is hot ─────────▶ one-sided read ─▶ checksum ─▶ lease still runs ─▶ value
    └▶ lookup at the master ─▶ place ─┘  anything else ─▶ None: the caller goes the long way
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum, auto
from typing import TYPE_CHECKING, TypeVar

from kvstore.client.hot_places import HotPlaces
from kvstore.client.place import PLACE_BYTES_MAX, Place
from kvstore.client.values import RegionPiece
from kvstore.errors import MasterRefused
from kvstore.wire import messages as m

if TYPE_CHECKING:
    from kvstore.client.client_core import ClientCore
    from kvstore.client.lease_keeper import LeaseKeeper
    from kvstore.client.master_map import MasterMap
    from kvstore.client.segment_keys import SegmentKeys

T = TypeVar("T")


class Quick(Enum):
    """What a quick read found if not a value."""

    MISS = auto()
    UNUSUAL = auto()


class QuickReads:
    """Thread-safe.

    Args:
        core: The client's operations.
        link: The way to the master.
        segments: Keys to the nodes' segments.
        leases: Releases what was read.
    """

    def __init__(
        self, core: ClientCore, link: MasterMap, segments: SegmentKeys, leases: LeaseKeeper
    ) -> None:
        self._core = core
        self._link = link
        self._segments = segments
        self._leases = leases
        self.hot = HotPlaces(leases.drop)

    def get(self, key: bytes, timeout_s: float | None) -> bytes | Quick:
        """Return the bytes of a block.

        Args:
            key: Not salted yet.
            timeout_s: For the request to the master.
        """
        return self._run(key, self._read, timeout_s)

    def get_into(self, key: bytes, target: RegionPiece, timeout_s: float | None) -> int | Quick:
        """Copy a block into a piece of a region; return its size."""

        def read(place: Place) -> int | None:
            if place.nbytes > target.nbytes:
                return None
            good = place.read_into(self._core.engine, self._segments, target.region, target.offset)
            return place.nbytes if good else None

        return self._run(key, read, timeout_s)

    def _run(
        self, key: bytes, read: Callable[[Place], T | None], timeout_s: float | None
    ) -> T | Quick:
        hot = self.hot.find(key)
        if hot is not None:
            value = read(hot)
            if value is not None:
                self._core.record.count(read_blocks=1, hot_blocks=1)
                return value
            self.hot.forget([key])
            return Quick.UNUSUAL
        place = self._look_up(key, timeout_s)
        if isinstance(place, Quick):
            return place
        value = read(place)
        if value is None:
            self._leases.drop(place.lease)
            return Quick.UNUSUAL
        self._core.record.count(hit_blocks=1, read_blocks=1)
        self.hot.offer(key, place)
        return value

    def _look_up(self, key: bytes, timeout_s: float | None) -> Place | Quick:
        record = self._core.record
        asked_s = time.monotonic()
        request = m.Lookup(record.name, self._core.names([key]), record.avoided(), True)
        try:
            reply = self._link.ask(request, m.Located, timeout_s=timeout_s)
        except MasterRefused:
            return Quick.UNUSUAL
        if not reply.lease_id:
            record.count(missed_blocks=1)
            return Quick.MISS
        place = Place.of_reply(reply, asked_s=asked_s)
        if reply.chunk_bytes or place.nbytes > PLACE_BYTES_MAX:
            self._leases.drop(place.lease)
            return Quick.UNUSUAL
        return place

    def _read(self, place: Place) -> bytes | None:
        with self._core.staging.borrow(place.nbytes) as region:
            if place.read_into(self._core.engine, self._segments, region, 0):
                return region.array[: place.nbytes].tobytes()
        return None
