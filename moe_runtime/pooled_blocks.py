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

from kvstore.events.chains import link_of
from moe_runtime.block_fetcher import BlockFetcher, Fetched

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore import WriteThrough
    from moe_runtime.scheduler import FetchBlocks, StoreBlock

logger = logging.getLogger(__name__)


class PooledBlocks:
    """Write-through and fetch of KV pages; the methods belong to the rank loop's thread.

    Args:
        writer: Open; closed by its owner.
        fetcher: Likewise.
        page_bytes: Of one page, which is one block.
        on_stored: Called on the writer's thread when pages came back: a request may wait for them.
        pool_counters: What else this rank counts at its ends of the pool.
    """

    def __init__(
        self,
        writer: WriteThrough,
        fetcher: BlockFetcher,
        *,
        page_bytes: int,
        on_stored: Callable[[], None],
        pool_counters: Callable[[], dict[str, float]] = dict,
    ) -> None:
        self._writer = writer
        self._fetcher = fetcher
        self._page_bytes = page_bytes
        self._on_stored = on_stored
        self._pool_counters = pool_counters
        self._stored: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
        self._num_fetched = 0

    def store(self, blocks: list[StoreBlock]) -> None:
        """Queue full blocks for the pool; their pages come back through `stored_pages`."""
        pages = [block.page for block in blocks]

        def release() -> None:
            self._stored.put(pages)
            self._on_stored()

        self._writer.submit(
            [block.key for block in blocks],
            np.array(pages, dtype=np.int64) * self._page_bytes,
            links=[link_of(block.tokens, block.parent) for block in blocks],
            release=release,
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
        ended = self._fetcher.results()
        self._num_fetched += sum(fetch.num_blocks for fetch in ended)
        return ended

    def counters(self) -> dict[str, float]:
        """Blocks moved so far, for the rank's report."""
        written = self._writer.statistics()
        return self._pool_counters() | {
            "pool_blocks_stored": float(written.stored),
            "pool_blocks_skipped": float(written.skipped),
            "pool_blocks_fetched": float(self._num_fetched),
        }
