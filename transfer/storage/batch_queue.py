"""A bounded queue of batches that a few threads work through, step by step.

A batch is one call of the user with up to thousands of pieces, its steps what is done at a time:
one system call on a file, one full bounce buffer. Threads take turns at the batches, so a small
one does not wait for the end of a large one:

    queue    [ batch a: 7 of 900 steps taken ] [ batch b: 0 of 1 ] ...
    thread   takes the next steps of the first batch, puts the batch behind the others

The queue is bounded: whoever submits waits for room until the batch's deadline.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

import numpy as np

from transfer import native
from transfer.errors import StorageFailed, TransferError, TransferTimeout
from transfer.pieces import Ints

logger = logging.getLogger(__name__)

JOIN_S: Final = 10.0

Done = Callable[[TransferError | None], object]


class Work(Protocol):
    """What a batch is made of."""

    def __len__(self) -> int:
        """Number of steps."""

    def weigh(self, index: int) -> int:
        """Bytes of a step."""

    def perform(self, index: int, lane: int) -> None:
        """Take one step, in thread `lane`.

        Raises:
            TransferError: it failed; the rest of the batch is not begun.
        """


class SharedWork(ABC):
    """Steps that threads take by themselves, several of them at once, without the queue.

    The counter of what was taken belongs to the work; `stop` and `left` are called under the
    queue's lock while others take steps.
    """

    @property
    @abstractmethod
    def left(self) -> int:
        """How many steps nobody has taken."""

    @abstractmethod
    def stop(self) -> None:
        """Let nobody take any more; those that were taken end."""

    @abstractmethod
    def run(self, lane: int, crowded: Ints) -> None:
        """Take steps until none is left, or a turn is over and `crowded[0]` is not 0.

        Raises:
            TransferError: one failed.
        """


class Batch:
    """Work under way. `next`, `running` and `error` belong to the queue's lock."""

    def __init__(
        self, work: Work | SharedWork, operation: str, deadline: float, done: Done
    ) -> None:
        self.shared = work if isinstance(work, SharedWork) else None
        self.work: Work = NOTHING if isinstance(work, SharedWork) else work
        self.operation = operation
        self.deadline = deadline
        self.done = done
        self.next = 0
        self.running = 0
        self.error: TransferError | None = None

    @property
    def goes_on(self) -> bool:
        """Whether it has steps that threads take by themselves."""
        return self.error is None and self.shared is not None and self.shared.left > 0


class _Nothing:
    """No steps of the queue's."""

    def __len__(self) -> int:
        return 0

    def weigh(self, index: int) -> int:
        raise AssertionError(index)

    def perform(self, index: int, lane: int) -> None:
        raise AssertionError(index)


NOTHING: Final = _Nothing()


