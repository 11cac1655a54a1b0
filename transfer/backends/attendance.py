"""Whose turn it is to receive what comes over a lane: a thread that waits, or the engine's.

    nobody leads   the engine's epoll waits for the lane (or for nothing, if a thread is about to)
    a thread does  it sleeps on the lane itself, and the epoll waits for nothing

For lanes in Python; the compiled one has the same in C.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from transfer.event_loop import READABLE, WRITABLE

# So many small ones may wait for a thread to wait for them.
UNATTENDED_MAX: Final = 4


class Attendance:
    """The half of a lane that knows who moves its bytes. Guarded by its rail's lock."""

    leader = 0
    urgent = False
    _interest = READABLE
    _change: Callable[[int], None] | None = None

    @property
    def in_flight(self) -> int:
        """Requests without an answer."""
        raise NotImplementedError

    @property
    def unsent(self) -> bool:
        """Whether something waits until the kernel takes it."""
        raise NotImplementedError

    def bind(self, epoll: int, change: Callable[[int], None], /) -> None:
        """The epoll waits for it to be readable; `change` makes it wait for something else."""
        self._interest, self._change = READABLE, change

    def unbind(self) -> None:
        """No epoll waits for it any more."""
        self._change = None

    def claim(self) -> bool:
        """Begin to lead; False if another thread does, or nothing is under way."""
        me = threading.get_ident()
        if self.leader not in (0, me) or not self.in_flight:
            return False
        self.leader = me
        self._watch(0)
        return True

    def leave(self, leader: int, /) -> bool:
        """End this lead; whether the engine's thread should see soon to what is under way."""
        if self.leader != leader:
            return False
        self.leader = 0
        if leader and not self.urgent:
            return self.in_flight > 0  # bulk: most likely the next one to wait will move it
        if self.in_flight:
            self.watch_all()
        return False

    def attend(self) -> None:
        """Have the engine's thread see to it, if nobody leads."""
        if not self.leader:
            self.watch_all()

    def gives_way(self) -> bool:
        """Never: a lane in Python is slow as it is."""
        return False

    def watch_all(self) -> None:
        """Have the engine's thread see to it."""
        self._watch(READABLE | (WRITABLE if self.unsent else 0))

    def attend_to_posted(self) -> bool:
        """Something was posted; returns whether the engine's thread should see to it soon."""
        if self.leader:
            # It sleeps, and looks after all that is to be received, but not for room to send.
            if self.unsent and self.leader != threading.get_ident():
                self._watch(WRITABLE)
            return False
        # Most likely somebody is about to wait for it, and to lead: the engine's thread would only
        # be woken in vain.
        if self.in_flight == 1:
            self._watch(0)
        return self.in_flight > UNATTENDED_MAX

    def _watch(self, interest: int) -> None:
        if self._change is not None and self._interest != interest:
            self._interest = interest
            self._change(interest)
