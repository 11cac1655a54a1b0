"""Locks on runs of blocks, so that neighbours written at the same time lose nothing.

A write of part of a block reads the block, changes its bytes and writes it back. Between the two
nobody else may write the block: their bytes would be undone. Whole blocks need no such care among
themselves.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right

Runs = tuple[list[int], list[int]]


class BlockLocks:
    """Runs of blocks that are being written. Thread-safe.

    Few are held at once (one per thread), so they are a plain list.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._held: list[tuple[int, int, bool]] = []
        self._batches: list[Runs] = []
        self._num_waiting = 0

    def acquire(self, low: int, high: int, *, alone: bool, deadline: float) -> bool:
        """Hold `[low, high)`; waits while a run that overlaps is held, if either is `alone`.

        Returns:
            False if it was not to be had until the deadline: then nothing is held.
        """
        run = (low, high, alone)
        with self._changed:
            while self._meets(run):
                self._num_waiting += 1
                free = self._changed.wait(max(deadline - time.monotonic(), 0.0))
                self._num_waiting -= 1
                if not free:
                    return False
            self._held.append(run)
            return True

    def release(self, low: int, high: int, *, alone: bool) -> None:
        """Undo `acquire`, with the same arguments."""
        with self._changed:
            self._held.remove((low, high, alone))
            if self._num_waiting:
                self._changed.notify_all()

    def acquire_all(self, lows: list[int], highs: list[int], *, deadline: float) -> Runs | None:
        """Hold many runs of whole blocks, none of them alone, all at once or none.

        Args:
            lows: first blocks, rising.
            highs: ends; no run reaches into the next.
            deadline: as `acquire`.

        Returns:
            What `release_all` takes; None if they were not to be had until the deadline.
        """
        runs = lows, highs
        with self._changed:
            while any(other and _meet(runs, low, high) for low, high, other in self._held):
                self._num_waiting += 1
                free = self._changed.wait(max(deadline - time.monotonic(), 0.0))
                self._num_waiting -= 1
                if not free:
                    return None
            self._batches.append(runs)
            return runs

    def release_all(self, runs: Runs) -> None:
        """Undo `acquire_all`."""
        with self._changed:
            place = next(i for i, held in enumerate(self._batches) if held is runs)
            del self._batches[place]
            if self._num_waiting:
                self._changed.notify_all()

    def _meets(self, run: tuple[int, int, bool]) -> bool:
        low, high, alone = run
        for held_low, held_high, other in self._held:
            if low < held_high and held_low < high and (alone or other):
                return True
        return alone and any(_meet(runs, low, high) for runs in self._batches)


def _meet(runs: Runs, low: int, high: int) -> bool:
    lows, highs = runs
    first = bisect_right(highs, low)  # the first that ends behind `low`
    return first < len(lows) and lows[first] < high