class BatchQueue:
    """A few threads and a bounded queue of batches. Thread-safe.

    Args:
        name: what the errors say failed.
        backend: names the threads.
        closed: makes the error of what `close` ends: (name, operation) -> error.
        threads: threads, each with its own lane.
        queued_max: batches that wait or run.
        turn_bytes: what a thread takes from one batch at a time.
        hurries: the threads wait most of the time, do little in between, and a disk waits for that:
            on a busy core they come before others, where the kernel has it so.
    """

    def __init__(
        self,
        name: str,
        *,
        backend: str,
        threads: int,
        queued_max: int,
        turn_bytes: int,
        closed: Callable[[str, str], TransferError],
        hurries: bool = False,
    ) -> None:
        self._name = name
        self._backend = backend
        self._closed_error = closed
        self._queued_max = queued_max
        self._turn_bytes = turn_bytes
        self._hurries = hurries
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._room = threading.Condition(self._lock)
        self._waiting: deque[Batch] = deque()
        self._alive: set[Batch] = set()
        self._crowded = np.zeros(1, dtype=np.int64)  # whether more than one is alive
        self._closed = True
        self._threads = [
            threading.Thread(
                target=self._begin, args=(lane,), name=f"{backend}-{lane}", daemon=True
            )
            for lane in range(threads)
        ]

    def open(self) -> None:
        """Start the threads."""
        self._closed = False
        for thread in self._threads:
            thread.start()

    def close(self) -> bool:
        """Fail what has not begun, wait for what has, end the threads.

        Returns:
            False if a system call does not come back: its thread, and the memory and the
            descriptor that it uses, cannot be freed.
        """
        with self._lock:
            self._closed = True
            waiting, self._waiting = list(self._waiting), deque()
            for batch in {*waiting, *(batch for batch in self._alive if batch.goes_on)}:
                batch.error = batch.error or self._closed_error(self._name, batch.operation)
                if batch.shared is not None:
                    batch.shared.stop()
            idle = [batch for batch in waiting if not batch.running]
            idle += self._stop()
            self._room.notify_all()
        for batch in idle:
            self._end(batch)
        limit = time.monotonic() + JOIN_S
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(max(limit - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    def submit(
        self,
        work: Work | SharedWork,
        operation: str,
        deadline: float,
        done: Done,
        *,
        wait: bool = True,
    ) -> None:
        """Queue a batch. `done(error)` is called once, by one of the threads or by `close`.

        Args:
            work: what is to be done; nothing at all is allowed.
            operation: for errors.
            deadline: after it nothing new is begun.
            done: gets None, or the first error.
            wait: whether to wait for room, until the deadline.

        Raises:
            TransferError: closed.
            TransferTimeout: no room; nothing was begun.
        """
        batch = Batch(work, operation, deadline, done)
        with self._lock:
            self._admit(batch, wait=wait)
            self._waiting.append(batch)
            self._wake()

    @property
    def num_alive(self) -> int:
        """Batches that wait or run."""
        return len(self._alive)

    def _admit(self, batch: Batch, *, wait: bool) -> None:
        """Count a batch in, once there is room for it. Under the lock. Raises as `submit`."""
        started = time.monotonic()
        while not self._closed and len(self._alive) >= self._queued_max:
            remaining = batch.deadline - time.monotonic() if wait else 0.0
            if remaining <= 0 or not self._room.wait(remaining):
                elapsed_s = time.monotonic() - started
                raise TransferTimeout(
                    self._name, batch.operation, backend=self._backend, elapsed_s=elapsed_s
                )
        if self._closed:
            raise self._closed_error(self._name, batch.operation)
        self._alive.add(batch)
        self._crowded[0] = len(self._alive) > 1

    def _wake(self) -> None:
        """Have a thread look for a batch. Under the lock."""
        self._work.notify()

    def _stop(self) -> list[Batch]:
        """Have all threads look that we are closed; return what ended by that. Under the lock."""
        self._work.notify_all()
        return []

    def _begin(self, lane: int) -> None:
        if self._hurries and native.compiled is not None:
            native.compiled.hurry()
        self._run(lane)

    def _run(self, lane: int) -> None:
        while self._take_turn(lane):
            pass

    def _take_turn(self, lane: int, *, wait: bool = True) -> bool:
        """Take the next steps; False if there are none: at the end, or now if not to `wait`."""
        turn = self._take(wait)
        if turn is None:
            return False
        batch, first, end = turn
        error: TransferError | None = None
        try:
            if batch.goes_on and batch.shared is not None:
                batch.shared.run(lane, self._crowded)
            for index in range(first, end):
                batch.work.perform(index, lane)
        except TransferError as caught:
            error = caught
        except Exception as caught:
            # A bug must not leave the caller waiting for a thread that is gone.
            logger.exception("an operation on %s failed unexpectedly", self._name)
            error = StorageFailed(self._name, batch.operation, repr(caught))
        self._after_turn(batch, error)
        return True

    def _take(self, wait: bool) -> tuple[Batch, int, int] | None:
        """The next steps to take; None if there are none. An overdue batch gets none."""
        with self._lock:
            while not self._waiting:
                if self._closed or not wait:
                    return None
                self._work.wait()
            batch = self._waiting.popleft()
            first = batch.next
            if batch.error is None and time.monotonic() > batch.deadline:
                batch.error = TransferTimeout(self._name, batch.operation, backend=self._backend)
            if batch.error is None:
                taken, total = 0, len(batch.work)
                while batch.next < total and taken < self._turn_bytes:
                    taken += batch.work.weigh(batch.next)
                    batch.next += 1
                # Of what threads take by themselves each that is at it takes one at least.
                left = 0 if batch.shared is None else batch.shared.left - batch.running - 1
                if batch.next < total or left > 0:
                    self._waiting.append(batch)
                    self._wake()
            batch.running += 1
            return batch, first, batch.next

    def _after_turn(self, batch: Batch, error: TransferError | None) -> None:
        with self._lock:
            batch.running -= 1
            batch.error = batch.error or error
            if batch.shared is not None:
                self._after_shared(batch, batch.shared)
            elif batch.error is not None and batch in self._waiting:
                self._waiting.remove(batch)
            ended = not batch.running and batch not in self._waiting
        if ended:
            self._end(batch)

    def _after_shared(self, batch: Batch, work: SharedWork) -> None:
        """Queue it again if its turn was over before its steps, else never again."""
        if batch.error is not None:
            work.stop()
        waits = batch in self._waiting
        if batch.goes_on and not waits and not self._closed:
            self._waiting.append(batch)
            self._wake()
        elif waits and not batch.goes_on:
            self._waiting.remove(batch)

    def _end(self, batch: Batch) -> None:
        with self._lock:
            if batch not in self._alive:
                return
            self._alive.discard(batch)
            self._crowded[0] = len(self._alive) > 1
            self._room.notify()
        try:
            batch.done(batch.error)
        except Exception:
            # The waiter's bug must not end the thread that serves everybody.
            logger.exception("a callback of an operation on %s raised", self._name)
