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
from kvstore.client.steps import Steps, work
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
HERE_BYTES_MAX: Final = 64 << 10  # copied between two steps of an event loop


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

    def get_here(self, key: bytes) -> bytes | None:
        """Return a hot block that a short copy brings; None if anything must be waited for.

        Args:
            key: Not salted yet.
        """
        place = self._hot(key)
        if place is None or place.nbytes > HERE_BYTES_MAX:
            return None
        if not place.is_here(self._core.engine, self._segments):
            return None
        value = self._read(place)
        if value is not None:  # else the long way says what is wrong
            self._core.record.count(read_blocks=1, hot_blocks=1)
        return value

    def get_steps(self, key: bytes, timeout_s: float | None) -> Steps[bytes | Hit | None]:
        """As `get`, for a driver that waits in its own way."""
        return (yield from self._run_steps(key, self._read_steps, timeout_s))

    def get_into_steps(
        self, key: bytes, target: Part, piece: RegionPiece | None, timeout_s: float | None
    ) -> Steps[int | Hit | None]:
        """As `get_into`, for a driver that waits in its own way."""

        def read(place: Place) -> Steps[int | None]:
            if place.nbytes > target.nbytes:
                return None  # the long way says so
            if piece is not None:
                good = yield from place.read_steps(
                    self._core.engine, self._segments, piece.region, piece.offset
                )
                return place.nbytes if good else None
            if isinstance(target, RegionPiece):
                return None
            yield from work(place.nbytes)
            part = target[: place.nbytes]
            if place.copy_to(self._core.engine, self._segments, part):
                return place.nbytes
            if place.nbytes > STAGED_BYTES_MAX:
                return None  # it is moved straight to where it is wanted
            value = yield from self._read_steps(place)
            if value is None:
                return None
            part[:] = np.frombuffer(value, dtype=np.uint8)
            return place.nbytes

        return (yield from self._run_steps(key, read, timeout_s))

    def _hot(self, key: bytes) -> Place | None:
        place = self.hot.find(key)
        return place if place is not None and place.lease.late_s() < 0 else None

    def _run(
        self, key: bytes, read: Callable[[Place], T | None], timeout_s: float | None
    ) -> T | Hit | None:
        hot = place = self._hot(key)
        if place is None:
            place = self._look_up(key, timeout_s)
            if place is None:
                return None
        return self._judge(key, place, read(place), was_hot=hot is not None)

    def _run_steps(
        self, key: bytes, read: Callable[[Place], Steps[T | None]], timeout_s: float | None
    ) -> Steps[T | Hit | None]:
        hot = place = self._hot(key)
        if place is None:
            place = yield from self.find_steps(key, timeout_s)
            if place is None:
                return None
        value = yield from read(place)
        return self._judge(key, place, value, was_hot=hot is not None)

    def find_steps(self, key: bytes, timeout_s: float | None) -> Steps[Place | None]:
        """Ask the master where a block is; None: nowhere.

        While no master answers, the last place will do if its bytes are right.

        Args:
            key: Not salted yet.
            timeout_s: For the request.
        """
        last, asked_s = self.hot.find(key), time.monotonic()
        asking = self._core.master.ask(self._lookup(key), m.Located, timeout_s=timeout_s)
        try:
            reply = yield from asking
        except MasterUnavailable:
            place = _adrift(last)
            if place is None:
                raise
            return place
        return self._found(key, reply, asked_s)

    def _judge(self, key: bytes, place: Place, value: T | None, *, was_hot: bool) -> T | Hit:
        """Count what was read; a hit for the long way if nothing was."""
        if value is None:
            self.hot.take(key)
            return place.as_hit(self._core.names([key])[0])
        if was_hot:
            self._core.record.count(read_blocks=1, hot_blocks=1)
        elif place.lease.adrift:
            self._core.record.count(read_blocks=1)
        else:
            self._core.record.count(hit_blocks=1, read_blocks=1)
            self.hot.offer(key, place)
        return value

    def _lookup(self, key: bytes) -> m.Lookup:
        record = self._core.record
        return m.Lookup(record.name, self._core.names([key]), record.avoided(), True)

    def _look_up(self, key: bytes, timeout_s: float | None) -> Place | None:
        """Ask the master; while none answers, the last place will do if its bytes are right."""
        last, asked_s = self.hot.find(key), time.monotonic()
        try:
            reply = self._driver.ask(
                self._core.master, self._lookup(key), m.Located, timeout_s=timeout_s
            )
        except MasterUnavailable:
            place = _adrift(last)
            if place is None:
                raise
            return place
        return self._found(key, reply, asked_s)

    def _found(self, key: bytes, reply: m.Located, asked_s: float) -> Place | None:
        if self.hot.find(key) is not None:
            self.hot.forget([key])
        if reply.lease_id:
            return Place.of_reply(reply, asked_s=asked_s)
        self._core.record.count(missed_blocks=1)
        return None

    def _read(self, place: Place) -> bytes | None:
        if place.nbytes >= ONE_PASS_BYTES_MIN:
            value = place.read_bytes(self._core.engine, self._segments)
            if value is not None or place.nbytes > PLACE_BYTES_MAX:
                return value
        with self._core.staging.borrow(min(place.nbytes, PLACE_BYTES_MAX)) as region:
            if place.read_into(self._core.engine, self._segments, region, 0):
                return region.array[: place.nbytes].tobytes()
        return None

    def _read_steps(self, place: Place) -> Steps[bytes | None]:
        if place.nbytes >= ONE_PASS_BYTES_MIN and place.is_here(self._core.engine, self._segments):
            yield from work(place.nbytes)
            value = place.read_bytes(self._core.engine, self._segments)
            if value is not None or place.nbytes > PLACE_BYTES_MAX:
                return value
        with self._core.staging.borrow(min(place.nbytes, PLACE_BYTES_MAX)) as region:
            good = yield from place.read_steps(self._core.engine, self._segments, region, 0)
            return region.array[: place.nbytes].tobytes() if good else None


def _adrift(last: Place | None) -> Place | None:
    """Let the last place do while no master answers: checksums tell whether it is right."""
    if last is not None:
        last.lease.adrift = True
    return last
