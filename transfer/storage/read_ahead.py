"""Reads of a peer's storage by way of buffers: the next one is asked for before one is copied.

    disk          [ 0 ][ 1 ][ 2 ][ 3 ][ 4 ][ 5 ]     asked for while there are free buffers
    this thread        [ 0 ] [ 1 ] [ 2 ] [ 3 ] ...   copies, of two buffers the one that is full

With one buffer for each thread the disk has nothing to do while they all copy.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from transfer.memory.region import RegionKey
from transfer.pieces import Ints, Pieces
from transfer.storage.asking import Asking, ReadAsked
from transfer.storage.batch_queue import SharedWork
from transfer.storage.bounce import BUFFER_BYTES, Bounce, Bounces, End

BUFFERS: Final = 2  # of each thread
TURN_STEPS: Final = 4  # while other transfers wait


@dataclass(frozen=True, slots=True)
class _Asked:
    step: Pieces
    buffer: Bounce
    read: ReadAsked


class ReadAhead(SharedWork):
    """Steps of one buffer each, which threads take by themselves.

    Args:
        bounces: The buffers, `BUFFERS` for each thread.
        asking: Asks the owner.
        key: To the storage.
        target: Our end.
        steps: What one buffer takes, each.
        deadline: Of all, `time.monotonic`.
    """

    def __init__(
        self,
        bounces: Bounces,
        asking: Asking,
        key: RegionKey,
        target: End,
        steps: list[Pieces],
        deadline: float,
    ) -> None:
        self._bounces = bounces
        self._asking = asking
        self._key = key
        self._target = target
        self._steps = steps
        self._deadline = deadline
        self._lock = threading.Lock()
        self._next = 0

    @property
    def left(self) -> int:
        """See `SharedWork.left`."""
        return len(self._steps) - self._next

    def stop(self) -> None:
        """See `SharedWork.stop`."""
        with self._lock:
            self._next = len(self._steps)

    def run(self, lane: int, crowded: Ints) -> None:
        """Take steps. Raises as `Work.perform`; then none of the thread's buffers is used again."""
        buffers: list[Bounce] = []
        asked: deque[_Asked] = deque()
        taken = 0
        with ExitStack() as stack:
            stack.callback(_forget, asked)
            while True:
                step = None if taken >= TURN_STEPS and crowded[0] else self._take()
                if step is not None:
                    if len(buffers) < BUFFERS:
                        borrowed = self._bounces.borrow(lane, self._key.owner, len(buffers))
                        buffers.append(stack.enter_context(borrowed))
                    asked.append(self._begin(step, buffers[taken % BUFFERS]))
                    taken += 1
                if len(asked) == BUFFERS or (asked and step is None):
                    self._copy(asked.popleft())
                elif step is None:
                    return

    def _take(self) -> Pieces | None:
        with self._lock:
            if self._next == len(self._steps):
                return None
            self._next += 1
            return self._steps[self._next - 1]

    def _begin(self, step: Pieces, buffer: Bounce) -> _Asked:
        assert buffer.key is not None
        assert step.nbytes <= BUFFER_BYTES, step
        read = self._asking.begin_read(
            self._key, buffer.key, step.source_offsets, step.lengths, self._deadline
        )
        return _Asked(step, buffer, read)

    def _copy(self, asked: _Asked) -> None:
        """Wait until the buffer is full, and copy out of it."""
        step = asked.step
        asked.read.wait()
        self._target.drain(asked.buffer, step.target_offsets, step.lengths, self._deadline)


def _forget(asked: deque[_Asked]) -> None:
    """After a failure: of what was asked for beside it."""
    for one in asked:
        one.read.forget()
