"""Renews leases in the background as long as their hits are held open, and tells which were lost.

    hold ─▶ [ due = deadline - 2/3 lease ] ─▶ one thread: Renew(all that are due) ─▶ new deadlines
    drop ─▶ [ to be released ]             ─▶             Release(all of those)

The thread starts with the first hold and ends with the client. It sleeps until something is due:
what is held for less than a third of a lease wakes it at most that often.

Who reads bytes of the pool in place holds their lease too, and counts them. Where something that
was made of them outlives the one who asked, the lease is dropped when it is gone.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from kvstore.client.lease import Lease
from kvstore.errors import KVStoreError, StoreClosed, TooManyHolds, TooManyViews
from kvstore.wire.messages import Renewed

logger = logging.getLogger(__name__)

HELD_MAX: Final = 4096
RELEASED_MAX: Final = 1024  # beyond it leases run out by themselves
RELEASE_AFTER_S: Final = 0.01
RETRY_S: Final = 0.1
ASK_S_MIN: Final = 0.05
VIEW_BYTES_MAX: Final = 1 << 30


class _Seen(weakref.ref[object]):
    """What a lease is held for."""

    __slots__ = ("lease_id",)

    lease_id: int


class _Held:
    __slots__ = ("due_s", "lease", "nbytes", "seen", "until_s")

    def __init__(self, lease: Lease, due_s: float, until_s: float, nbytes: int) -> None:
        self.lease = lease
        self.due_s = due_s
        self.until_s = until_s
        self.nbytes = nbytes
        self.seen: _Seen | None = None


class LeaseKeeper:
    """Leases that are renewed, and leases that are to be released soon. Thread-safe.

    Args:
        renew: Asks the master, within so many seconds, on the keeper's thread. May raise
            KVStoreError.
        release: Likewise.
        on_lost: Called with how many leases were lost.
        view_bytes_max: Most bytes that are held in place at a time.
    """

    def __init__(
        self,
        renew: Callable[[Sequence[int], float], Renewed],
        release: Callable[[Sequence[int]], object],
        on_lost: Callable[[int], None],
        *,
        view_bytes_max: int = VIEW_BYTES_MAX,
    ) -> None:
        self._renew = renew
        self._release = release
        self._on_lost = on_lost
        self._changed = threading.Condition()
        self._held: dict[int, _Held] = {}
        self._view_bytes = 0
        self._view_bytes_max = view_bytes_max
        # What leases were held for, and is gone. Whoever lets go of the last reference, anywhere,
        # puts it here: that must not lock.
        self._unseen: deque[weakref.ref[object]] = deque()
        self._released: list[int] = []
        self._release_s = 0.0
        self._wakes_s = -math.inf  # when the thread looks again by itself
        self._closed = False
        self._thread: threading.Thread | None = None

    def keep(
        self, lease: Lease, *, max_s: float, nbytes: int = 0, seen: object | None = None
    ) -> None:
        """Renew a lease from now on, until `drop`, or for `max_s` at most.

        Args:
            lease: The caller's.
            max_s: See above.
            nbytes: Bytes that are read in place.
            seen: What they are read by, if so: when it is gone, the lease is dropped.

        Raises:
            TooManyHolds: `HELD_MAX` are held already.
            TooManyViews: They would be more bytes than one client may hold.
            StoreClosed: The client is closed.
        """
        now = time.monotonic()
        with self._changed:
            self._check_open()
            self._drop_unseen()
            if len(self._held) >= HELD_MAX:
                raise TooManyHolds(held=len(self._held))
            if nbytes > self._view_bytes_max - self._view_bytes:
                raise TooManyViews(
                    nbytes=nbytes, held_bytes=self._view_bytes, max_bytes=self._view_bytes_max
                )
            due_s = now + max(0.0, lease.deadline_s - now) / 3
            held = _Held(lease, due_s, now + max_s, nbytes)
            if seen is not None:
                held.seen = _Seen(seen, self._unseen.append)
                held.seen.lease_id = lease.lease_id
            self._forget(lease.lease_id)
            self._held[lease.lease_id] = held
            self._view_bytes += nbytes
            self._wake(due_s)

    def let(self, lease: Lease) -> None:
        """Renew it no more; it stays the caller's."""
        with self._changed:
            self._forget(lease.lease_id)

    def drop(self, lease: Lease) -> None:
        """Renew it no more, and release it soon."""
        with self._changed:
            self._drop(lease)

    def close(self) -> None:
        """Release what is to be released, renew nothing more, end the thread. Idempotent."""
        with self._changed:
            self._drop_unseen()
            self._closed = True
            self._released += [lease_id for lease_id in self._held if lease_id]
            for held in self._held.values():
                held.lease.lose()
            self._held.clear()
            self._view_bytes = 0
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed(what="StoreClient")

    def _forget(self, lease_id: int) -> None:
        held = self._held.pop(lease_id, None)
        if held is not None:
            self._view_bytes -= held.nbytes

    def _drop(self, lease: Lease) -> None:
        self._forget(lease.lease_id)
        if lease.lease_id == 0 or lease.lost or self._closed:
            return
        if not self._released:
            self._release_s = time.monotonic() + RELEASE_AFTER_S
        if len(self._released) < RELEASED_MAX:
            self._released.append(lease.lease_id)
        self._wake(self._release_s)

    def _drop_unseen(self) -> None:
        while self._unseen:
            seen = self._unseen.popleft()
            assert isinstance(seen, _Seen), seen
            held = self._held.get(seen.lease_id)
            if held is not None and held.seen is seen:  # else it is held no more, or for another
                self._drop(held.lease)

    def _wake(self, at_s: float) -> None:
        """Have the thread look at what is due then."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="store-leases", daemon=True)
            self._thread.start()
        if at_s < self._wakes_s:
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._wait()
                closed, now = self._closed, time.monotonic()
                due = [] if closed else [h for h in self._held.values() if h.due_s <= now]
                released: list[int] = []
                if self._released and (closed or self._release_s <= now):
                    released, self._released = self._released, []
            if due:
                self._renew_all(due, now)
            if released:
                self._release_all(released)
            if closed:
                return

    def _wait(self) -> None:
        """Wait for the next thing to do; `_changed` is held."""
        while not self._closed:
            self._drop_unseen()
            times = [held.due_s for held in self._held.values()]
            if self._released:
                times.append(self._release_s)
            now = time.monotonic()
            self._wakes_s = min(times, default=math.inf)
            if self._wakes_s > now:
                self._changed.wait(None if not times else self._wakes_s - now)
            self._wakes_s, wakes_s = -math.inf, self._wakes_s
            if wakes_s <= now:
                return

    def _renew_all(self, due: list[_Held], now: float) -> None:
        over = [held for held in due if held.until_s <= now]
        self._lose(over)
        due = [held for held in due if held.until_s > now]
        if not due:
            return
        try:
            # Not for longer than the first of them runs: then it is adrift, which must be known.
            left_s = min(held.lease.deadline_s for held in due) - now
            reply = self._renew([held.lease.lease_id for held in due], max(ASK_S_MIN, left_s))
        except KVStoreError as error:
            logger.debug("leases not renewed: %s", error)
            failed_s = time.monotonic()
            for held in due:
                held.lease.adrift = held.lease.deadline_s <= failed_s
                held.due_s = failed_s + RETRY_S
            return
        for held, running in zip(due, reply.running, strict=False):
            if running:
                held.lease.renew(now + reply.lease_s)
                held.due_s = now + reply.lease_s / 3
        running_on = dict(zip([id(held) for held in due], reply.running, strict=False))
        self._lose([held for held in due if not running_on.get(id(held), False)])

    def _lose(self, lost: list[_Held]) -> None:
        if not lost:
            return
        with self._changed:
            for held in lost:
                held.lease.lose()
                self._forget(held.lease.lease_id)
        self._on_lost(len(lost))

    def _release_all(self, lease_ids: list[int]) -> None:
        try:
            self._release(lease_ids)
        except KVStoreError as error:
            logger.debug("leases %s not released: %s", lease_ids, error)
