"""Registered buffers for bytes that cannot be moved from or to where they are.

Values of a few kilobytes are gathered here instead of being registered one by one, and ranges
whose ends are not those of parts are read here whole, verified, and copied on.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from transfer import Memory, allocate

if TYPE_CHECKING:
    from transfer import Region, TransferEngine

BUFFER_BYTES_MIN: Final = 1 << 20
KEPT_BYTES_MAX: Final = 64 << 20


class Staging:
    """Buffers that are used again: at most `KEPT_BYTES_MAX` idle ones are kept. Thread-safe.

    Args:
        engine: Registers them.
    """

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._idle: list[tuple[Region, Memory]] = []
        self._closed = False

    @contextmanager
    def borrow(self, nbytes: int) -> Iterator[Region]:
        """Lend a region of at least `nbytes` bytes; nothing may be under way in it at the end."""
        region, memory = self._take(nbytes)
        try:
            yield region
        finally:
            self._give_back(region, memory)

    def close(self) -> None:
        """Free the idle buffers; those in use are freed when they come back."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for region, memory in idle:
            self._free(region, memory)

    def _take(self, nbytes: int) -> tuple[Region, Memory]:
        with self._lock:
            fitting = [pair for pair in self._idle if pair[0].nbytes >= nbytes]
            if fitting:
                smallest = min(fitting, key=lambda pair: pair[0].nbytes)
                self._idle.remove(smallest)
                return smallest
        size = max(BUFFER_BYTES_MIN, 1 << (nbytes - 1).bit_length())
        memory = allocate(size)
        return self._engine.register(memory), memory

    def _give_back(self, region: Region, memory: Memory) -> None:
        with self._lock:
            kept = sum(region.nbytes for region, _ in self._idle)
            if not self._closed and kept + region.nbytes <= KEPT_BYTES_MAX:
                self._idle.append((region, memory))
                return
        self._free(region, memory)

    def _free(self, region: Region, memory: Memory) -> None:
        self._engine.release(region)
        memory.close()
