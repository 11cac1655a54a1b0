"""What the threads of a slab do with one extent: read it, write it, or make all of it durable."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from transfer.backends.block_locks import BlockLocks
from transfer.backends.direct_io import (
    AlignedBuffer,
    Alignment,
    read_fully,
    storage_error,
    write_fully,
)
from transfer.backends.file_calls import WholeCalls, check_size
from transfer.backends.file_extents import Extents, make_extents
from transfer.errors import TransferTimeout
from transfer.memory.region import Bytes
from transfer.memory.small_pages import small_pages
from transfer.native import copy_pieces
from transfer.pieces import Ints

if TYPE_CHECKING:
    from transfer._native import CallLine

# Larger calls go by way of our buffer if the caller's memory has small pages; see there.
BOUNCED_BYTES_MIN: Final = 128 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class FileAccess:
    """An open file and what is needed to move its bytes.

    Attributes:
        fd: the descriptor.
        path: for errors.
        file_bytes: size that the file must keep.
        alignment: what every call keeps to.
        locks: of its blocks.
        buffers: one for each thread, as large as the largest extent.
        line: compiled calls that are made beside; None where there are none.
    """

    fd: int
    path: str
    file_bytes: int
    alignment: Alignment
    locks: BlockLocks
    buffers: tuple[AlignedBuffer, ...]
    line: CallLine | None = None


class _ExtentWork:
    """Pieces of memory and of a file, as extents. Keeps the memory alive.

    Attributes:
        writes: which way.
        by_calls: whether calls of the system move what is direct, and nothing else does.
    """

    writes: ClassVar[bool]
    by_calls: ClassVar[bool] = True

    def __init__(
        self,
        access: FileAccess,
        memory: Bytes,
        memory_offsets: Ints,
        file_offsets: Ints,
        lengths: Ints,
        deadline: float,
    ) -> None:
        self._access = access
        self._memory = memory
        self._start = memory.ctypes.data
        self._view = memory.data
        self._deadline = deadline
        self._extents = extents = make_extents(
            self._start,
            memory_offsets,
            file_offsets,
            lengths,
            alignment=access.alignment,
            io_bytes=len(access.buffers[0].array),
        )
        self._bounds = extents.bounds.tolist()
        self._lows = extents.lows.tolist()
        self._highs = extents.highs.tolist()
        self._direct = self._without_buffer(extents).tolist()
        self._partial = extents.partial.tolist()

    def _without_buffer(self, extents: Extents) -> NDArray[np.bool_]:
        """Say which extents the call moves to or from the caller's memory itself."""
        if not self._access.alignment.direct or not small_pages.hold(
            self._start, self._view.nbytes
        ):
            return extents.direct
        return extents.direct & (extents.highs - extents.lows < BOUNCED_BYTES_MIN)

    def whole_calls(self) -> WholeCalls | None:
        """Return what does the same without the interpreter, if nothing needs a buffer."""
        if not self.by_calls or not all(self._direct):
            return None
        return WholeCalls(
            self._access, self._memory, self._extents, self._deadline, writes=self.writes
        )

    def __len__(self) -> int:
        return len(self._lows)

    def weigh(self, index: int) -> int:
        """Bytes of a call."""
        weight: int = self._highs[index] - self._lows[index]
        return weight

    def _pieces(self, index: int) -> slice:
        return slice(self._bounds[index], self._bounds[index + 1])

    def _views(self, index: int) -> list[memoryview]:
        pieces, view = self._pieces(index), self._view
        if pieces.stop - pieces.start == 1:
            start = int(self._extents.memory_offsets[pieces.start])
            return [view[start : start + self.weigh(index)]]
        offsets = self._extents.memory_offsets[pieces].tolist()
        lengths = self._extents.lengths[pieces].tolist()
        return [view[o : o + n] for o, n in zip(offsets, lengths, strict=True)]

    def _buffer(self, index: int, lane: int) -> Bytes:
        return self._access.buffers[lane].array[: self.weigh(index)]


