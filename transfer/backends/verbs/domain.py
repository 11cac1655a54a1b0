"""What is registered with one device for one peer: a protection domain and all that is in it.

The card gives access to a region only through queue pairs of the region's own domain. With a
domain for each peer, a key that was offered to one is useless to all others, whatever they know.

Relaxed ordering lets the card's writes to memory overtake one another, which is faster on some
machines, and harmless where the bytes are looked at only after a completion of the very queue
pair that moved them. So it is asked for memory that we send from or read into, and for offers
that are only read. Never for offers that are written: their arrival may be told by an immediate
on another queue pair, or by another card.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from pyverbs.mr import MR
from pyverbs.pd import PD

from transfer.backends.verbs.binding import PyverbsError, PyverbsRDMAError, constant, error_text
from transfer.backends.verbs.device import Device
from transfer.backends.verbs.device_memory import device_address, register_device_memory
from transfer.memory.region import Access, Offer, Region

logger = logging.getLogger(__name__)

LOCAL_WRITE: Final = constant("ACCESS_LOCAL_WRITE")
REMOTE_WRITE: Final = constant("ACCESS_REMOTE_WRITE")
REMOTE_READ: Final = constant("ACCESS_REMOTE_READ")
RELAXED_ORDERING: Final = constant("ACCESS_RELAXED_ORDERING")


# What an empty window stands for: there is nothing to register, but its key must name something.
_nothing: Final = ctypes.create_string_buffer(8)


@dataclass(frozen=True, slots=True)
class Registered:
    """Memory that is registered.

    Attributes:
        memory: the verbs object.
        start: the address by which the card knows its first byte.
    """

    memory: Any
    start: int


class PeerDomain:
    """The protection domain of one peer on one device. Thread-safe.

    Attributes:
        domain: the verbs object.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.domain = PD(device.context)
        self._lock = threading.RLock()
        self._regions: dict[int, tuple[weakref.ref[Region], Registered]] = {}
        self._offers: dict[bytes, Registered] = {}
        # Of regions that are gone: a finalizer may run anywhere, so it closes nothing itself.
        self._left: deque[int] = deque()
        self._is_open = True

    def local(self, region: Region) -> tuple[int, int]:
        """Return key and address by which our queue pairs use a region, registered at first use.

        Registering pins the memory, a fraction of a second for each GiB, during which no Python
        runs: use a region once before it matters.

        Raises:
            PyverbsError: it cannot be registered (locked memory is limited: `ulimit -l`).
        """
        with self._lock:
            self._close_left()
            found = self._regions.get(id(region))
            if found is None:
                found = self._add(region)
            return int(found[1].memory.lkey), found[1].start

    def release(self, region: Region) -> None:
        """Deregister a region, if it was registered."""
        with self._lock:
            found = self._regions.pop(id(region), None)
            if found is not None:
                found[1].memory.close()

    def remote(self, token: bytes, offer: Offer) -> tuple[int, int]:
        """Return key and address by which the peer uses an offer, registered at first use.

        Raises:
            PyverbsError: it cannot be registered.
        """
        with self._lock:
            found = self._offers.get(token)
            if found is None:
                writable, readable = Access.WRITE in offer.access, Access.READ in offer.access
                rights = LOCAL_WRITE | REMOTE_WRITE if writable else RELAXED_ORDERING
                rights |= REMOTE_READ if readable else 0
                found = self._register(offer.region, offer.offset, offer.nbytes, rights)
                self._offers[token] = found
            return int(found.memory.rkey), found.start

    def withdraw(self, token: bytes) -> None:
        """Make an offer's key void: after the return nothing is accessed through it."""
        with self._lock:
            found = self._offers.pop(token, None)
            if found is not None:
                found.memory.close()

    def close(self) -> None:
        """Deregister everything; the queue pairs of the domain must be gone. Idempotent."""
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            registered = [*self._offers.values(), *(found for _, found in self._regions.values())]
            self._offers.clear()
            self._regions.clear()
            try:
                for found in registered:
                    found.memory.close()
                self.domain.close()
            except PyverbsError as error:
                logger.warning("a protection domain stays behind: %s", error_text(error))

    @property
    def num_registered(self) -> int:
        """Memory regions of the domain."""
        return len(self._offers) + len(self._regions)

    def _add(self, region: Region) -> tuple[weakref.ref[Region], Registered]:
        rights = LOCAL_WRITE | RELAXED_ORDERING if region.writable else RELAXED_ORDERING
        found = self._register(region, 0, region.nbytes, rights)
        entry = weakref.ref(region, self._forgetter(id(region))), found
        self._regions[id(region)] = entry
        return entry

    def _register(self, region: Region, offset: int, nbytes: int, rights: int) -> Registered:
        if not self._is_open:
            raise PyverbsRDMAError("the peer is gone")
        address = device_address(region)
        if address is not None:
            place = register_device_memory(self.domain, address + offset, nbytes, rights)
            return Registered(*place)
        start = region.start + offset if nbytes else ctypes.addressof(_nothing)
        return Registered(MR(self.domain, nbytes or 1, rights, address=start), start)

    def _forgetter(self, key: int) -> Callable[[object], None]:
        left = self._left

        def forget(_: object) -> None:
            left.append(key)

        return forget

    def _close_left(self) -> None:
        while self._left:
            key = self._left.popleft()
            found = self._regions.get(key)
            if found is not None and found[0]() is None:
                del self._regions[key]
                found[1].memory.close()
