"""Renews leases in the background as long as their hits are held open, and tells which were lost.

    hold ─▶ [ due = deadline - 2/3 lease ] ─▶ one thread: Renew(all that are due) ─▶ new deadlines
    drop ─▶ [ to be released ]             ─▶             Release(all of those)

The thread starts with the first hold and ends with the client. It sleeps until something is due.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from kvstore.client.lease import Lease
from kvstore.errors import KVStoreError, StoreClosed, TooManyHolds
from kvstore.wire.messages import Renewed

logger = logging.getLogger(__name__)

HELD_MAX: Final = 4096
RELEASED_MAX: Final = 1024  # beyond it leases run out by themselves
RELEASE_AFTER_S: Final = 0.01
RETRY_S: Final = 0.1
ASK_S_MIN: Final = 0.05


class _Held:
    __slots__ = ("due_s", "lease", "until_s")

    def __init__(self, lease: Lease, due_s: float, until_s: float) -> None:
        self.lease = lease
        self.due_s = due_s
        self.until_s = until_s


class LeaseKeeper:
    """Leases that are renewed, and leases that are to be released soon. Thread-safe.

    Args:
        renew: Asks the master, within so many seconds, on the keeper's thread. May raise
            KVStoreError.
        release: Likewise.
        on_lost: Called with how many leases were lost.
    """

    def __init__(
        self,
        renew: Callable[[Sequence[int], float], Renewed],
        release: Callable[[Sequence[int]], object],
        on_lost: Callable[[int], None],
    ) -> None:
        self._renew = renew
        self._release = release
        self._on_lost = on_lost
        self._changed = threading.Condition()
        self._held: dict[int, _Held] = {}
        self._released: list[int] = []
        self._release_s = 0.0
        self._closed = False
        self._thread: threading.Thread | None = None

    def keep(self, lease: Lease, *, max_s: float) -> None:
        """Renew a lease from now on, until `drop`, or for `max_s` at most.

        Raises:
            TooManyHolds: `HELD_MAX` are held already.
            StoreClosed: The client is closed.
        """
        now = time.monotonic()
        with self._changed:
            self._check_open()
            if len(self._held) >= HELD_MAX:
                raise TooManyHolds(held=len(self._held))
            due_s = now + max(0.0, lease.deadline_s - now) / 3
            self._held[lease.lease_id] = _Held(lease, due_s, now + max_s)
            self._wake()

    def drop(self, lease: Lease) -> None:
        """Renew it no more, and release it soon."""
        with self._changed:
            self._held.pop(lease.lease_id, None)
            if lease.lease_id == 0 or lease.lost or self._closed:
                return
            if not self._released:
                self._release_s = time.monotonic() + RELEASE_AFTER_S
            if len(self._released) < RELEASED_MAX:
                self._released.append(lease.lease_id)
            self._wake()

    def close(self) -> None:
        """Release what is to be released, renew nothing more, end the thread. Idempotent."""
        with self._changed:
            self._closed = True
            self._released += [lease_id for lease_id in self._held if lease_id]
            self._held.clear()
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed(what="StoreClient")

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="store-leases", daemon=True)
            self._thread.start()
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
            times = [held.due_s for held in self._held.values()]
            if self._released:
                times.append(self._release_s)
            pause_s = min(times) - time.monotonic() if times else None
            if pause_s is not None and pause_s <= 0:
                return
            self._changed.wait(pause_s)

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
                self._held.pop(held.lease.lease_id, None)
        self._on_lost(len(lost))

    def _release_all(self, lease_ids: list[int]) -> None:
        try:
            self._release(lease_ids)
        except KVStoreError as error:
            logger.debug("leases %s not released: %s", lease_ids, error)