class ReadWork(_ExtentWork):
    """Reads extents into memory."""

    writes = False

    def perform(self, index: int, lane: int) -> None:
        """Read one extent."""
        access, low = self._access, self._lows[index]
        block = access.alignment.block
        if self._direct[index]:
            self._fill(self._views(index), low, lane)
            return
        buffer = self._buffer(index, lane)
        read_fully(access.fd, [buffer.data], low, access.path, block)
        pieces, extents = self._pieces(index), self._extents
        copy_pieces(
            self._start,
            buffer.ctypes.data - low,
            extents.memory_offsets[pieces],
            extents.file_offsets[pieces],
            extents.lengths[pieces],
        )

    def _fill(self, views: list[memoryview], low: int, lane: int) -> None:
        """Read into the caller's own memory; all of it aligned."""
        del lane
        access = self._access
        read_fully(access.fd, views, low, access.path, access.alignment.block)


class WriteWork(_ExtentWork):
    """Writes extents from memory."""

    writes = True

    def perform(self, index: int, lane: int) -> None:
        """Write one extent, reading first what its blocks have beside our pieces."""
        access, alone = self._access, self._partial[index]
        block = access.alignment.block
        first, last = self._lows[index] // block, self._highs[index] // block
        if not access.locks.acquire(first, last, alone=alone, deadline=self._deadline):
            raise TransferTimeout(access.path, "write", backend="file")
        try:
            if alone and access.line is not None:
                self._write_alone(access.line, index, lane)
            else:
                self._write(index, lane)
        finally:
            access.locks.release(first, last, alone=alone)

    def _write_alone(self, line: CallLine, index: int, lane: int) -> None:
        """Write one while no call of the line does, whatever waits there."""
        low, high = self._lows[index], self._highs[index]
        if not line.hold(low, high, min(int(self._deadline * 1e9), (1 << 63) - 1)):
            raise TransferTimeout(self._access.path, "write", backend="file")
        try:
            self._write(index, lane)
        finally:
            line.let_go(low, high)

    def _write(self, index: int, lane: int) -> None:
        access, low = self._access, self._lows[index]
        check_size(access, low)
        if self._direct[index]:
            self._drain(self._views(index), low, lane)
            return
        buffer = self._buffer(index, lane)
        if self._partial[index]:
            self._read_edges(index, buffer)
        pieces, extents = self._pieces(index), self._extents
        copy_pieces(
            buffer.ctypes.data - low,
            self._start,
            extents.file_offsets[pieces],
            extents.memory_offsets[pieces],
            extents.lengths[pieces],
        )
        write_fully(access.fd, [buffer.data], low, access.path)

    def _drain(self, views: list[memoryview], low: int, lane: int) -> None:
        """Write from the caller's own memory; all of it aligned."""
        del lane
        write_fully(self._access.fd, views, low, self._access.path)

    def _read_edges(self, index: int, buffer: Bytes) -> None:
        access, low, high = self._access, self._lows[index], self._highs[index]
        block, view = access.alignment.block, buffer.data
        if self._extents.gaps[index] or high - low <= 2 * block:
            read_fully(access.fd, [view], low, access.path, block)
            return
        read_fully(access.fd, [view[:block]], low, access.path, block)
        read_fully(access.fd, [view[-block:]], high - block, access.path, block)


class SyncWork:
    """Makes what was written survive a power cut."""

    def __init__(self, access: FileAccess) -> None:
        self._access = access

    def __len__(self) -> int:
        return 1

    def weigh(self, index: int) -> int:
        """No bytes of its own."""
        return 1

    def perform(self, index: int, lane: int) -> None:
        """Ask the disk to keep all ended writes."""
        try:
            os.fdatasync(self._access.fd)
        except OSError as error:
            raise storage_error(self._access.path, "sync", -1, error) from error
