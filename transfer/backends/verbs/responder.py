"""The owner's end of a peer's rails: queue pairs that serve, and immediates that are counted.

The card writes and reads without us. Only an immediate takes a receive, from a queue that all of
the peer's queue pairs on one device share. It is refilled in batches, independently of anybody
who waits; a sender that is faster than we are is told "not ready" by the card, and tries again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Final

from pyverbs.mr import MR
from pyverbs.srq import SRQ, SrqAttr, SrqInitAttr
from pyverbs.wr import SGE, RecvWR

from transfer.backends.verbs.binding import PyverbsError
from transfer.backends.verbs.completion import SUCCESS, CompletionQueue, immediate_of
from transfer.backends.verbs.domain import LOCAL_WRITE, PeerDomain
from transfer.backends.verbs.messages import LANES, End
from transfer.backends.verbs.queue_pair import QueuePair, make_end
from transfer.event_loop import READABLE, EventLoop

RECEIVES: Final = 512
BATCH: Final = 64
# A rail may have so many immediates under way; several share the receives.
CREDITS: Final = 128
# Completions of receives, and of what goes wrong with queue pairs.
COMPLETIONS: Final = 2 * RECEIVES
RECEIVE_BYTES: Final = 64


class ServedRail:
    """The owner's end of one life of a rail.

    Attributes:
        arrived: how many immediates have come over each queue pair.
    """

    def __init__(self, number: int, inbox: Inbox) -> None:
        self.number = number
        self.inbox = inbox
        self.pairs: list[QueuePair] = []
        self.arrived = [0] * LANES

    def open(self, end: End) -> End:
        """Make the queue pairs, ready to serve the peer's.

        Raises:
            PyverbsError: the device makes none, or does not reach the peer's.
        """
        try:
            for i in range(LANES):
                pair = self.inbox.make_pair()
                self.pairs.append(pair)
                self.inbox.served[pair.number] = self, i
                pair.connect(end, i)
        except PyverbsError:
            self.close()
            raise
        return make_end(self.inbox.device, self.pairs)

    def settle(self) -> tuple[int, ...]:
        """End the queue pairs; return what had arrived. Nothing lands over them any more."""
        for pair in self.pairs:
            pair.fail()
        self.inbox.drain()
        self.close()
        return tuple(self.arrived)

    def close(self) -> None:
        """Destroy the queue pairs; idempotent."""
        for pair in self.pairs:
            self.inbox.served.pop(pair.number, None)
            pair.close()
        self.pairs.clear()


class Inbox:
    """The shared receives of one peer on one device. On the engine's thread.

    Args:
        count: takes immediates that have arrived.

    Attributes:
        served: by the number of our queue pair, the rail and which of its lanes it is.
    """

    def __init__(
        self, domain: PeerDomain, loop: EventLoop, count: Callable[[list[int]], None]
    ) -> None:
        self.device = domain.device
        self.served: dict[int, tuple[ServedRail, int]] = {}
        self._domain = domain
        self._loop = loop
        self._count = count
        self._completions = CompletionQueue(self.device, COMPLETIONS)
        attributes = SrqInitAttr(SrqAttr(max_wr=RECEIVES, max_sge=1))
        self._receives = SRQ(domain.domain, attributes)
        # Older releases want memory with each receive; an immediate leaves it untouched.
        self._buffer = ctypes.create_string_buffer(RECEIVE_BYTES)
        start = ctypes.addressof(self._buffer)
        self._memory = MR(domain.domain, RECEIVE_BYTES, LOCAL_WRITE, address=start)
        element = SGE(start, RECEIVE_BYTES, self._memory.lkey)
        # One chain, posted again and again; the list keeps what the chain only points to.
        self._batch = [RecvWR(num_sge=1, sg=[element]) for _ in range(BATCH)]
        for request, following in zip(self._batch, self._batch[1:], strict=False):
            request.next_wr = following
        self._num_used = RECEIVES
        self._refill()
        loop.watch(self._completions, lambda _: self._on_event(), READABLE)
        self._completions.arm()

    def make_pair(self) -> QueuePair:
        """Make a queue pair that serves."""
        return QueuePair(
            self.device, self._domain.domain, self._completions,
            send_requests=1, pieces=1, receives=self._receives,
        )  # fmt: skip

    def drain(self) -> None:
        """Count all immediates that are there."""
        while completions := self._completions.poll():
            immediates = []
            for completion in completions:
                found = self.served.get(int(completion.qp_num))
                immediate = immediate_of(completion)
                if found is not None and immediate is not None and completion.status == SUCCESS:
                    rail, lane = found
                    rail.arrived[lane] += 1
                    immediates.append(immediate)
            self._num_used += len(completions)
            self._refill()
            if immediates:
                self._count(immediates)

    def close(self) -> None:
        """Destroy the receives; the queue pairs must be gone."""
        self._loop.unwatch(self._completions)
        self._receives.close()
        self._memory.close()
        self._completions.close()

    def abandon(self) -> None:
        """Close the descriptors only."""
        self._completions.abandon()

    def _on_event(self) -> None:
        self._completions.take_events()
        self._completions.arm()
        self.drain()

    def _refill(self) -> None:
        while self._num_used >= BATCH:
            self._receives.post_recv(self._batch[0])
            self._num_used -= BATCH
