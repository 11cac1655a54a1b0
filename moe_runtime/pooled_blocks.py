"""The rank's traffic with the KV pool: full blocks are written through, missing ones copied in.

Both directions run on threads beside the rank loop. What they return (pages that may be used
again, fetches that ended) waits in queues until the rank loop takes it: the loop alone changes
the scheduler and the page pool.
"""

from __future__ import annotations

import logging
import queue
from typing import TYPE_CHECKING

import numpy as np

from moe_runtime.block_fetcher import BlockFetcher, Fetched

if TYPE_CHECKING:
    from kvstore import WriteThrough
    from moe_runtime.scheduler import FetchBlocks, StoreBlock

logger = logging.getLogger(__name__)


class PooledBlocks:
    """Write-through and fetch of KV pages; the methods belong to the rank loop's thread."""

    def __init__(self, writer: WriteThrough, fetcher: BlockFetcher, *, page_bytes: int) -> None:
        self._writer = writer
        self._fetcher = fetcher
        self._page_bytes = page_bytes
        self._stored: queue.SimpleQueue[list[int]] = queue.SimpleQueue()

    def store(self, blocks: list[StoreBlock]) -> None:
        """Queue full blocks for the pool; their pages come back through `stored_pages`."""
        pages = [block.page for block in blocks]
        self._writer.submit(
            [block.key for block in blocks],
            np.array(pages, dtype=np.int64) * self._page_bytes,
            release=lambda: self._stored.put(pages),
        )

    def stored_pages(self) -> list[int]:
        """Pages whose bytes have been read (or given up) since the last call."""
        pages: list[int] = []
        while not self._stored.empty():
            pages.extend(self._stored.get())
        return pages

    def fetch(self, instruction: FetchBlocks) -> None:
        """Start copying a request's missing blocks in."""
        self._fetcher.fetch(instruction)

    def fetched(self) -> list[Fetched]:
        """Fetches that ended since the last call."""
        return self._fetcher.results()
