"""Full blocks go to the pool behind the rank loop's back.

    rank loop ── submit ─▶ bounded queue ─▶ one thread ── put, many blocks at once ─▶ pool
        ▲                                        │
        └──────────── release(), once per submission, when its bytes are not needed any more

The pool is a cache: what does not fit into the queue is skipped, what cannot be stored is counted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from kvstore.errors import KVStoreError, StoreClosed
from kvstore.timeouts import check_timeout
from kvstore.wire.messages import PutOutcome
from transfer import TransferError

if TYPE_CHECKING:
    from kvstore.client.store_client import StoreClient
    from kvstore.events.chains import Link, Links
    from transfer import Region

logger = logging.getLogger(__name__)

BATCH_BLOCKS_MAX: Final = 64


@dataclass(slots=True, eq=False)
class _Submission:
    keys: list[bytes]
    offsets: list[int]
    release: Callable[[], None]
    links: list[Link]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteThroughStatistics:
    """Blocks since the start: `submitted == skipped + stored + not_stored`, once none wait.

    `skipped` found the queue full. `not_stored` covers those that were in the pool already.
    """

    submitted: int
    skipped: int
    stored: int
    not_stored: int
    waiting: int


class WriteThrough:
    """A bounded queue and one thread that puts blocks. All methods are thread-safe.

    Args:
        client: Puts the blocks. Closed by its owner, after this.
        region: Where all blocks lie.
        block_bytes: Size of every block.
        queue_blocks: Most blocks waiting or being written (`KVStoreConfig.put_queue_blocks`).
    """

    def __init__(
        self, client: StoreClient, region: Region, *, block_bytes: int, queue_blocks: int
    ) -> None:
        self._client = client
        self._region = region
        self._block_bytes = block_bytes
        self._queue_blocks = queue_blocks
        self._changed = threading.Condition()
        self._queue: deque[_Submission] = deque()
        self._waiting = 0  # blocks queued or being written
        self._counts = {"submitted": 0, "skipped": 0, "stored": 0, "not_stored": 0}
        self._failing = False
        self._closed = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="write-through", daemon=True)

    def open(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the put in progress, skip what waits, and stop. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        self._skip_all()

    def __enter__(self) -> WriteThrough:
        self.open()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def submit(
        self,
        keys: Sequence[bytes],
        offsets: Sequence[int] | npt.NDArray[np.int64],
        *,
        links: Sequence[Link] = (),
        release: Callable[[], None] = lambda: None,
    ) -> int:
        """Queue blocks to be stored. Never blocks.

        The leading blocks that fit are taken, the others skipped: a chain without its root is of
        no use. `links`, if there are any, say of each what it is, for subscribers of events. The
        bytes must stay as they are until `release` is called, which happens exactly
        once, whatever comes: on this thread if nothing was taken, else on the writer's. It must
        be short.

        Returns:
            How many blocks were taken.

        Raises:
            StoreClosed: Closed, or the thread failed (then the cause is chained).
        """
        places = np.asarray(offsets, dtype=np.int64).tolist()
        if len(places) != len(keys):
            raise ValueError(f"{len(keys)} keys, {len(places)} offsets")
        with self._changed:
            ended = self._closed or self._failure is not None
            taken = 0 if ended else min(len(keys), self._queue_blocks - self._waiting)
            self._counts["submitted"] += len(keys)
            self._counts["skipped"] += len(keys) - taken
            if taken:
                self._waiting += taken
                submission = _Submission(
                    list(keys[:taken]), places[:taken], release, list(links[:taken])
                )
                self._queue.append(submission)
                self._changed.notify_all()
        if not taken:
            release()
        if ended:
            problem = str(self._failure or "closed")
            raise StoreClosed(what="WriteThrough", problem=problem) from self._failure
        return taken

    def flush(self, timeout_s: float) -> bool:
        """Wait until nothing is waiting or being written; False at the deadline."""
        check_timeout(timeout_s)
        with self._changed:
            return self._changed.wait_for(
                lambda: self._waiting == 0 or self._failure is not None, timeout=timeout_s
            ) and (self._waiting == 0)

    def statistics(self) -> WriteThroughStatistics:
        """Return the counts."""
        with self._changed:
            return WriteThroughStatistics(**self._counts, waiting=self._waiting)

    def _run(self) -> None:
        try:
            while (batch := self._next_batch()) is not None:
                self._write(batch)
        except BaseException as error:
            # Told to whoever submits next; the pages of what waits are given back at once.
            logger.exception("the write-through thread failed")
            with self._changed:
                self._failure = error
                self._changed.notify_all()
            self._skip_all()

    def _next_batch(self) -> list[_Submission] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            if self._closed:
                return None
            batch = [self._queue.popleft()]
            size = len(batch[0].keys)
            while self._queue and size + len(self._queue[0].keys) <= BATCH_BLOCKS_MAX:
                size += len(self._queue[0].keys)
                batch.append(self._queue.popleft())
            return batch

    def _write(self, batch: list[_Submission]) -> None:
        # A key twice in one put would only be in its own way.
        blocks = {k: at for s in batch for k, at in zip(s.keys, s.offsets, strict=True)}
        links = {k: link for s in batch if s.links for k, link in zip(s.keys, s.links, strict=True)}
        stored = 0
        try:
            stored = self._put(list(blocks), list(blocks.values()), links)
        finally:
            size = sum(len(submission.keys) for submission in batch)
            with self._changed:
                self._counts["stored"] += stored
                self._counts["not_stored"] += size - stored
            self._release(batch)

    def _put(self, keys: list[bytes], offsets: list[int], links: Links) -> int:
        started_s = time.monotonic()
        try:
            if links:
                self._client.describe(list(links), list(links.values()))
            outcomes = self._client.put(keys, self._region, offsets, self._block_bytes)
        except (KVStoreError, TransferError) as error:
            if not self._failing:
                logger.warning("write-through to the pool fails: %s", error)
            self._failing = True
            return 0
        if self._failing:
            logger.warning("write-through to the pool works again")
        self._failing = False
        stored = outcomes.count(PutOutcome.STORED)
        logger.debug(
            "%s of %s blocks stored in %.1f ms",
            stored,
            len(keys),
            1e3 * (time.monotonic() - started_s),
        )
        return stored

    def _skip_all(self) -> None:
        with self._changed:
            skipped, self._queue = list(self._queue), deque()
            self._counts["skipped"] += sum(len(submission.keys) for submission in skipped)
        self._release(skipped)

    def _release(self, ended: list[_Submission]) -> None:
        try:
            with ExitStack() as stack:  # one that raises does not keep the others
                for submission in ended:
                    stack.callback(submission.release)
        finally:
            with self._changed:
                self._waiting -= sum(len(submission.keys) for submission in ended)
                self._changed.notify_all()
