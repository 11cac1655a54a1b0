"""How a peer's offers are reached: asked of the owner at the first use, kept until withdrawn."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

# (remote key, address), one for each of the owner's devices.
Places = tuple[tuple[int, int], ...]


class KeyTable:
    """What one peer has told us about its offers. Thread-safe.

    Args:
        ask: sends the question for a token to the owner.
    """

    def __init__(self, ask: Callable[[bytes], None]) -> None:
        self._ask = ask
        self._places: dict[bytes, Places] = {}
        self._asked: set[bytes] = set()
        self._lock = threading.Lock()
        self._answered = threading.Condition(self._lock)

    def find(self, token: bytes) -> Places | None:
        """Return what is known."""
        return self._places.get(token)

    def ask(self, token: bytes) -> None:
        """Ask, unless that is under way."""
        with self._lock:
            if token in self._asked:
                return
            self._asked.add(token)
        self._ask(token)

    def told(self, token: bytes, places: Places | None) -> bool:
        """Take an answer; False if nobody has asked."""
        with self._lock:
            if token not in self._asked:
                return False
            self._asked.discard(token)
            if places is not None:
                self._places[token] = places
            self._answered.notify_all()
            return True

    def learn(self, token: bytes, deadline: float) -> bool:
        """Ask, and wait for the answer; whether the owner has told how to reach the offer."""
        if token not in self._places:
            self.ask(token)
            with self._lock:
                while token in self._asked and (left := deadline - time.monotonic()) > 0:
                    self._answered.wait(left)
        return token in self._places

    def drop(self, token: bytes) -> None:
        """Forget a key that is void."""
        with self._lock:
            self._places.pop(token, None)
