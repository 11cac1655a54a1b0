"""How many copies a block should have: as many as its writer made, and more if it is read a lot."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from configs.kvstore_policies import HotBlockPolicy
from kvstore.master.books.catalog import Catalog
from kvstore.master.copies.copy_order import CopyOrder, Purpose
from kvstore.master.copies.copying import Copying
from kvstore.master.copies.hot_blocks import HotBlocks
from kvstore.wire.messages import Medium

LOST_MAX: Final = 1 << 16  # blocks remembered that lost a copy
ORDERED_PER_STEP: Final = 256


class Replication:
    """Orders copies of blocks that have too few. Not thread-safe.

    Args:
        catalog: The pool's books.
        copying: Takes the orders.
        hot: When reads earn a copy.
    """

    def __init__(self, catalog: Catalog, copying: Copying, hot: HotBlockPolicy) -> None:
        self._catalog = catalog
        self._copying = copying
        self._replicas_max = hot.replicas_max
        self._hot = HotBlocks(hits=hot.hits, window_s=hot.window_s)
        #: copies wanted of blocks of which their writer made several; read it only
        self.several: dict[bytes, int] = {}
        self._lost: deque[bytes] = deque(maxlen=LOST_MAX)
        self._earned: deque[bytes] = deque(maxlen=LOST_MAX)

    @property
    def watches_hits(self) -> bool:
        """Whether `hit` has to be told anything."""
        return self._hot.enabled

    def wanted(self, key: bytes) -> int:
        """Return how many copies a block's writer made."""
        return self.several.get(key, 1)

    def stored(self, row: int) -> None:
        """A writer's copy was committed."""
        table = self._catalog.table
        if table.sibling[row] != row:
            key = table.keys[row]
            self.several[key] = max(self.wanted(key), len(table.copies(row)))

    def hit(self, rows: Sequence[int], now: float) -> None:
        """Copies were given to a reader."""
        keys = self._catalog.table.keys
        self._earned.extend(self._hot.hit([keys[row] for row in rows], now))

    def dropped(self, row: int, *, evicted: bool) -> None:
        """A copy is about to be none any more."""
        key = self._catalog.table.keys[row]
        if key not in self.several:
            return
        if self._catalog.table.sibling[row] == row:  # the last: who stores it anew says how many
            del self.several[key]
        elif evicted:  # to make room: it is not wanted that much
            left = self.several[key] - 1
            if left > 1:
                self.several[key] = left
            else:
                del self.several[key]
        else:
            self._lost.append(key)

    def advance(self) -> None:
        """Order what is missing; what cannot be ordered now is not forgotten by its readers."""
        for _ in range(min(len(self._lost), ORDERED_PER_STEP)):
            self._replace(self._lost.popleft())
        for _ in range(min(len(self._earned), ORDERED_PER_STEP)):
            self._spread(self._earned.popleft())

    def _replace(self, key: bytes) -> None:
        rows = self._catalog.copies(key)
        if not rows:  # removed, or lost with its last copy
            self.several.pop(key, None)
        elif len(rows) < self.wanted(key):
            if self._copying.purpose_of(key) is not None:
                self._lost.append(key)  # after that one
            else:
                self._order(key, rows[0], Purpose.REPLICATE)

    def _spread(self, key: bytes) -> None:
        rows = self._catalog.copies(key)
        pool = self._catalog.pool
        fast = [row for row in rows if pool.of(row).medium is not Medium.SSD]
        if fast and len(rows) < self._replicas_max:
            self._order(key, fast[0], Purpose.SPREAD)

    def _order(self, key: bytes, row: int, purpose: Purpose) -> None:
        source = self._catalog.table.segment[row]
        self._copying.order(CopyOrder(key=key, source=source, purpose=purpose))
