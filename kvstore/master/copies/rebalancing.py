"""Blocks from full segments to empty ones: of a node that joined, slowly; by order, at once."""

from __future__ import annotations

from typing import Final

from configs.kvstore_policies import FillingPolicy
from kvstore.master.books.catalog import Catalog
from kvstore.master.books.copy_state import COMMITTED
from kvstore.master.books.segment import Segment
from kvstore.master.copies.copy_order import CopyOrder, Purpose
from kvstore.master.copies.copying import Copying
from kvstore.master.copies.filling import Budget, Fill, transfers
from kvstore.wire import messages as m

LOOK_S: Final = 0.5  # from one look at joined segments to the next
REBALANCED_TO: Final = 0.01  # an administrator's order brings shares this close to the mean


class Rebalancing:
    """Plans moves between segments of one medium. Not thread-safe.

    Args:
        policy: How joined nodes are filled; the pool's too, for new blocks.
        catalog: The pool's books.
        copying: Takes the orders.
    """

    def __init__(self, policy: FillingPolicy, catalog: Catalog, copying: Copying) -> None:
        self._policy = policy
        self._catalog = catalog
        self._copying = copying
        self._budget = Budget(policy.bytes_per_s)
        catalog.pool.joined.policy = policy
        self._joined: set[int] = set()
        self._look_s = 0.0

    def joined(self, segment: Segment) -> None:
        """A segment came."""
        self._joined.add(segment.index)

    def left(self, segment: Segment) -> None:
        """A segment went."""
        self._joined.discard(segment.index)

    def advance(self, now: float) -> None:
        """Move the next blocks to segments that joined."""
        if not self._joined or now < self._look_s:
            return
        self._look_s = now + LOOK_S
        nbytes_max = self._budget.left(now)
        for medium in m.Medium:
            self._fill(medium, nbytes_max, now)

    def rebalance(self, request: m.Rebalance, now: float) -> m.Reply:
        """Order moves of at most so many bytes; say how many."""
        ordered, left = 0, request.nbytes_max
        for medium in m.Medium:
            fills = self._fills(medium, now)
            plan = transfers(fills, targets=None, tolerance=REBALANCED_TO, nbytes_max=left)
            for source, target, nbytes in plan:
                number, moved = self._order(source, target, nbytes, Purpose.REBALANCE)
                ordered, left = ordered + number, left - moved
        return m.Done(ordered)

    def _fill(self, medium: m.Medium, nbytes_max: int, now: float) -> None:
        fills = self._fills(medium, now)
        capacity = sum(fill.capacity_bytes for fill in fills)
        mean = sum(fill.used_bytes for fill in fills) / capacity if capacity else 0.0
        enough = mean - self._policy.tolerance
        self._joined -= {fill.segment for fill in fills if fill.share >= enough}
        targets = [fill.segment for fill in fills if fill.segment in self._joined]
        if not targets:
            return
        plan = transfers(
            fills, targets=targets, tolerance=self._policy.tolerance, nbytes_max=nbytes_max
        )
        for source, target, nbytes in plan:
            _, moved = self._order(source, target, nbytes, Purpose.FILL)
            self._budget.spend(moved)

    def _fills(self, medium: m.Medium, now: float) -> list[Fill]:
        return [
            Fill(segment.index, segment.capacity - segment.free, segment.capacity)
            for segment in self._catalog.pool
            if segment.medium is medium
            and segment.is_told
            and segment.placeable_s <= now
            and not segment.node.draining
        ]

    def _order(self, source: int, target: int, nbytes: int, purpose: Purpose) -> tuple[int, int]:
        """Order moves of about so many bytes, not more; return how many and of how many bytes."""
        table = self._catalog.table
        ordered = moved = 0
        for row in table.rows_in(source, COMMITTED):
            if moved >= nbytes:
                break
            space = table.space[row]
            if moved + space > nbytes or not self._fits_there(row, target):
                continue
            order = CopyOrder(key=table.keys[row], source=source, purpose=purpose, target=target)
            if self._copying.order(order):
                ordered, moved = ordered + 1, moved + space
        return ordered, moved

    def _fits_there(self, row: int, target: int) -> bool:
        """Tell whether the block's other copies are on other failure domains than the target."""
        catalog = self._catalog
        domain = catalog.pool.segments[target].node.domain
        others = [copy for copy in catalog.copies(catalog.table.keys[row]) if copy != row]
        return all(catalog.pool.of(copy).node.domain != domain for copy in others)
