"""Copies blocks from the KV pool into this rank's pages, beside the rank loop.

One thread: the store's answer and the copy may take longer than a pass, and a rank that waits
for them would hold up every other rank. Requests being fetched are simply not in the pass.
"""

from __future__ import annotations

import logging
import queue
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvstore import KVStoreError
from moe_runtime.errors import MoeRuntimeError
from transfer import TransferError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore import StoreClient
    from moe_runtime.scheduler import FetchBlocks
    from transfer import Region

logger = logging.getLogger(__name__)


class FetcherFailed(MoeRuntimeError):
    """The thread that copies blocks from the pool has ended."""

    problem: str

    def _message(self) -> str:
        return f"the block fetcher has ended: {self.problem}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """The end of one fetch: the first `num_blocks` pages hold good bytes."""

    request_id: str
    num_blocks: int


class BlockFetcher:
    """Performs `FetchBlocks` instructions; results are taken by the rank loop."""

    def __init__(
        self,
        client: StoreClient,
        region: Region,
        *,
        page_bytes: int,
        timeout_s: float,
        on_fetched: Callable[[], None],
    ) -> None:
        self._client = client
        self._region = region
        self._page_bytes = page_bytes
        self._timeout_s = timeout_s
        self._on_fetched = on_fetched
        # Bounded by the scheduler: at most `max_running` requests are being fetched.
        self._requests: queue.SimpleQueue[FetchBlocks | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Fetched] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="block-fetcher", daemon=True)

    def open(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Let the fetch in progress end, and stop."""
        if self._thread.is_alive():
            self._requests.put(None)
            self._thread.join()

    def fetch(self, instruction: FetchBlocks) -> None:
        """Queue one fetch; its pages are written until the result is taken."""
        self._requests.put(instruction)

    def results(self) -> list[Fetched]:
        """Take the fetches that ended since the last call.

        Raises:
            FetcherFailed: The thread ended by an error nobody foresaw; what is queued never ends.
        """
        if self._failure is not None:
            raise FetcherFailed(problem=str(self._failure)) from self._failure
        ended = []
        while not self._results.empty():
            ended.append(self._results.get())
        return ended

    def _run(self) -> None:
        try:
            self._fetch_until_closed()
        except BaseException as error:
            # Told to the rank loop, whose requests would wait for ever.
            logger.exception("the block fetcher failed")
            self._failure = error
            self._on_fetched()

    def _fetch_until_closed(self) -> None:
        while (instruction := self._requests.get()) is not None:
            try:
                num_blocks = self._fetch(instruction)
            except (KVStoreError, TransferError) as error:
                # The pool is a cache: without it the blocks are computed again.
                logger.warning("fetch of %s from the pool: %s", instruction.request_id, error)
                num_blocks = 0
            self._results.put(Fetched(request_id=instruction.request_id, num_blocks=num_blocks))
            self._on_fetched()

    def _fetch(self, instruction: FetchBlocks) -> int:
        hit = self._client.lookup_prefix(instruction.keys, timeout_s=self._timeout_s)
        if hit.num_blocks == 0:
            return 0
        try:
            pages = instruction.pages[: hit.num_blocks]
            offsets = np.array(pages, dtype=np.int64) * self._page_bytes
            return self._client.get_into(hit, self._region, offsets)
        finally:
            self._client.release(hit)
