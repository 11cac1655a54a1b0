"""Completion queues with a descriptor that tells when to look."""

from __future__ import annotations

import os
import select
from typing import Any, Final

from pyverbs.cq import CQ, CompChannel

from transfer.backends.verbs.binding import PyverbsRDMAError, constant, give_up, opening
from transfer.backends.verbs.device import Device, opening_lock

POLLED_AT_ONCE: Final = 64
WITH_IMMEDIATE: Final = constant("WC_WITH_IMM")
SUCCESS: Final = constant("WC_SUCCESS")
REFUSED: Final = constant("WC_REM_ACCESS_ERR")


class CompletionQueue:
    """A completion queue. Whoever polls, arms or closes it does so one at a time.

    pyverbs makes an object for each completion it polls (its object-free way, `CQEX`, has no
    events), so requests ask for few completions: one for each chain of requests.

    Attributes:
        queue: the verbs object.
        fd: readable when an armed queue has got a completion.
    """

    def __init__(self, device: Device, capacity: int) -> None:
        with opening_lock:
            self._channel, descriptors = opening(lambda: CompChannel(device.context))
        (self.fd,) = descriptors
        os.set_blocking(self.fd, False)
        self.queue = CQ(device.context, capacity, None, self._channel, 0)
        self.is_open = True

    def fileno(self) -> int:
        """Return the descriptor."""
        return self.fd

    def poll(self) -> list[Any]:
        """Take some completions; [] if there are none."""
        if not self.is_open:
            return []
        found: list[Any] = self.queue.poll(POLLED_AT_ONCE)[1]
        return found

    def arm(self) -> None:
        """Make the descriptor readable at the next completion. Poll once more after it."""
        if self.is_open:
            self.queue.req_notify()

    def take_events(self) -> None:
        """Make the descriptor unreadable; never waits."""
        if not self.is_open:
            return
        try:
            while True:
                self._channel.get_cq_event(self.queue)
                self.queue.ack_events(1)
        except PyverbsRDMAError:
            return  # nothing (any more): the descriptor does not block

    def wait(self, wakeup: int, timeout_s: float) -> None:
        """Sleep until it, or the descriptor `wakeup`, is readable."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        poll.register(wakeup, select.POLLIN)
        poll.poll(max(timeout_s, 0.0) * 1000)

    def close(self) -> None:
        """Destroy it; the queue pairs that use it must be gone. Idempotent."""
        if self.is_open:
            self.is_open = False
            self.queue.close()
            with opening_lock:
                self._channel.close()

    def abandon(self) -> None:
        """Give up the descriptor: in a forked child."""
        give_up(self.fd)


def immediate_of(completion: Any) -> int | None:
    """Return the immediate that came with a completion: the wire's order of bytes, undone."""
    if not completion.wc_flags & WITH_IMMEDIATE:
        return None
    return int.from_bytes(int(completion.imm_data).to_bytes(4, "little"), "big")
