"""The queue of a slab: what needs no buffer goes to compiled code, all else through Python.

    submit ──────▶ queue of batches ──▶ a thread is called out of the line, and takes steps of it
    submit_calls ▶ line (compiled) ──▶ its threads make the calls, and bring back what has ended

The threads wait in the line, without the interpreter, and the disk is kept busy by them whatever
other threads of the process do: the interpreter is needed once for each batch, when it has ended.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

from transfer import native
from transfer.backends.file_calls import OK, STOPPED, WholeCalls
from transfer.storage.batch_queue import NOTHING, Batch, BatchQueue, Done

if TYPE_CHECKING:
    from transfer._native import CallLine
    from transfer.errors import TransferError


class CallQueue(BatchQueue):
    """A `BatchQueue` with a line of compiled calls beside it, where that was built. Thread-safe.

    Args:
        name, backend, threads, queued_max, turn_bytes, closed: as `BatchQueue`.

    Attributes:
        line: None where nothing is compiled; then all goes through Python.
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
    ) -> None:
        super().__init__(
            name, backend=backend, threads=threads, queued_max=queued_max,
            turn_bytes=turn_bytes, closed=closed, hurries=True,
        )  # fmt: skip
        self.line: CallLine | None = None
        if native.compiled is not None:
            self.line = native.compiled.CallLine(threads)
        self._ids = itertools.count(1)
        self._in_line: dict[int, tuple[Batch, WholeCalls]] = {}

    def submit_calls(
        self, calls: WholeCalls, operation: str, deadline: float, done: Done, *, wait: bool = True
    ) -> None:
        """Queue calls. As `submit`."""
        if self.line is None or not calls.are_compiled:
            self.submit(calls, operation, deadline, done, wait=wait)
            return
        batch = Batch(NOTHING, operation, deadline, done)
        with self._lock:
            self._admit(batch, wait=wait)
            number = next(self._ids)
            self._in_line[number] = batch, calls
            calls.join(self.line, number)

    def _wake(self) -> None:
        if self.line is None:
            super()._wake()
        else:
            self.line.call()

    def _stop(self) -> list[Batch]:
        if self.line is None:
            return super()._stop()
        stopped = [number for number in list(self._in_line) if self.line.stop(number)]
        ended = [self._in_line.pop(number)[0] for number in stopped]
        for batch in ended:
            batch.error = self._closed_error(self._name, batch.operation)
        self.line.close()
        return ended

    def _run(self, lane: int) -> None:
        line = self.line
        if line is None:
            super()._run(lane)
            return
        while True:
            ended = line.take(lane)
            if ended is not None:
                self._end_calls(*ended)
            elif not self._take_turn(lane, wait=False) and self._closed:
                return

    def _end_calls(self, number: int, outcome: int, at: int, detail: int) -> None:
        with self._lock:
            batch, calls = self._in_line.pop(number)
        if outcome == STOPPED:
            batch.error = self._closed_error(self._name, batch.operation)
        elif outcome != OK:
            batch.error = calls.error(outcome, at, detail)
        self._end(batch)
