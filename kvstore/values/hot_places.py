"""Places of blocks that are asked for again and again: read without asking the master.

A lease says that the bytes stay in place, and the checksum that they are the right ones, so what
is read is what the key meant when it was looked up. The price: a block that somebody else removes
is still found here until the lease ends, and is not evicted before. Both are bounded, by `lease_s`
and by `HOT_BYTES_MAX`.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final

from kvstore.client.lease import Lease
from kvstore.client.place import Place

HOT_BLOCKS_MAX: Final = 1024
HOT_BYTES_MAX: Final = 64 << 20
SEEN_MAX: Final = 8192


class HotPlaces:
    """A block that is found twice within the time of a lease keeps its second one. Thread-safe.

    Args:
        drop: Releases a lease that is not needed any more.

    Attributes:
        removals: How often places were forgotten. Who had one before must not bring it back.
    """

    def __init__(self, drop: Callable[[Lease], None]) -> None:
        self._drop = drop
        self._lock = threading.Lock()
        self._places: OrderedDict[bytes, Place] = OrderedDict()
        self._nbytes = 0
        self._seen: OrderedDict[bytes, float] = OrderedDict()  # key -> end of its last lease
        self.removals = 0

    def find(self, key: bytes) -> Place | None:
        """Return the place of a block; its lease may be over."""
        return self._places.get(key)

    def take(self, key: bytes) -> Place | None:
        """Forget a place whose lease is the caller's from now on; return it."""
        with self._lock:
            place = self._places.pop(key, None)
            if place is not None:
                self._nbytes -= place.nbytes
            return place

    def offer(self, key: bytes, place: Place, *, removals: int | None = None) -> None:
        """Take the lease of a block that was read, to keep it or to drop it.

        Args:
            key: Its name.
            place: Where it lies.
            removals: When it was had, if that was a while ago.
        """
        with self._lock:
            again = self._seen.pop(key, 0.0) > time.monotonic()
            if removals is not None and removals != self.removals:
                again = False
            self._seen[key] = place.lease.deadline_s
            if len(self._seen) > SEEN_MAX:
                self._seen.popitem(last=False)
            over = [place.lease]
            if again:
                over = self._enter(key, place)
        for lease in over:
            self._drop(lease)

    def bring_back(self, key: bytes, place: Place, removals: int) -> None:
        """Undo `take`, unless places were forgotten since `removals` was read, or another came."""
        with self._lock:
            back = removals == self.removals and key not in self._places
            if back:
                self._places[key] = place
                self._nbytes += place.nbytes
        if not back:
            self._drop(place.lease)

    def forget(self, keys: Iterable[bytes], *, everything: bool = False) -> None:
        """Ask the master again for these."""
        with self._lock:
            self.removals += 1
            gone = [self._places.pop(k, None) for k in (list(self._places) if everything else keys)]
            found = [place for place in gone if place is not None]
            self._nbytes -= sum(place.nbytes for place in found)
        for place in found:
            self._drop(place.lease)

    def close(self) -> None:
        """Drop everything."""
        self.forget((), everything=True)

    def _enter(self, key: bytes, place: Place) -> list[Lease]:
        previous = self._places.pop(key, None)
        over = [] if previous is None else [previous]
        self._places[key] = place
        self._nbytes += place.nbytes
        count, nbytes = len(self._places), self._nbytes - sum(p.nbytes for p in over)
        while count > HOT_BLOCKS_MAX or nbytes > HOT_BYTES_MAX:
            _, oldest = self._places.popitem(last=False)
            over.append(oldest)
            count, nbytes = count - 1, nbytes - oldest.nbytes
        self._nbytes = nbytes
        return [gone.lease for gone in over]
