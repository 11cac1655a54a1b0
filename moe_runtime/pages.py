"""The KV page pool of one rank: who holds which page, and which pages hold a reusable prefix.

A page is in exactly one of three states, and the pool asserts the sum after every step of a test:

    free      no content worth keeping
    cached    nobody holds it, but it contains the full block `key`; least recently used goes first
    held      one or more holders (requests, write-through); may be published under a key too

    free + cached + held == num_pages

Pure bookkeeping: the bytes are in `models.paged_kv.PagedKV`. Not thread-safe: the rank loop's.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class PageUsage:
    """A snapshot of the pool, in pages."""

    free: int
    cached: int
    held: int


class PagePool:
    """Allocates pages, shares published prefixes, evicts the least recently used."""

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders = [0] * num_pages
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        #: published pages without a holder, oldest release first
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_pages(self) -> int:
        """Pages in all."""
        return self._num_pages

    @property
    def num_available(self) -> int:
        """Pages that `allocate` could give out now."""
        return len(self._free) + len(self._cached)

    def usage(self) -> PageUsage:
        """Counts of pages by state."""
        available = self.num_available
        return PageUsage(
            free=len(self._free), cached=len(self._cached), held=self._num_pages - available
        )

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` pages with one holder each, or None (and no change) if there are too few."""
        if count > self.num_available:
            return None
        pages = []
        for _ in range(count):
            page = self._free.pop() if self._free else self._evict_oldest()
            self._holders[page] = 1
            pages.append(page)
        return pages

    def share_prefix(self, keys: Sequence[bytes]) -> list[int]:
        """Hold the pages of the longest published run at the start of `keys`."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            self.hold(page)
            pages.append(page)
        return pages

    def hold(self, page: int) -> None:
        """Add a holder to a held or cached page."""
        assert self._holders[page] > 0 or page in self._cached, f"page {page} is free"
        self._cached.pop(page, None)
        self._holders[page] += 1

    def publish(self, page: int, key: bytes) -> bool:
        """Offer a held page, full and final, under `key`; False if another page has that key."""
        assert self._holders[page] > 0, f"page {page} is published without a holder"
        if key in self._page_of:
            return False
        assert page not in self._key_of, f"page {page} is published twice"
        self._key_of[page] = key
        self._page_of[key] = page
        return True

    def release(self, pages: Iterable[int]) -> None:
        """Drop one holder of each page; the last holder's page becomes cached or free.

        Give the pages in block order: they are cached in reverse, so that a chain loses its
        leaves before its roots.
        """
        for page in reversed(list(pages)):
            assert self._holders[page] > 0, f"page {page} is released without a holder"
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if page in self._key_of:
                self._cached[page] = None
            else:
                self._free.append(page)

    def forget_prefixes(self) -> None:
        """Drop every published key (the content may no longer be what the key says)."""
        self._free.extend(self._cached)
        self._cached.clear()
        self._key_of.clear()
        self._page_of.clear()

    def check_conservation(self) -> None:
        """Assert that every page is in exactly one state."""
        held = {page for page, holders in enumerate(self._holders) if holders}
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a page is free twice"
        assert not held & free | held & cached | free & cached, "a page is in two states"
        assert len(held) + len(free) + len(cached) == self._num_pages, "a page is lost"
        assert {self._page_of[key]: key for key in self._page_of} == self._key_of
        assert cached <= self._key_of.keys()

    def _evict_oldest(self) -> int:
        page, _ = self._cached.popitem(last=False)
        del self._page_of[self._key_of.pop(page)]
        return page
