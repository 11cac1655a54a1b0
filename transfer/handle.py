"""The handle of one write or read."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Generator
from typing import Final, Protocol

from transfer.arguments import check_timeout
from transfer.errors import EngineClosed, TransferError, TransferTimeout
from transfer.forked import REASON

# A deadline is enforced by the engine's thread; whoever waits gives it this long to do so.
GRACE_S: Final = 1.0
# So long a waiting thread drives a link before it looks whether its transfer has moved away.
DRIVE_S: Final = 0.02


class Progress(Protocol):
    """What a waiting thread can drive: a `RailLink`."""

    def progress(self, handle: Transfer, timeout_s: float) -> bool:
        """Move bytes until something ended; False at once if threads can't help now."""

    def leave(self) -> None:
        """Let the engine's thread do so again, if the caller has done it."""

    def attend(self) -> None:
        """Let the engine's thread do so, because nobody waits."""


class Transfer:
    """One write or read that was handed to the engine. Thread-safe, awaitable.

    Attributes:
        peer: the other side.
        operation: "write", "read" or "map".
        backend: "shared_memory", "tcp" or "local".
        nbytes: bytes to move.
        bytes_moved: bytes known to be in place.
        attempts: how often the most unlucky slice was sent.
        rail: the `RailName` that was used last, None where none is.
        link: what a thread that waits may drive, if one link alone carries it.
    """

    # What most transfers leave as it is: making one sets only what differs.
    peer: str
    operation: str
    nbytes: int
    deadline: float
    started: float
    backend = "tcp"
    bytes_moved = 0
    attempts = 1
    rail: object = None
    link: Progress | None = None
    _error: TransferError | None = None
    _finished = False
    # Made by the first who has to wait: most transfers have ended when they are returned.
    _event: threading.Event | None = None
    _callbacks: tuple[Callable[[], object], ...] = ()
    _lock: threading.Lock

    def __init__(
        self, *, peer: str, operation: str, backend: str, nbytes: int, deadline: float
    ) -> None:
        self.peer = peer
        self.operation = operation
        self.backend = backend
        self.nbytes = nbytes
        self.deadline = deadline
        self.started = time.monotonic()
        self._lock = threading.Lock()

    @classmethod
    def of_copy(cls, peer: str, operation: str, nbytes: int) -> Transfer:
        """Return one that has ended well: a copy between mapped memories. For the engine."""
        transfer = cls.__new__(cls)
        transfer.peer = peer
        transfer.operation = operation
        transfer.backend = "shared_memory"
        transfer.nbytes = transfer.bytes_moved = nbytes
        transfer.deadline = transfer.started = time.monotonic()
        transfer._finished = True
        return transfer

    @property
    def elapsed_s(self) -> float:
        """Seconds since the engine took it."""
        return time.monotonic() - self.started

    @property
    def rail_name(self) -> str:
        """The rail that was used last, in words; "" where none is."""
        return "" if self.rail is None else str(self.rail)

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        if not self._finished and self.link is not None:
            self.link.attend()
        return self._finished

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until it has ended; by default until the operation's own deadline.

        Raises:
            TransferTimeout: not ended in time. If `timeout_s` was shorter than the operation's
                deadline, the operation goes on.
            PeerLost, AccessRefused, TransferTimeout: how it ended.
            TypeError, ValueError: `timeout_s` is no time.
        """
        if timeout_s is not None:
            check_timeout(timeout_s)
        if not self._finished:
            if timeout_s is None:
                timeout_s = max(self.deadline - time.monotonic(), 0.0) + GRACE_S
            self._wait(time.monotonic() + timeout_s)
        if self._error is not None:
            raise self._error

    def _wait(self, end: float) -> None:
        led: Progress | None = None
        try:
            while not self._finished:
                remaining = end - time.monotonic()
                if remaining <= 0:
                    raise self.timed_out()
                if led is not None and led is not self.link:
                    led.leave()
                led = self.link
                if led is None or not led.progress(self, min(remaining, DRIVE_S)):
                    if led is not None:
                        led.leave()
                    self._sleep(remaining)
        finally:
            if led is not None:
                led.leave()

    def _sleep(self, timeout_s: float) -> None:
        with self._lock:
            self._event = self._event or threading.Event()
        # `finish` sets the event under the lock that we have just held.
        if not self._finished:
            self._event.wait(timeout_s)

    def __await__(self) -> Generator[object, None, None]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def resolve() -> None:
            if not future.done():
                future.set_result(None)

        self.when_done(lambda: loop.call_soon_threadsafe(resolve))
        yield from future
        self.wait(0.0)

    def when_done(self, callback: Callable[[], object]) -> None:
        """Call `callback` once it has ended: at once if it has, else on the engine's thread."""
        if not self._finished:
            with self._lock:
                if not self._finished:
                    self._callbacks += (callback,)
                    if self.link is not None:
                        self.link.attend()
                    return
        callback()

    def finish(self, error: TransferError | None = None) -> bool:
        """End it; False if it had ended before. For the engine."""
        with self._lock:
            if self._finished:
                return False
            self._error = error
            self._finished = True
            if self._event is not None:
                self._event.set()
            callbacks, self._callbacks = self._callbacks, ()
        for callback in callbacks:
            callback()
        return True

    def abandon(self) -> None:
        """End it in a forked child, without the lock that another thread may have held."""
        if not self._finished:
            self._lock = threading.Lock()
            self._error = EngineClosed(REASON)
            self._finished = True

    def timed_out(self) -> TransferTimeout:
        """Describe it as not finished in time. For the engine."""
        return TransferTimeout(
            self.peer,
            self.operation,
            backend=self.backend,
            attempts=self.attempts,
            bytes_moved=self.bytes_moved,
            elapsed_s=self.elapsed_s,
            rail=self.rail_name,
        )
