"""Batches whose calls work on the caller's memory itself: made by the threads of a slab in C.

Nothing is done per call but the call: no buffer, no edges to be read. So the threads need no
interpreter for them (see `call_queue`); where nothing is compiled they take them here:

    calls     |  0  |  1  |  2  |  3  |  4  |  5  |  6  |
    threads      a     b     c     a     c     b  ^ the next one, for whoever is ready first
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Final

import numpy as np

from transfer import native
from transfer.backends.direct_io import read_fully, storage_error, write_fully
from transfer.backends.file_extents import Extents
from transfer.errors import StorageFailed, TransferError, TransferTimeout
from transfer.memory.region import Bytes
from transfer.pieces import Ints
from transfer.storage.batch_queue import SharedWork

if TYPE_CHECKING:
    from transfer._native import CallLine
    from transfer.backends.file_work import FileAccess

OK, FAILED, ENDED, CUT, LATE, STOPPED = range(6)
TURN_CALLS: Final = 4  # of the largest size, while other batches wait

# False: the calls are made in Python, where tests make them fail.
compiled = native.compiled is not None
_in_python: Final = threading.Lock()


class WholeCalls(SharedWork):
    """The calls of a batch of which every extent is direct. Keeps the memory alive.

    Args:
        access: the file.
        memory: of the caller.
        extents: all of them direct.
        writes: the way.
        deadline: `time.monotonic` after which no call is begun.
    """

    def __init__(
        self,
        access: FileAccess,
        memory: Bytes,
        extents: Extents,
        deadline: float,
        *,
        writes: bool,
    ) -> None:
        self._access = access
        self._memory = memory
        self._start = memory.ctypes.data
        self._extents = extents
        self._deadline = deadline
        self._writes = writes
        self._operation = "write" if writes else "read"
        self._next = np.zeros(1, dtype=np.int64)
        block = access.alignment.block
        self._runs = (extents.lows // block).tolist(), (extents.highs // block).tolist()

    def __len__(self) -> int:
        return len(self._extents)

    @property
    def left(self) -> int:
        """See `SharedWork.left`."""
        return max(len(self._extents) - int(self._next[0]), 0)

    def stop(self) -> None:
        """See `SharedWork.stop`."""
        self._next[0] = len(self._extents)

    @property
    def are_compiled(self) -> bool:
        """Whether a line may make them."""
        return compiled

    def join(self, line: CallLine, number: int) -> None:
        """Have them made by the threads of a line; this object must stay until they have ended."""
        access, extents = self._access, self._extents
        line.put(
            number, access.fd, self._writes, access.alignment.block, access.file_bytes,
            min(int(self._deadline * 1e9), (1 << 63) - 1), self._start, extents.memory_offsets,
            extents.lengths, extents.bounds, extents.lows, extents.highs,
        )  # fmt: skip

    def run(self, lane: int, crowded: Ints) -> None:
        """Take calls, in Python. Raises as `Work.perform`."""
        access = self._access
        if not self._writes:
            self._take_calls(crowded)
            return
        held = access.locks.acquire_all(*self._runs, deadline=self._deadline)
        if held is None:
            raise TransferTimeout(access.path, self._operation, backend="file")
        try:
            self._take_calls(crowded)
        finally:
            access.locks.release_all(held)

    def _take_calls(self, crowded: Ints) -> None:
        turn_bytes, moved = TURN_CALLS * len(self._access.buffers[0].array), 0
        while moved < turn_bytes or not crowded[0]:
            with _in_python:
                index = int(self._next[0])
                self._next[0] = index + 1
            if index >= len(self._extents):
                return
            moved += self._call(index)

    def error(self, outcome: int, at: int, detail: int) -> TransferError:
        """Return what a line says of them as an error."""
        access, operation = self._access, self._operation
        if outcome == LATE:
            return TransferTimeout(access.path, operation, backend="file")
        if outcome == FAILED:
            return storage_error(access.path, operation, at, OSError(detail, os.strerror(detail)))
        if outcome == CUT:
            reason = f"cut short: the file has {detail} bytes, not {access.file_bytes}"
        elif self._writes:
            reason = "the file takes no bytes"
        else:
            size = os.fstat(access.fd).st_size
            reason = f"cut short: {size} bytes are left, {at + detail} were expected"
        return StorageFailed(access.path, operation, reason, offset=at)

    def _call(self, index: int) -> int:
        """Do one call; return its bytes."""
        access, extents = self._access, self._extents
        if time.monotonic() > self._deadline:
            raise TransferTimeout(access.path, self._operation, backend="file")
        pieces = slice(int(extents.bounds[index]), int(extents.bounds[index + 1]))
        offsets, lengths = extents.memory_offsets[pieces], extents.lengths[pieces]
        places = [
            self._memory.data[o : o + n]
            for o, n in zip(offsets.tolist(), lengths.tolist(), strict=True)
        ]
        low = int(extents.lows[index])
        if self._writes:
            check_size(access, low)
            write_fully(access.fd, places, low, access.path)
        else:
            read_fully(access.fd, places, low, access.path, access.alignment.block)
        return int(lengths.sum())


def check_size(access: FileAccess, low: int) -> None:
    """Refuse what is written behind the end of a file that was cut: it would be made longer.

    Raises:
        StorageFailed: it is shorter than it must be.
    """
    try:
        size = os.fstat(access.fd).st_size
    except OSError as error:
        raise storage_error(access.path, "write", low, error) from error
    if size < access.file_bytes:
        reason = f"cut short: the file has {size} bytes, not {access.file_bytes}"
        raise StorageFailed(access.path, "write", reason, offset=low)
