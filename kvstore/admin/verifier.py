"""Reads every copy of every block where it lies and compares its bytes with its checksum.

    page of blocks ─▶ copies by segment ─▶ one read per segment and window ─▶ checksums
                                                │ wrong
                                                ▼
                          the block's row again: still there, at the same place? read again

Nothing is leased, so a block may be evicted and its bytes replaced while it is read. Whether that
happened is seen afterwards: a copy is bad only if the master still names the same place for it and
a second read is wrong too, with the same row before and after.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import numpy as np
import xxhash

from kvstore.admin.reports import (
    BAD_MAX,
    BadCopy,
    BlockReport,
    CopyReport,
    VerifyOptions,
    VerifyReport,
    VerifyState,
)
from kvstore.checksum import table_bytes, verify_stored
from kvstore.client.segment_keys import SegmentKeys
from kvstore.errors import KVStoreError, NodeUnreachable
from kvstore.wire.messages import NodeAddress
from kvstore.wire.peer_messages import TO_CLIENT, decode_to_client
from transfer import Priority, TransferEngine, TransferError, allocate

if TYPE_CHECKING:
    from configs.schema import TransferConfig
    from kvstore.admin.store_admin import StoreAdmin
    from transfer import Memory, Region

logger = logging.getLogger(__name__)

PAGE_BLOCKS: Final = 512
WINDOW_BYTES: Final = 32 << 20  # read at once; a larger block is read alone
READ_S: Final = 30.0


class _Item(NamedTuple):
    block: BlockReport
    copy: CopyReport

    @property
    def nbytes(self) -> int:
        block = self.block
        return block.nbytes + table_bytes(block.nbytes, block.chunk_bytes)


class Verifier:
    """One run over the pool. Belongs to one thread; `stop` may be called by others.

    Args:
        admin: Lists the blocks.
        transfer: Of the engine that reads; it is the verifier's own.
        secret: The cluster secret.
        options: What to verify.
        on_progress: Called after each window and at the end.
    """

    def __init__(
        self,
        admin: StoreAdmin,
        transfer: TransferConfig,
        *,
        secret: bytes,
        options: VerifyOptions,
        on_progress: Callable[[VerifyReport], None],
    ) -> None:
        self._admin = admin
        self._engine = TransferEngine(transfer, name=admin.name, secret=secret)
        self._segments = SegmentKeys(self._engine, None)
        self._engine.on_notify(self._on_notify)
        self._options = options
        self._on_progress = on_progress
        self._stopping = threading.Event()
        self._memory: Memory | None = None
        self._region: Region | None = None
        self._report = VerifyReport(state=VerifyState.RUNNING)

    def stop(self) -> None:
        """End after the window that is being read."""
        self._stopping.set()

    def run(self) -> VerifyReport:
        """Verify to the end, or until stopped. Errors end it as `failed`, with what was found."""
        state, problem = VerifyState.FAILED, None
        try:
            with self._engine:
                state = self._walk()
        except (KVStoreError, TransferError, OSError) as error:
            problem = str(error)
            logger.warning("verification failed: %s", error)
        finally:
            self._tell(state=state, problem=problem)
            self._free_window()
        return self._report

    def _walk(self) -> VerifyState:
        copies = self._admin.status().totals.get("copies", 0)
        self._tell(expected_copies=round(copies * self._options.share))
        after: str | None = ""
        while after is not None:
            page = self._admin.blocks(after=after, limit=PAGE_BLOCKS)
            chosen = [block for block in page.blocks if self._is_chosen(block)]
            for window in _windows(chosen):
                if self._stopping.is_set():
                    return VerifyState.CANCELLED
                self._verify(window)
            after = page.next_after
        return VerifyState.DONE

    def _is_chosen(self, block: BlockReport) -> bool:
        if self._options.share >= 1.0:
            return True
        draw = xxhash.xxh3_64_intdigest(bytes.fromhex(block.key), seed=self._options.seed)
        return draw < self._options.share * 2**64

    def _verify(self, window: Sequence[_Item]) -> None:
        by_segment: dict[NodeAddress, list[_Item]] = {}
        for item in window:
            by_segment.setdefault(item.copy.where, []).append(item)
        for where, items in by_segment.items():
            try:
                right = self._read(where, items)
            except (NodeUnreachable, TransferError) as error:
                self._segments.forget(where.node)
                self._judge_unread(items, str(error))
                continue
            for item, is_right in zip(items, right, strict=True):
                if is_right:
                    self._count_checked(item)
                else:
                    self._judge_wrong(item)
        self._on_progress(self._report)

    def _read(self, where: NodeAddress, items: Sequence[_Item]) -> list[bool]:
        """Read copies of one segment and tell which have the bytes of their block."""
        deadline_s = time.monotonic() + READ_S
        lengths = np.array([item.nbytes for item in items], dtype=np.int64)
        targets = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
        region = self._window(int(lengths.sum()))
        self._engine.read(
            where.node,
            region,
            self._segments.get(where, deadline_s=deadline_s),
            targets,
            np.array([item.copy.offset for item in items], dtype=np.int64),
            lengths,
            priority=Priority.MIGRATION,
            timeout_s=READ_S,
        ).wait(READ_S)
        memory = region.tensor.numpy()
        return [
            verify_stored(
                memory[start : start + length],
                item.block.nbytes,
                item.block.checksum,
                item.block.chunk_bytes,
            )
            for item, start, length in zip(items, targets.tolist(), lengths.tolist(), strict=True)
        ]

    def _judge_wrong(self, item: _Item) -> None:
        """A copy's bytes were wrong: bad, or not that copy's any more?"""
        if self._is_still_there(item):
            try:
                (right,) = self._read(item.copy.where, [item])
            except (NodeUnreachable, TransferError) as error:
                self._judge_unread([item], str(error))
                return
            if right:
                self._count_checked(item)
                return
        if not self._is_still_there(item):
            self._tell(gone_copies=self._report.gone_copies + 1)
            return
        self._count_checked(item)
        self._count_bad(item, "the bytes do not match the checksum")
        if self._options.report:
            self._admin.report_corrupt(item.block.key, item.copy.where, item.copy.offset)

    def _judge_unread(self, items: Sequence[_Item], problem: str) -> None:
        for item in items:
            if self._is_still_there(item):
                self._count_bad(item, problem)
            else:
                self._tell(gone_copies=self._report.gone_copies + 1)

    def _is_still_there(self, item: _Item) -> bool:
        before = int(item.block.key, 16) - 1
        after = f"{before:032x}" if before >= 0 else ""
        rows = self._admin.blocks(after=after, limit=1).blocks
        if not rows or rows[0].key != item.block.key:
            return False
        row = rows[0]
        same = (row.nbytes, row.checksum) == (item.block.nbytes, item.block.checksum)
        return same and item.copy in row.copies

    # -- counting -----------------------------------------------------------------------------

    def _count_checked(self, item: _Item) -> None:
        self._report = msgspec.structs.replace(
            self._report,
            checked_copies=self._report.checked_copies + 1,
            checked_bytes=self._report.checked_bytes + item.nbytes,
        )

    def _count_bad(self, item: _Item, problem: str) -> None:
        where = item.copy.where
        bad = BadCopy(
            key=item.block.key,
            node=where.node,
            segment=where.segment,
            offset=item.copy.offset,
            problem=problem,
        )
        logger.warning("bad copy of %s on %s: %s", bad.key, bad.node, problem)
        self._report = msgspec.structs.replace(
            self._report,
            bad=[*self._report.bad, bad][:BAD_MAX],
            bad_copies=self._report.bad_copies + 1,
        )

    def _tell(self, **fields: object) -> None:
        self._report = msgspec.structs.replace(self._report, **fields)
        self._on_progress(self._report)

    # -- memory and notes ---------------------------------------------------------------------

    def _window(self, nbytes: int) -> Region:
        if self._region is None or self._region.nbytes < nbytes:
            self._free_window()
            self._memory = allocate(max(nbytes, WINDOW_BYTES))
            self._region = self._engine.register(self._memory)
        return self._region

    def _free_window(self) -> None:
        memory, self._memory, self._region = self._memory, None, None
        if memory is not None:
            memory.close()

    def _on_notify(self, peer: str, payload: bytes) -> None:
        if not payload.startswith(TO_CLIENT):
            return
        try:
            self._segments.receive(peer, decode_to_client(payload))
        except (msgspec.MsgspecError, TransferError) as error:
            logger.warning("malformed note from %s: %s", peer, error)


def _windows(blocks: Sequence[BlockReport]) -> Iterator[list[_Item]]:
    window: list[_Item] = []
    nbytes = 0
    for item in (_Item(block, copy) for block in blocks for copy in block.copies):
        if window and nbytes + item.nbytes > WINDOW_BYTES:
            yield window
            window, nbytes = [], 0
        window.append(item)
        nbytes += item.nbytes
    if window:
        yield window
