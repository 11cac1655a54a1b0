"""One batch of copies: read and verify at the source, write at the target, tell the target."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvstore.checksum import verify_stored
from kvstore.errors import NodeUnreachable, StoreClosed
from kvstore.node.block_check import BlockCheck
from kvstore.node.copy_batches import CopyBatch, CopyResults, block_of, pieces_between
from kvstore.node.indexed_block import IndexedBlock, columns_of
from kvstore.node.segment import Segment
from kvstore.node.target_keys import TargetKeys
from kvstore.wire.messages import Copy
from kvstore.wire.peer_messages import Written, encode_to_node
from transfer import (
    AccessRefused,
    Memory,
    Priority,
    Region,
    StorageFailed,
    TransferError,
    TransferTimeout,
    allocate,
)

if TYPE_CHECKING:
    from transfer import TransferEngine
    from transfer.pieces import Pieces

logger = logging.getLogger(__name__)


class _InDoubt(Exception):
    """A write did not end well, and its bytes may still land."""


class CopyWork:
    """Carries out batches, one at a time. Used by one thread.

    Args:
        engine: The node's.
        segments: Its segments, by number.
        keys: Of other nodes' segments.
        buffer_bytes: Of the buffer for what has no address, made when it is first needed.
    """

    def __init__(
        self,
        engine: TransferEngine,
        segments: Sequence[Segment],
        keys: TargetKeys,
        *,
        buffer_bytes: int,
    ) -> None:
        self._engine = engine
        self._segments = segments
        self._keys = keys
        self._buffer_bytes = buffer_bytes
        self._buffer: tuple[Memory, Region] | None = None

    def close(self) -> None:
        """Free the buffer. Idempotent."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._engine.release(buffer[1])
            buffer[0].close()

    def make(self, batch: CopyBatch, deadline_s: float) -> CopyResults:
        """Make the copies; what the network or a disk does is a result, never raised."""
        results = CopyResults.none()
        source = self._segment(batch.source)
        possible: list[int] = []
        blocks: list[IndexedBlock] = []
        for i, copy in enumerate(batch.copies):
            known = None if source is None else source.index.at(copy.source_offset)
            block = block_of(copy, known)
            if source is None or block is None or not block.fits(source.nbytes):
                results.failed.append(copy.copy_id)
            else:
                possible.append(i)
                blocks.append(block)
        if source is not None and blocks:
            self._make(batch.only(possible), blocks, source, deadline_s, results)
        return results

    def _make(
        self,
        batch: CopyBatch,
        blocks: list[IndexedBlock],
        source: Segment,
        deadline_s: float,
        results: CopyResults,
    ) -> None:
        ids = [copy.copy_id for copy in batch.copies]
        try:
            good = self._verify(batch, blocks, source, deadline_s)
        except TransferTimeout:
            results.failed += ids
            return
        for i in sorted(set(range(len(blocks))) - set(good)):
            results.corrupt.append(ids[i])
            known = source.index.at(blocks[i].offset)
            if known is not None and blocks[i].is_copy_of(known):
                source.index.forget(known)
        if not good:
            return
        try:
            size = self._target_bytes(batch, deadline_s)
            outside = [i for i in good if not _fits(batch.copies[i], size)]
            results.failed += [ids[i] for i in outside]
            good = [i for i in good if i not in outside]
            self._send(batch, blocks, good, source, deadline_s)
        except _InDoubt:
            return
        except (NodeUnreachable, StoreClosed, TransferError) as error:
            logger.info("copies to %s not made: %s", batch.target.node, error)
            results.failed += [ids[i] for i in good]
            return
        results.done += [ids[i] for i in good]

    def _verify(
        self, batch: CopyBatch, blocks: list[IndexedBlock], source: Segment, deadline_s: float
    ) -> list[int]:
        """Return the positions of the blocks that are right; those are in the buffer then, where
        their source has no address.

        Raises:
            TransferTimeout: Not read in time.
        """
        if source.memory.array is None and not self._is_large(batch):
            array, places = self._own_buffer().array, batch.places()
            offsets, lengths = (
                [block.offset for block in blocks],
                [block.nbytes for block in blocks],
            )
            try:
                source.memory.read(array, pieces_between(offsets, places, lengths), deadline_s)
            except StorageFailed:
                # Which of them cannot be read is found out one by one; they are read again then.
                left = self._judge(blocks, source, deadline_s)
                self._load(blocks, places, left, source, deadline_s)
                return left
            return [
                i
                for i, (block, at) in enumerate(zip(blocks, places, strict=True))
                if verify_stored(
                    array[at : at + block.nbytes], block.length, block.checksum, block.chunk_bytes
                )
            ]
        return self._judge(blocks, source, deadline_s)

    def _judge(self, blocks: list[IndexedBlock], source: Segment, deadline_s: float) -> list[int]:
        found = [
            intact for _, intact in BlockCheck(source.memory).run(blocks, deadline_s=deadline_s)
        ]
        if len(found) < len(blocks):
            raise TransferTimeout("own segment", "read")
        return [i for i, intact in enumerate(found) if intact]

    def _load(
        self,
        blocks: list[IndexedBlock],
        places: list[int],
        chosen: list[int],
        source: Segment,
        deadline_s: float,
    ) -> None:
        for i in chosen:
            pieces = pieces_between([blocks[i].offset], [places[i]], [blocks[i].nbytes])
            source.memory.read(self._own_buffer().array, pieces, deadline_s)

    def _send(
        self,
        batch: CopyBatch,
        blocks: list[IndexedBlock],
        good: list[int],
        source: Segment,
        deadline_s: float,
    ) -> None:
        """Write the good ones, and tell the target."""
        if not good:
            return
        targets = [batch.copies[i].target_offset for i in good]
        lengths = [blocks[i].nbytes for i in good]
        if source.memory.array is not None:
            offsets = [blocks[i].offset for i in good]
            self._write(batch, source.region, pieces_between(offsets, targets, lengths), deadline_s)
        elif self._is_large(batch):
            self._stream(batch, blocks[0], source, deadline_s)
        else:
            places = batch.places()
            pieces = pieces_between([places[i] for i in good], targets, lengths)
            self._write(batch, self._own_buffer(), pieces, deadline_s)
        self._tell(batch, [(blocks[i], batch.copies[i].target_offset) for i in good])

    def _stream(
        self, batch: CopyBatch, block: IndexedBlock, source: Segment, deadline_s: float
    ) -> None:
        """Copy a block that is larger than the buffer; it was verified before."""
        region = self._own_buffer()
        for start in range(0, block.nbytes, region.nbytes):
            length = [min(region.nbytes, block.nbytes - start)]
            source.memory.read(
                region.array, pieces_between([block.offset + start], [0], length), deadline_s
            )
            target = [batch.copies[0].target_offset + start]
            self._write(batch, region, pieces_between([0], target, length), deadline_s)

    def _write(self, batch: CopyBatch, region: Region, pieces: Pieces, deadline_s: float) -> None:
        """Write into the target's segment.

        Raises:
            _InDoubt: It may still be under way.
            NodeUnreachable, StoreClosed, TransferError: It is not.
        """
        target = batch.target
        if target.node == self._engine.name:
            segment = self._own_target(target.segment)
            try:
                segment.memory.write(region.array, pieces, deadline_s)
            except TransferTimeout as error:
                raise _InDoubt from error
            return
        key = self._keys.get(target, deadline_s=deadline_s)
        try:
            transfer = self._engine.write(
                target.node,
                region,
                key,
                pieces.source_offsets,
                pieces.target_offsets,
                pieces.lengths,
                priority=Priority.MIGRATION,
                timeout_s=max(0.001, deadline_s - time.monotonic()),
            )
        except TransferTimeout as error:
            raise _InDoubt from error
        except TransferError:
            self._keys.forget(target.node)
            raise
        try:
            transfer.wait()
        except (AccessRefused, StorageFailed):
            self._keys.forget(target.node)
            raise
        except TransferError as error:
            self._keys.forget(target.node)
            logger.info("copies to %s may still be under way: %s", target.node, error)
            raise _InDoubt from error

    def _tell(self, batch: CopyBatch, written: Sequence[tuple[IndexedBlock, int]]) -> None:
        """Let the target know what lies in its segment now."""
        held = columns_of(block for block, _ in written)
        held.offsets[:] = [offset for _, offset in written]
        target = batch.target
        segment = self._segment(target.segment)
        if target.node == self._engine.name and segment is not None:
            segment.record(held)
            return
        self._engine.notify(target.node, encode_to_node(Written(held, target.segment)))

    def _target_bytes(self, batch: CopyBatch, deadline_s: float) -> int:
        target = batch.target
        if target.node == self._engine.name:
            return self._own_target(target.segment).nbytes
        return self._keys.get(target, deadline_s=deadline_s).nbytes

    def note(self, node: str, payload: bytes) -> None:
        """Tell another node something, if it can be reached."""
        try:
            self._engine.notify(node, payload)
        except TransferError as error:  # it asks again, or does without
            logger.info("answer for %s: %s", node, error)

    def _own_target(self, number: int) -> Segment:
        segment = self._segment(number)
        if segment is None:
            raise StoreClosed(what="StoreNode", problem=f"has no segment {number}")
        return segment

    def _segment(self, number: int) -> Segment | None:
        return self._segments[number] if 0 <= number < len(self._segments) else None

    def _is_large(self, batch: CopyBatch) -> bool:
        return batch.copies[0].nbytes > self._buffer_bytes

    def _own_buffer(self) -> Region:
        if self._buffer is None:
            memory = allocate(self._buffer_bytes)
            self._buffer = memory, self._engine.register(memory)
        return self._buffer[1]


def _fits(copy: Copy, nbytes: int) -> bool:
    return 0 <= copy.target_offset <= nbytes - copy.nbytes
