"""Reads blocks of a segment where they lie, and tells whether their bytes are right."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstore.checksum import CHECKSUM_BYTES, verify_stored
from kvstore.node.indexed_block import IndexedBlock
from kvstore.node.segment_memory import SegmentMemory
from transfer import StorageFailed, TransferTimeout
from transfer.backends.direct_io import AlignedBuffer
from transfer.pieces import Pieces

BUFFER_BYTES: Final = 8 << 20
ALIGNMENT: Final = 4096  # blocks in the buffer start at multiples, so that a disk fills it directly


class BlockCheck:
    """Verifies blocks, many at a time where they have to be read first. Not thread-safe.

    Args:
        memory: Where they lie.
        buffer_bytes: What is read at a time; larger blocks are read in parts.
    """

    def __init__(self, memory: SegmentMemory, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._memory = memory
        self._buffer_bytes = buffer_bytes
        self._buffer: NDArray[np.uint8] | None = None

    def run(
        self, blocks: Iterable[IndexedBlock], *, deadline_s: float
    ) -> Iterator[tuple[IndexedBlock, bool]]:
        """Yield each block, marked as verified if it is, with whether its bytes are right.

        Bytes that cannot be read are wrong; those that are not read in time are left out.
        """
        for batch in batches_of(blocks, self._buffer_bytes):
            try:
                found = self._judge(batch, deadline_s)
            except TransferTimeout:
                return
            for block, intact in zip(batch, found, strict=True):
                block.verified = block.verified or intact
                yield block, intact

    def _judge(self, batch: list[IndexedBlock], deadline_s: float) -> list[bool]:
        array = self._memory.array
        if array is not None:
            return [_is_intact(block, array[block.offset : block.end]) for block in batch]
        if batch[0].nbytes > self._buffer_bytes:
            return [self._stream(batch[0], deadline_s)]
        places = places_of(batch)
        buffer = self._filled(batch, places, deadline_s)
        if buffer is None:
            # One of them cannot be read; which one is found out one by one.
            return [len(batch) > 1 and self._judge([b], deadline_s)[0] for b in batch]
        return [
            _is_intact(block, buffer[place : place + block.nbytes])
            for block, place in zip(batch, places, strict=True)
        ]

    def _filled(
        self, batch: list[IndexedBlock], places: list[int], deadline_s: float
    ) -> NDArray[np.uint8] | None:
        buffer = self._own_buffer()
        try:
            self._memory.read(buffer, pieces_of(batch, places), deadline_s)
        except StorageFailed:
            return None
        return buffer

    def _stream(self, block: IndexedBlock, deadline_s: float) -> bool:
        """Verify a block that is larger than the buffer."""
        buffer, state = self._own_buffer(), _Stream(block)
        for start in range(0, block.nbytes, len(buffer)):
            length = min(len(buffer), block.nbytes - start)
            pieces = Pieces(*np.array([[block.offset + start], [0], [length]], dtype=np.int64))
            try:
                self._memory.read(buffer, pieces, deadline_s)
            except StorageFailed:
                return False
            state.feed(buffer[:length])
        return state.is_intact()

    def _own_buffer(self) -> NDArray[np.uint8]:
        if self._buffer is None:
            self._buffer = AlignedBuffer(self._buffer_bytes).array
        return self._buffer


class _Stream:
    """A block that comes in parts."""

    def __init__(self, block: IndexedBlock) -> None:
        self._block = block
        self._at = 0
        self._chunk = xxhash.xxh3_64()
        self._computed: list[int] = []
        self._stored = bytearray()

    def feed(self, part: NDArray[np.uint8]) -> None:
        """Take the next bytes."""
        payload = part[: max(0, self._block.length - self._at)]
        start = 0
        while start < len(payload):
            step = self._step(len(payload) - start)
            self._chunk.update(payload[start : start + step].data)
            start, self._at = start + step, self._at + step
            if self._chunk_ends():
                self._computed.append(self._chunk.intdigest())
                self._chunk.reset()
        self._stored += part[len(payload) :].tobytes()

    def is_intact(self) -> bool:
        """Tell, after the last byte."""
        block = self._block
        if not block.chunk_bytes:
            return self._computed == [block.checksum]
        table = np.array(self._computed, dtype="<u8").tobytes()
        assert len(table) == len(self._computed) * CHECKSUM_BYTES, block
        return table == self._stored and xxhash.xxh3_64_intdigest(table) == block.checksum

    def _step(self, available: int) -> int:
        chunk_bytes = self._block.chunk_bytes
        return min(available, chunk_bytes - self._at % chunk_bytes) if chunk_bytes else available

    def _chunk_ends(self) -> bool:
        if self._at == self._block.length:
            return True
        chunk_bytes = self._block.chunk_bytes
        return chunk_bytes > 0 and self._at % chunk_bytes == 0


def batches_of(blocks: Iterable[IndexedBlock], nbytes: int) -> Iterator[list[IndexedBlock]]:
    """Cut blocks into runs that fit into a buffer; a larger block is a run of its own."""
    batch: list[IndexedBlock] = []
    filled = 0
    for block in blocks:
        taken = -(-block.nbytes // ALIGNMENT) * ALIGNMENT
        if batch and filled + taken > nbytes:
            yield batch
            batch, filled = [], 0
        batch.append(block)
        filled += taken
    if batch:
        yield batch


def places_of(batch: list[IndexedBlock]) -> list[int]:
    """Where the blocks of a run lie in the buffer."""
    places, at = [], 0
    for block in batch:
        places.append(at)
        at += -(-block.nbytes // ALIGNMENT) * ALIGNMENT
    return places


def pieces_of(batch: list[IndexedBlock], places: list[int]) -> Pieces:
    """Describe reading a run of blocks into the buffer."""
    return Pieces(
        np.array([block.offset for block in batch], dtype=np.int64),
        np.array(places, dtype=np.int64),
        np.array([block.nbytes for block in batch], dtype=np.int64),
    )


def _is_intact(block: IndexedBlock, stored: NDArray[np.uint8]) -> bool:
    return verify_stored(stored, block.length, block.checksum, block.chunk_bytes)
