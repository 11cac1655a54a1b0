"""The user's handlers of notifies and of lost peers, called on the engine's thread."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Final

from transfer.errors import TransferTimeout
from transfer.event_loop import EventLoop
from transfer.statistics import Tally

logger = logging.getLogger(__name__)

BACKLOG_MAX: Final = 1 << 14

# What they return is of no meaning: a handler may tell its own callers whether it took a notify.
NotifyHandler = Callable[[str, bytes], object]
LostHandler = Callable[[str, str], object]


class Handlers:
    """Calls them. What one raises is logged, and ends nothing.

    Attributes:
        notify: get (peer, payload).
        lost: get (peer, evidence).
    """

    def __init__(self, loop: EventLoop, tally: Tally) -> None:
        self._loop = loop
        self._tally = tally
        self.notify: list[NotifyHandler] = []
        self.lost: list[LostHandler] = []

    def deliver(self, name: str, payload: bytes) -> None:
        """Give a notify to its handlers. On the engine's thread."""
        self._tally.count("notifies_received")
        for handler in self.notify:
            self._run(partial(handler, name, payload))

    def deliver_soon(self, name: str, payload: bytes) -> None:
        """Give a notify of our own to the handlers, on the engine's thread. Any thread.

        Raises:
            TransferTimeout: the handlers are thousands of calls behind.
        """
        self._loop.check()
        if self._loop.backlog > BACKLOG_MAX:
            raise TransferTimeout(name, "notify", backend="local")
        self._loop.call(lambda: self.deliver(name, payload))

    def tell_lost(self, name: str, evidence: str) -> None:
        """Tell of a lost peer. On the engine's thread."""
        for handler in self.lost:
            self._run(partial(handler, name, evidence))

    def _run(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception:
            # The user's bug must not end everybody's transfers; it is theirs to see in the log.
            logger.exception("a handler of transfer events raised")
