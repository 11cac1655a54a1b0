"""Places on disks that a client has ahead, so that a put of large blocks begins at once.

put n     ... Allocate, places wanted ──▶ granted ─▶ kept
put n+1   takes them ─▶ its first blocks are being written ─▶ Allocate, these places ─▶ its own

They are for a disk that is about to have nothing to do: while so much of other puts is under way
that it has, a put asks first, which takes less of the processor.

Who has such places writes before he knows whether the keys are free. So after a put of which a
key was taken, puts ask first until one has found all of its keys free.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from kvstore.client.post_box import NEVER
from kvstore.client.reserved_places import ReservedPlace
from kvstore.wire.messages import PutOutcome

if TYPE_CHECKING:
    from kvstore.client.client_record import ClientRecord
    from kvstore.client.reserved_places import ReservedPlaces
    from kvstore.client.source import Source
    from kvstore.wire import messages as m

PUT_BYTES_MIN: Final = 1 << 20  # of less a request more does not matter
AHEAD_BYTES: Final = 16 << 20  # of one put
AHEAD_MAX: Final = 64  # blocks of one put
BUSY_BYTES: Final = 16 << 20  # of other puts: so much keeps a disk busy until a put has asked
DISK_IDLE_S: Final = 3.0  # places are given back later than in memory: there is more of a disk
PAUSE_S: Final = 1.0  # after the master had none
LEFT_S_MIN: Final = 1.0  # a place that is to be given back sooner is not begun with


class DiskPlaces:
    """Thread-safe.

    Args:
        places: Keeps them; for nobody else.
        record: What the client remembers.
    """

    def __init__(self, places: ReservedPlaces, record: ClientRecord) -> None:
        self._places = places
        self._record = record
        self._lock = threading.Lock()
        self._ordered_bytes = 0  # of orders under way
        self._put_bytes = 0  # of puts under way
        self._asks_first = False
        self._paused_until_s = 0.0

    @contextmanager
    def counting(self, nbytes: int) -> Iterator[None]:
        """Count a put among those that keep disks busy, after it has taken its places."""
        with self._lock:
            self._put_bytes += nbytes
        try:
            yield
        finally:
            with self._lock:
                self._put_bytes -= nbytes

    def take(self, source: Source) -> list[ReservedPlace]:
        """Return places for the first blocks of a put, which nobody else writes into."""
        if self._asks_first or self._put_bytes >= BUSY_BYTES:
            return []
        count = self._count(source)
        if not count or len(set(source.keys)) < source.num_blocks:
            return []
        taken = self._places.take_many(0, int(source.lengths[0]), count)
        soon_s = time.monotonic() + LEFT_S_MIN
        if all(place.until_s > soon_s for place in taken):
            return taken
        self.give_up([place.batch for place in taken])
        return []

    def order(self, source: Source) -> list[int]:
        """Return numbers of places that are wanted for a put like this one; `keep` follows."""
        count = self._count(source)
        if not count or time.monotonic() < self._paused_until_s:
            return []
        space = int(source.lengths[0])
        with self._lock:
            wanted = AHEAD_BYTES - self._places.bytes_of(0, space)
            room = min(wanted, self._places.room_bytes) - self._ordered_bytes
            count = min(count, max(0, room // space))
            self._ordered_bytes += count * space
        return [self._record.next_batch() for _ in range(count)]

    def keep(self, request: m.Allocate, reply: m.Allocated | None, asked_s: float) -> None:
        """Keep what was ordered with a request.

        Args:
            request: With the order.
            reply: To it; None: there was none.
            asked_s: When it was asked, on the monotonic clock.
        """
        space, ahead = request.more_bytes, None if reply is None else reply.ahead
        with self._lock:
            self._ordered_bytes -= len(request.more) * space
        opened = []
        if ahead is not None:
            until_s, nodes = asked_s + ahead.put_s / 2, ahead.nodes
            rows = zip(ahead.node_idx, ahead.offsets, request.more, strict=False)
            opened = [
                ReservedPlace(nodes[idx], offset, space, number, until_s, NEVER)
                for idx, offset, number in rows
            ]
        self._places.meet(0, request.keys[0])
        self._places.give(0, opened)
        if len(opened) < len(request.more):
            self._paused_until_s = time.monotonic() + PAUSE_S
            self.give_up(request.more[len(opened) :])

    def give_up(self, numbers: list[int]) -> None:
        """Nothing is or will be written into these."""
        if numbers:
            self._places.abandon(0, *numbers)

    def give_back(self, places: list[ReservedPlace]) -> None:
        """Keep what was taken in vain."""
        self._places.give(0, places)

    def learn(self, outcomes: list[PutOutcome]) -> None:
        """Take note of what the master said of the keys of a put."""
        self._asks_first = outcomes.count(PutOutcome.GRANTED) < len(outcomes)

    @staticmethod
    def _count(source: Source) -> int:
        """Return for how many blocks of a put places may be had ahead."""
        options, length = source.options, int(source.lengths[0])
        unusual = options.chunk_bytes or options.media or options.prefer or options.replicas > 1
        if unusual or source.pieces.nbytes < PUT_BYTES_MIN or (source.lengths != length).any():
            return 0
        return min(source.num_blocks, AHEAD_MAX, AHEAD_BYTES // length)
