"""Pages of KV cache that any tensor-parallel group can read, whatever group stored them.

layout  ── which bytes of a page belong to which heads, and the blocks of the pool they make
share   ── which heads a rank of a tensor-parallel group holds, and which it writes
memory  ── where those heads lie in the rank's own paged memory
paged_client ── the three together: put, lookup and read pages
"""

from __future__ import annotations

from kvstore.pages.layout import Content as Content
from kvstore.pages.layout import PageLayout as PageLayout
from kvstore.pages.memory import PagedMemory as PagedMemory
from kvstore.pages.memory import PageStrides as PageStrides
from kvstore.pages.paged_client import PagedClient as PagedClient
from kvstore.pages.paged_client import PageHit as PageHit
from kvstore.pages.share import HeadShare as HeadShare
from kvstore.pages.share import share_of as share_of
