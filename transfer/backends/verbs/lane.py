"""One queue pair's share of a rail: slices become chains of requests, completions end them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from transfer.backends.verbs.chain import (
    INLINE,
    REQUESTS_MAX,
    SIGNALLED,
    WRITE,
    WRITE_WITH_IMMEDIATE,
    Chain,
)
from transfer.backends.verbs.queue_pair import QueuePair
from transfer.backends.verbs.work import Work
from transfer.rails.slices import Slice


@dataclass(frozen=True, slots=True)
class _Posted:
    work: Work
    num_requests: int
    is_last: bool


class SendLane:
    """What is posted to one queue pair, in order. Not thread-safe.

    Only the last request of each chain asks for a completion: a reliable connection completes in
    order, so it speaks for all before it.

    Args:
        depth: requests that may be under way.
        elements_max: scatter-gather elements of a request.
    """

    def __init__(self, pair: QueuePair, *, depth: int, elements_max: int) -> None:
        self.pair = pair
        self.credits = 0
        self._chain = Chain(elements_max)
        self._free = depth
        self._next_chain = 0
        self._chains: deque[tuple[int, _Posted]] = deque()
        self._works: deque[Work] = deque()
        self._waiting: deque[Work] = deque()
        self._immediates_posted = 0
        self._immediates_done = 0
        self._is_open = True

    def __len__(self) -> int:
        return len(self._works)

    def add(self, work: Work) -> None:
        """Take a slice, and post what the queue has room for.

        Raises:
            PyverbsRDMAError: the pair does not take it: it has failed.
        """
        self._works.append(work)
        self._waiting.append(work)
        self._pump()

    def complete(self, chain: int) -> list[Work]:
        """A chain has ended well, and all before it; returns the slices that are done.

        Raises:
            PyverbsRDMAError: as `add`, for what had to wait.
        """
        finished = []
        while self._chains and self._chains[0][0] <= chain:
            _, posted = self._chains.popleft()
            self._free += posted.num_requests
            if posted.is_last:
                self._immediates_done += posted.work.immediate is not None
                self._works.remove(posted.work)
                finished.append(posted.work)
        self._pump()
        return finished

    def find(self, chain: int) -> Work | None:
        """Return the slice that a chain belongs to."""
        return next((posted.work for number, posted in self._chains if number == chain), None)

    def drop(self, part: Slice) -> bool:
        """Forget a slice of which nothing was posted; False if it is under way."""
        for work in self._waiting:
            if work.part is part and not work.num_posted:
                self._waiting.remove(work)
                self._works.remove(work)
                return True
        return all(work.part is not part for work in self._works)

    def stop(self) -> None:
        """Let the pair end what it has, and post nothing any more."""
        self._is_open = False
        self.pair.fail()

    def close(self) -> None:
        """Destroy the pair: no memory is touched any more."""
        self._is_open = False
        self.pair.close()

    def unfinished(self) -> Iterator[Work]:
        """Give all slices that are not done, in the order in which they were added."""
        return iter(self._works)

    def _pump(self) -> None:
        while self._is_open and self._waiting and self._free and self._may_signal(self._waiting[0]):
            work = self._waiting[0]
            count = min(work.num_requests - work.num_posted, self._free, REQUESTS_MAX)
            self._post(work, count)
            if work.num_posted < work.num_requests:
                continue
            self._waiting.popleft()

    def _may_signal(self, work: Work) -> bool:
        under_way = self._immediates_posted - self._immediates_done
        return work.immediate is None or under_way < self.credits

    def _post(self, work: Work, count: int) -> None:
        is_last = work.num_posted + count == work.num_requests
        immediate = work.immediate if is_last else None
        requests = work.requests
        opcode = work.opcode if immediate is None else WRITE_WITH_IMMEDIATE
        if requests is None or (count == 1 and len(requests.local) == 1):
            local, remote, length = 0, 0, 0
            if requests is not None:
                local, remote = int(requests.local[0]), int(requests.remote[0])
                length = int(requests.lengths[0])
            small = work.may_inline and work.opcode == WRITE and length <= self.pair.inline_bytes
            head = self._chain.fill_one(
                wr_id=self._next_chain,
                opcode=opcode,
                flags=SIGNALLED | (INLINE if small else 0),
                immediate=immediate or 0,
                remote=remote,
                remote_key=work.remote_key,
                local=local,
                length=length,
                local_key=work.local_key,
            )
        else:
            head = self._chain.fill(
                requests,
                work.num_posted,
                count,
                wr_id=self._next_chain,
                opcode=work.opcode,
                remote_key=work.remote_key,
                local_key=work.local_key,
                last_opcode=opcode,
                immediate=immediate or 0,
            )
        self.pair.post(head)
        self._chains.append((self._next_chain, _Posted(work, count, is_last)))
        self._next_chain += 1
        self._free -= count
        work.num_posted += count
        if immediate is not None:
            work.number = self._immediates_posted
            self._immediates_posted += 1
