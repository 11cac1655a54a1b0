"""Keys to own memory that a peer's storage reads by itself, instead of from copies in buffers.

What is written to a file of a same-host peer need not be copied first: the owner's disk can take
it from where it lies, if that is memory which the peer can map. So the region is offered to the
peer, for reading alone, at the first such write, and until it is released or gone.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable

from transfer.memory.region import Access, OfferTable, Region, RegionKey, make_offer


class SourceKeys:
    """The keys of one engine. Thread-safe.

    Args:
        offers: where they are offered.
        tell_withdrawn: tells a peer of a void key: (token, peer).
    """

    def __init__(self, offers: OfferTable, tell_withdrawn: Callable[[bytes, str], None]) -> None:
        self._offers = offers
        self._tell_withdrawn = tell_withdrawn
        self._lock = threading.Lock()
        self._keys: dict[tuple[int, str], RegionKey] = {}
        # Of regions that are gone: where they are collected, no lock may be taken.
        self._gone: deque[tuple[int, str]] = deque()

    def get(self, region: Region, peer: str) -> RegionKey | None:
        """Return the key to all of a host region for a peer; None if no peer can map it."""
        if not region.shareable:
            return None
        place = id(region), peer
        self.drop_gone()
        with self._lock:
            key = self._keys.get(place)
            # `release` of the region withdraws it like all others.
            if key is not None and self._offers.find(key.token, to=peer) is not None:
                return key
            # Not the region itself: the offer would keep it, and its memory, alive for ever.
            twin = Region(region.tensor)
            if not twin.shareable:
                return None  # its memory was closed meanwhile
            offer = make_offer(twin, to=peer, access=Access.READ, offset=0, nbytes=None)
            offer.standing_for = weakref.ref(region)
            if key is None:
                weakref.finalize(region, self._gone.append, place).atexit = False
            self._keys[place] = key = self._offers.add(offer)
            return key

    def forget(self, peer: str) -> None:
        """Withdraw what a lost peer was offered."""
        with self._lock:
            for place in [place for place in self._keys if place[1] == peer]:
                self._offers.withdraw(self._keys.pop(place).token)

    def drop_gone(self) -> None:
        """Withdraw the keys of regions that are gone. At every tick too: they hold memory."""
        while self._gone:
            with self._lock:
                place = self._gone.popleft() if self._gone else (0, "")
                key = self._keys.pop(place, None)
            if key is not None and self._offers.withdraw(key.token) is not None:
                self._tell_withdrawn(key.token, place[1])
