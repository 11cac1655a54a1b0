"""One rank's access to pages in the pool.

writers   TP rank 0: group 0 ─┐                  ┌─▶ group 0, 1 : rank 0 of 1
          TP rank 1: group 1 ─┴─▶ blocks in pool ┴─▶ group 1    : rank 1 of 2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvstore.client.pieces import Pieces
from kvstore.client.put_options import DEFAULT, PutOptions, check_options
from kvstore.errors import InvalidValue
from kvstore.keys import prefix_keys
from kvstore.pages.gathering import BUFFER_BYTES_MAX, are_small, gather, scatter
from kvstore.pages.layout import PageLayout
from kvstore.pages.memory import PagedMemory, PagePieces
from kvstore.pages.share import share_of
from kvstore.wire.messages import PutOutcome

if TYPE_CHECKING:
    from kvstore.client.chain import Chain
    from kvstore.client.locations import Hit
    from kvstore.client.store_client import StoreClient

IN_POOL = frozenset({PutOutcome.STORED, PutOutcome.EXISTS})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PageHit:
    """The leading pages of a lookup of which all of the rank's heads are in the pool, leased.

    Attributes:
        num_pages: How many.
        hit: Their blocks, and those of the first page that is not complete.
    """

    num_pages: int
    hit: Hit


class PagedClient:
    """Puts and reads this rank's heads of pages. Thread-safe.

    Args:
        client: Access to the pool.
        layout: The same on all ranks of all groups that share pages.
        memory: This rank's paged KV cache.
        rank: Of the tensor-parallel group.
        size: Ranks in the group.
        salt: Separates users that must not see each other's pages.

    Raises:
        InvalidValue: The heads do not split that way.
    """

    def __init__(
        self,
        client: StoreClient,
        layout: PageLayout,
        memory: PagedMemory,
        *,
        rank: int = 0,
        size: int = 1,
        salt: str = "",
    ) -> None:
        self.share = share_of(layout, rank=rank, size=size)
        self._client = client
        self._layout = layout
        self._namespace = layout.namespace(salt)
        self._pieces = PagePieces(layout, self.share, memory)

    def keys(self, token_ids: Sequence[int], *, parent: bytes | None = None) -> list[bytes]:
        """Return the keys of the full pages of a sequence; the same on every rank."""
        return prefix_keys(
            token_ids,
            block_tokens=self._layout.block_tokens,
            namespace=self._namespace,
            parent=parent,
        )

    def put(
        self,
        page_keys: Sequence[bytes],
        pages: Sequence[int] | npt.NDArray[np.int64],
        *,
        options: PutOptions = DEFAULT,
        timeout_s: float | None = None,
    ) -> list[bool]:
        """Store this rank's heads of pages. A page can be read once all ranks have done so.

        Args:
            page_keys: From `keys`.
            pages: [N] numbers of pages in this rank's memory.
            options: As of `StoreClient.put`, for every block; but a `chain` tells what the pages
                are, whatever number of blocks each has. All ranks may give it, who holds the first
                heads tells it.
            timeout_s: For the whole call.

        Returns:
            Which pages are in the pool now as far as this rank's heads go. All, and nothing is
            sent, if another rank holds the same heads and writes them.
        """
        _check_pages(page_keys, pages)
        check_options(options)
        if not self.share.writes or not page_keys:
            return [True] * len(page_keys)
        count = len(self.share.groups)
        outcomes: list[PutOutcome] = []
        deadline_s = self._client.core.deadline(timeout_s)
        if options.chain is not None:
            self._describe(page_keys, options.chain, deadline_s)
            options = replace(options, chain=None)
        for part in self._parts(len(pages)):
            keys = self._layout.keys(page_keys[part], self.share.groups)
            left_s = self._client.core.left(deadline_s)
            outcomes += self._put(keys, self._pieces.of(pages[part]), options, left_s)
        return [
            all(outcome in IN_POOL for outcome in outcomes[i : i + count])
            for i in range(0, len(outcomes), count)
        ]

    def lookup(self, page_keys: Sequence[bytes], *, timeout_s: float | None = None) -> PageHit:
        """Find the longest leading run of pages, and lease it; to be released.

        The ranks of a group may find runs of different lengths, if some of a writer's ranks had
        not stored theirs, or other blocks were evicted: the least of them is what all can read.
        """
        keys = self._layout.keys(page_keys, self.share.groups)
        hit = self._client.lookup_prefix(keys, timeout_s=timeout_s)
        return PageHit(num_pages=hit.num_blocks // len(self.share.groups), hit=hit)

    def read(
        self,
        hit: PageHit,
        pages: Sequence[int] | npt.NDArray[np.int64],
        *,
        timeout_s: float | None = None,
    ) -> int:
        """Read the leading pages of a hit into this rank's memory.

        Args:
            hit: From `lookup`.
            pages: [N <= num_pages] numbers of pages in this rank's memory.
            timeout_s: For the whole call.

        Returns:
            How many leading pages are there, whole and verified.

        Raises:
            LeaseExpired: Nothing of it counts (retryable).
        """
        if len(pages) > hit.num_pages:
            raise InvalidValue(problem=f"{len(pages)} pages wanted of {hit.num_pages}")
        if not len(pages):
            return 0
        num_good = 0
        deadline_s = self._client.core.deadline(timeout_s)
        for part in self._parts(len(pages)):
            pieces = self._pieces.of(pages[part], first=part.start)
            good = self._read(hit.hit, pieces, self._client.core.left(deadline_s))
            num_good = min(good // len(self.share.groups), part.stop)
            if num_good < part.stop:
                break
        return num_good

    def release(self, hit: PageHit) -> None:
        """End the lease of a hit."""
        self._client.release(hit.hit)

    def _describe(self, page_keys: Sequence[bytes], chain: Chain, deadline_s: float) -> None:
        """Say what pages are, of which a first block goes by the page's own key."""
        links = chain.links(page_keys)
        if 0 in self.share.groups:
            left_s = self._client.core.left(deadline_s)
            self._client.describe(page_keys, links, timeout_s=left_s)

    def _put(
        self, keys: list[bytes], pieces: Pieces, options: PutOptions, timeout_s: float
    ) -> tuple[PutOutcome, ...]:
        if not are_small(pieces):
            return self._client.put_pieces(keys, pieces, options, timeout_s=timeout_s)
        nbytes = self._layout.block_bytes
        with self._client.core.staging.borrow(len(keys) * nbytes) as buffer:
            gather(pieces, buffer, nbytes)
            places = np.arange(len(keys)) * nbytes
            return self._client.put(
                keys, buffer, places, nbytes, options=options, timeout_s=timeout_s
            )

    def _read(self, hit: Hit, pieces: Pieces, timeout_s: float) -> int:
        """Return how many leading blocks of the hit are good, as far as the pieces go."""
        if not are_small(pieces):
            return self._client.copy(hit, pieces, timeout_s=timeout_s).num_good
        nbytes = self._layout.block_bytes
        first, last = int(pieces.blocks[0]), int(pieces.blocks[-1])
        blocks = np.arange(first, last + 1)
        with self._client.core.staging.borrow(len(blocks) * nbytes) as buffer:
            lengths = np.full(len(blocks), nbytes, dtype=np.int64)
            whole = Pieces.of_blocks(buffer, np.arange(len(blocks)) * nbytes, lengths)
            copied = self._client.copy(hit, whole.naming(blocks), timeout_s=timeout_s)
            good = pieces.of(np.flatnonzero(pieces.blocks < copied.num_good))
            if len(good):
                scatter(good.naming(good.blocks - first), buffer, nbytes)
        return copied.num_good

    def _parts(self, num_pages: int) -> list[slice]:
        """Split pages so that one part's blocks fit into a buffer."""
        page_bytes = self._layout.block_bytes * len(self.share.groups)
        step = max(1, BUFFER_BYTES_MAX // page_bytes)
        return [slice(i, min(i + step, num_pages)) for i in range(0, num_pages, step)]


def _check_pages(page_keys: Sequence[bytes], pages: Sequence[int] | npt.NDArray[np.int64]) -> None:
    if len(page_keys) != len(pages):
        raise InvalidValue(problem=f"{len(page_keys)} keys of {len(pages)} pages")
