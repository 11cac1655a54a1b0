"""Locks on runs of blocks, so that neighbours written at the same time lose nothing.

A write of part of a block reads the block, changes its bytes and writes it back. Between the two
nobody else may write the block: their bytes would be undone. Whole blocks need no such care among
themselves.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator


class BlockLocks:
    """Runs of blocks that are being written. Thread-safe.

    Few are held at once (one per thread), so they are a plain list.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: list[tuple[int, int, bool]] = []

    @contextlib.contextmanager
    def hold(self, low: int, high: int, *, alone: bool, deadline: float) -> Iterator[bool]:
        """Hold `[low, high)`; waits while a run that overlaps is held, if either is `alone`.

        Yields:
            False if it was not to be had until the deadline: then nothing is held.
        """
        run = (low, high, alone)
        with self._changed:
            free = self._changed.wait_for(
                lambda: not self._meets(run), max(deadline - time.monotonic(), 0.0)
            )
            if free:
                self._held.append(run)
        try:
            yield free
        finally:
            if free:
                with self._changed:
                    self._held.remove(run)
                    self._changed.notify_all()

    def _meets(self, run: tuple[int, int, bool]) -> bool:
        low, high, alone = run
        return any(
            low < held_high and held_low < high and (alone or other)
            for held_low, held_high, other in self._held
        )
