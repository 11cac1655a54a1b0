"""The index of one segment, with or without a log beside it, for many threads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kvstore.node.block_columns import BlockColumns
from kvstore.node.index_log import IndexLog
from kvstore.node.indexed_block import IndexedBlock, blocks_of
from kvstore.node.node_index import NodeIndex
from kvstore.wire.messages import HeldBlocks
from transfer import StorageFailed

logger = logging.getLogger(__name__)

PENDING_BYTES_MAX: Final = 4 << 20
# A log is replaced by a shorter one when it has grown to twice the size of the last, and this.
SPARE_BYTES: Final = 1 << 20
COLUMNS_MIN: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexFigures:
    """An index now. `log_suspended`: the disk took no more records, the file tells nothing."""

    blocks: int
    held_bytes: int
    log_bytes: int
    log_suspended: bool


class KeptIndex:
    """What is remembered of a segment. Thread-safe.

    What writers say is noted at once and goes to the log a moment later, by `flush`, on a thread
    that may wait for a disk. What is overwritten goes there *before* the bytes do:

        forget_range ── FORGET in the log ── bytes ── Written ── record ── PUT in the log
                                               ▲ killed here: the old block is not offered

    If the disk takes no more records the log is cut to nothing, which needs no space: rather tell
    nothing after a restart than something wrong. `flush` tries again to write it whole.

    Args:
        index: What is known already.
        log: Where it is kept; open, and closed by this object. None: nowhere.
    """

    def __init__(self, index: NodeIndex, log: IndexLog | None = None) -> None:
        self._index = index
        self._log = log
        self._lock = threading.Lock()  # of the index and of what is pending; short
        self._file = threading.Lock()  # of the log; held while a disk is waited for
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._suspended = False
        self._replace_above = SPARE_BYTES
        self._closed = False

    @property
    def is_kept(self) -> bool:
        """Whether there is a log, which `flush` brings up to date."""
        return self._log is not None

    def record(self, held: HeldBlocks, told_ns: int = 0) -> int:
        """Enter what a writer says at a time; return how many were possible."""
        if self._log is None:
            with self._lock:
                return self._index.record_all(held, told_ns)
        with self._lock:
            # Columns take longer than a few blocks.
            few = len(held.keys) < COLUMNS_MIN
            columns = None if few else BlockColumns.of(held, self._index.nbytes, told_ns)
            if columns is not None:
                entered = self._index.enter(columns)
                self._note(self._log.put_records(columns.rows))
            else:
                entered = 0
                for block in blocks_of(held, told_ns):
                    if self._index.record(block):
                        entered += 1
                        self._note(self._log.put_record(block))
            full = self._pending_bytes > PENDING_BYTES_MAX
        if full:
            self.flush()
        return entered

    def forget_range(self, low: int, high: int) -> int:
        """Forget what lies there, and let the log know before this returns."""
        return self.forget_ranges([(low, high)])

    def forget_ranges(self, ranges: Iterable[tuple[int, int]]) -> int:
        """As `forget_range`, of many with one write of the log; return how many blocks."""
        num_forgotten = 0
        with self._lock:
            for low, high in ranges:
                forgotten = self._index.forget_range(low, high)
                if forgotten and self._log is not None:
                    self._note(self._log.forget_record(low, high))
                num_forgotten += forgotten
        if num_forgotten:
            self.flush()
        return num_forgotten

    def forget(self, block: IndexedBlock) -> bool:
        """Forget this very block; False if it is gone or replaced already."""
        with self._lock:
            found = self._index.forget(block)
            if found and self._log is not None:
                self._note(self._log.forget_record(block.offset, block.end))
            return found

    def set_pinned(self, offset: int, key: bytes, *, pinned: bool) -> None:
        """Remember whether a block is pinned, unless another lies there."""
        with self._lock:
            block = self._index.at(offset)
            if block is None or block.key != key or block.pinned == pinned:
                return
            block.pinned = pinned
            if self._log is not None:
                self._note(self._log.put_record(block))

    def holds(self, block: IndexedBlock) -> bool:
        """Whether this very block is still what lies there."""
        with self._lock:
            return self._index.at(block.offset) is block

    def at(self, offset: int) -> IndexedBlock | None:
        """Return the block that starts there."""
        with self._lock:
            return self._index.at(offset)

    def after(self, offset: int, limit: int) -> list[IndexedBlock]:
        """Return up to `limit` blocks that start at `offset` or behind it."""
        with self._lock:
            return self._index.after(offset, limit)

    def blocks(self) -> list[IndexedBlock]:
        """Return all blocks, by offset."""
        with self._lock:
            return list(self._index)

    def figures(self) -> IndexFigures:
        """Return the figures."""
        with self._lock:
            return IndexFigures(
                blocks=len(self._index),
                held_bytes=self._index.held_bytes,
                log_bytes=0 if self._log is None else self._log.size,
                log_suspended=self._suspended,
            )

    def flush(self, *, sync: bool = False, retry: bool = False) -> None:
        """Bring the log up to date; replace it where it has grown too long. May wait for a disk.

        Args:
            sync: Let it survive a power cut.
            retry: Try again to write a log that the disk did not take.
        """
        log = self._log
        if log is None:
            return
        with self._file:
            if self._closed:
                return
            try:
                with self._lock:
                    records = b"".join(self._pending)
                    self._pending, self._pending_bytes = [], 0
                    if self._suspended and not retry:
                        return
                    grown = log.size + len(records) > self._replace_above
                    whole = list(self._index) if grown or self._suspended else None
                if whole is not None:
                    self._replace(log, whole, records)
                elif records:
                    log.append(records)
                if sync and not self._suspended:
                    log.sync()
            except StorageFailed as error:
                self._suspend(log, error)

    def close(self) -> None:
        """Write what is pending, make it durable, and give the file back; idempotent."""
        self.flush(sync=True)
        with self._file:
            self._closed = True
            if self._log is not None:
                self._log.close()

    def _note(self, record: bytes) -> None:
        self._pending.append(record)
        self._pending_bytes += len(record)

    def _replace(self, log: IndexLog, whole: list[IndexedBlock], records: bytes) -> None:
        try:
            log.replace(log.slab_id, whole)
        except StorageFailed:
            if self._suspended:
                raise
            log.append(records)  # there is no room for two, but there may be for a longer one
            self._replace_above = 2 * log.size
            return
        self._replace_above = 2 * log.size + SPARE_BYTES
        if self._suspended:
            logger.info("the index %s is complete again", log.path)
        self._suspended = False

    def _suspend(self, log: IndexLog, error: StorageFailed) -> None:
        if not self._suspended:
            logger.warning("%s; until it works again a restart finds no blocks here", error)
        self._suspended = True
        try:
            log.cut()
        except StorageFailed:
            # Not even cut: then only the checksums keep what is stale from being believed.
            logger.exception("the index %s cannot be cut", log.path)
