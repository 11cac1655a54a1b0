"""The engine's one background thread: an epoll loop with a few handlers and a tick.

Where nothing has happened for a while, and nothing is under way, the tick slows down: a process
that has nothing to do should cost nothing. Whatever begins calls `stir`, and the next tick comes
as soon as it would have come.

Handlers must be short and never block. A handler that raises ends the thread: that is a bug in
this package, and the next call of the engine raises `EngineClosed` with the cause.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, Protocol, TypeVar

from transfer.alarm import Alarm
from transfer.errors import EngineClosed

logger = logging.getLogger(__name__)

TICK_S: Final = 0.02
CALM_TICK_S: Final = 0.2
# So long nothing has to happen before the tick slows down.
CALM_S: Final = 0.5
# How long something is left to whoever is about to do it (`call_soon`).
SOON_S: Final = 0.004
JOIN_S: Final = 5.0
READABLE: Final = select.EPOLLIN
WRITABLE: Final = select.EPOLLOUT

T = TypeVar("T")


class HasFileno(Protocol):
    """A socket, or what owns one."""

    def fileno(self) -> int:
        """The descriptor; -1 once closed."""


class EventLoop:
    """Runs handlers on its own thread. `call`, `ask` and `change` may be called from any thread.

    Args:
        on_tick: called at every tick; says whether anything is under way.
        on_calm: called with `stir` when the tick has slowed down.

    Attributes:
        failure: what ended the thread, None while it is well.
        calm: whether the tick has slowed down, and `stir` has something to do.
    """

    def __init__(
        self,
        name: str,
        *,
        on_tick: Callable[[float], bool],
        on_calm: Callable[[Callable[[], None]], None] = lambda stir: None,
    ) -> None:
        self.name = name
        self._on_tick = on_tick
        self._on_calm = on_calm
        self.calm = False
        self._slow = False
        self._calm_since = 0.0
        self._calm_fds: list[int] = []
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._later: deque[Callable[[], None]] = deque()
        self._thread = threading.Thread(target=self._run, name=f"transfer-{name}", daemon=True)
        self._stopping = False
        self.failure: BaseException | None = None

    def start(self) -> None:
        """Start the thread."""
        self._epoll = select.epoll()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._alarm = Alarm()
        self._epoll.register(self._alarm.fileno(), READABLE)
        self._epoll.register(self._wakeup, READABLE)
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the calls that are queued, and free the descriptors."""
        self._stopping = True
        self._wake()
        self._thread.join(JOIN_S)
        if self._thread.is_alive():
            logger.error("the transfer thread did not end within %s s", JOIN_S)
            return
        while self._calls:  # left over where a failure has ended the thread
            self._calls.popleft()()
        self.abandon()

    def abandon(self) -> None:
        """Close the descriptors without a word: the end of `stop`, and the way out after a fork."""
        self._epoll.close()
        os.close(self._wakeup)
        self._alarm.close()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on this loop's thread."""
        return threading.current_thread() is self._thread

    def check(self) -> None:
        """Raise `EngineClosed` if the thread is not running."""
        if self.failure is not None:
            raise EngineClosed("the transfer thread failed") from self.failure
        if self._stopping or not self._thread.is_alive():
            raise EngineClosed("the transfer engine is not open")

    def fail(self, error: BaseException) -> None:
        """End the thread, because a part of the engine has failed. Any thread."""

        def end() -> None:
            raise error

        self.call(end)

    @property
    def backlog(self) -> int:
        """How many calls wait for the thread."""
        return len(self._calls)

    def call(self, function: Callable[[], None]) -> None:
        """Run `function` soon on the thread."""
        self._calls.append(function)
        self._wake()

    def call_soon(self, function: Callable[[], None]) -> None:
        """Run `function` on the thread within milliseconds, without waking it now.

        For what somebody else will most likely have done by then.
        """
        self._later.append(function)
        # The first sets the alarm: later ones must not put it off. The thread empties the queue,
        # so whoever comes when it has looked for the last time is a first one again.
        if len(self._later) == 1:
            self._alarm.set(SOON_S)

    def stir(self) -> None:
        """Something begins, which the thread may not have heard of. Any thread."""
        if self.calm:
            self.calm = False
            self.call_soon(lambda: None)

    def ask(self, function: Callable[[], T], timeout_s: float = JOIN_S) -> T:
        """Run `function` on the thread and return its result; runs at once on the thread itself.

        Raises:
            EngineClosed: the thread is gone.
            TimeoutError: no answer in time.
        """
        if self.is_current:
            return function()
        self.check()
        future: Future[T] = Future()

        def answer() -> None:
            try:
                result = function()
            except BaseException as error:
                future.set_exception(error)
                if not isinstance(error, Exception):
                    raise
            else:
                future.set_result(result)

        self.call(answer)
        return future.result(timeout_s)

    def watch(self, sock: HasFileno, handler: Callable[[int], None], events: int) -> None:
        """Call `handler(events)` whenever the socket is ready. Level-triggered."""
        self._handlers[sock.fileno()] = handler
        self._epoll.register(sock.fileno(), events)

    def watch_when_calm(self, source: HasFileno, handler: Callable[[int], None]) -> None:
        """As `watch`, for what is looked at at every tick anyway: only while that is slow."""
        self._calm_fds.append(source.fileno())
        self.watch(source, handler, READABLE if self._slow else 0)

    def change(self, sock: HasFileno, events: int) -> None:
        """Wait for other events. A socket that is not watched (any more) is ignored."""
        if sock.fileno() in self._handlers:
            self._epoll.modify(sock.fileno(), events)

    def unwatch(self, sock: HasFileno) -> None:
        """Forget a socket. Call it before the socket is closed; idempotent."""
        if self._handlers.pop(sock.fileno(), None) is not None:
            self._epoll.unregister(sock.fileno())

    def fileno(self) -> int:
        """The epoll, for lanes that change what it waits for themselves."""
        return self._epoll.fileno()

    def _wake(self) -> None:
        os.eventfd_write(self._wakeup, 1)

    def _run(self) -> None:
        try:
            now = self._calm_since = time.monotonic()
            next_tick = now + TICK_S
            while not self._stopping or self._calls:
                happened = self._turn(max(next_tick - time.monotonic(), 0.0))
                now = time.monotonic()
                if happened:
                    self._calm_since = now
                    self._become_fast()
                    next_tick = min(next_tick, now + TICK_S)
                if now >= next_tick:
                    next_tick = now + self._tick(now)
        except BaseException as error:
            self.failure = error
            logger.exception("the transfer thread failed")
            raise

    def _tick(self, now: float) -> float:
        """Return the seconds until the next one."""
        if self._on_tick(now):
            self._calm_since = now
            self._become_fast()
        elif not self._slow and now - self._calm_since >= CALM_S:
            self._slow = self.calm = True
            for fd in self._calm_fds:
                self._epoll.modify(fd, READABLE)
            self._on_calm(self.stir)
            # What began before `calm` was set has not stirred it.
            if self._on_tick(now):
                self._calm_since = now
                self._become_fast()
        return CALM_TICK_S if self._slow else TICK_S

    def _become_fast(self) -> None:
        if self._slow:
            self._slow = self.calm = False
            for fd in self._calm_fds:
                self._epoll.modify(fd, 0)

    def _turn(self, timeout_s: float) -> bool:
        """Sleep, then handle what has come; returns whether anything has."""
        ready = self._epoll.poll(timeout_s)
        for fd, events in ready:
            if fd == self._wakeup:
                os.eventfd_read(self._wakeup)
            elif fd == self._alarm.fileno():
                self._alarm.clear()
                while self._later:
                    self._later.popleft()()
            elif (handler := self._handlers.get(fd)) is not None:
                handler(events)
        # Only what is queued now: calls that queue calls must not starve the sockets.
        num_calls = len(self._calls)
        for _ in range(num_calls):
            self._calls.popleft()()
        return bool(ready) or num_calls > 0
