"""What the master does by itself: it watches the pool, and orders copies.

    Tiering       victims of DRAM to the SSD, what is hit there back
    Replication   copies that were lost with a node; further ones of what is read very often
    Rebalancing   joined nodes get their share, slowly; an administrator's order
    Draining      everything away from a node
       └──▶ Copying: who makes which copy when ──▶ NextCopies

Notes are taken in the middle of a step (`PoolObserver`); orders follow at the start of the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from configs.kvstore_policies import PolicyConfig
from kvstore import row_loops
from kvstore.master.books.catalog import Catalog
from kvstore.master.books.segment import Segment
from kvstore.master.copies.copy_order import CopyOrder, Outcome, Purpose
from kvstore.master.copies.copy_pool import CatalogCopies
from kvstore.master.copies.copying import Copying
from kvstore.master.copies.draining import Draining
from kvstore.master.copies.rebalancing import Rebalancing
from kvstore.master.copies.replication import Replication
from kvstore.master.copies.targets import Targets
from kvstore.master.copies.tiering import Tiering
from kvstore.master.transition import Transition
from kvstore.wire import messages as m

TICK_S: Final = 0.02  # policies look at the pool no more often


class Planning:
    """Copies by the master's order; see `MasterPart` and `PoolObserver`.

    Args:
        catalog: The pool's books.
        policies: The configured ones.
    """

    def __init__(self, catalog: Catalog, policies: PolicyConfig) -> None:
        self._catalog = catalog
        self._copies = CatalogCopies(catalog)
        self._copying = Copying(
            policies.copies,
            self._copies,
            targets=Targets(catalog),
            ended=self._ended,
            nodes_with_work=catalog.nodes_with_work,
        )
        self._tiering = Tiering(policies.tiers, catalog, self._copying)
        self._replication = Replication(catalog, self._copying, policies.hot_blocks)
        self._rebalancing = Rebalancing(policies.filling, catalog, self._copying)
        self._draining = Draining(catalog, self._copying, wanted=self._replication.wanted)
        self._now = 0.0
        self._tick_s = 0.0
        self._is_reporting = False
        self._watches_hits = self._replication.watches_hits
        # Looked at for every copy that comes or goes: calls only where there is something to note.
        self._siblings = catalog.table.sibling
        self._keys, self._segments = catalog.table.keys, catalog.table.segment
        self._several = self._replication.several
        self._told: dict[str, tuple[int, list[m.Copy]]] = {}  # the last turn of each node
        catalog.observers.append(self)

    def transitions(self) -> Mapping[type, Transition]:
        """Return what carries out which type of request."""
        return {
            m.NextCopies: self._next_copies,
            m.Drain: self._draining.drain,
            m.Rebalance: self._rebalancing.rebalance,
        }

    def advance(self, now: float) -> float:
        """Order what the pool needs, some of it at a time."""
        self._now = now
        if now < self._tick_s:
            return self._tick_s
        self._tick_s = now + TICK_S
        self._copying.expire(now)
        self._draining.advance(now)
        self._replication.advance()
        self._tiering.advance(now)
        self._rebalancing.advance(now)
        return self._tick_s

    def check_invariants(self) -> None:
        """Raise InvariantViolated unless the books of copies are right."""
        self._copying.check_invariants()

    @property
    def counts(self) -> Mapping[tuple[Purpose, Outcome], int]:
        """How many orders of each purpose ended how."""
        return self._copying.counts

    def _next_copies(self, request: m.NextCopies, now: float) -> m.Reply:
        node = self._catalog.pool.node(request.node)
        if node is None:
            return m.Refused(m.RefusalReason.UNKNOWN_NODE, f"no node {request.node}")
        self._catalog.pool.hear(node, now)
        turn, told = self._told.get(request.node, (0, []))
        if request.turn and request.turn == turn:
            return m.Copies([c for c in told if self._copies.is_open(c.copy_id)])
        self._catalog.counts["corrupt"] += len(request.corrupt)
        self._is_reporting = True
        try:
            self._copying.finish(
                request.node,
                done=request.done,
                failed=request.failed,
                corrupt=request.corrupt,
                now=now,
            )
        finally:
            self._is_reporting = False
        again_s = self._tiering.advance_node(request.node, now) if request.limit else 0.0
        started = self._copying.start(request.node, limit=request.limit, now=now)
        orders = []
        for copy in started:
            row = self._copies.row_in(copy.order.key, copy.order.source)
            order = None if row is None else self._copies.describe(copy.copy_id, row, copy.target)
            if order is not None:
                orders.append(order)
        self._told[request.node] = (request.turn, orders)
        return m.Copies(orders, again_s)

    def _ended(self, order: CopyOrder, outcome: Outcome) -> None:
        if outcome is Outcome.DONE:
            self._catalog.counts[order.purpose.counted_as] += 1
        if order.purpose is Purpose.DRAIN:
            self._draining.ended(order, outcome)
        elif order.purpose is Purpose.DEMOTE:
            self._tiering.ended(order, outcome)

    # -- notes of the catalog -----------------------------------------------------------------

    def stored(self, rows: Sequence[int]) -> None:
        """Copies were committed."""
        siblings = self._siblings
        if row_loops.all_own(siblings, rows):
            return
        for row in rows:
            if siblings[row] != row and not self._is_reporting:
                self._replication.stored(row)

    def hit(self, rows: Sequence[int]) -> None:
        """Copies were given to a reader."""
        if self._watches_hits:
            self._tiering.hit(rows, self._now)
            self._replication.hit(rows, self._now)

    def evicted(self, rows: Sequence[int]) -> None:
        """Copies make room."""
        if self._copying:
            for row in rows:
                self._copying.dropped(self._keys[row], self._segments[row])
        if self._several:
            for row in rows:
                self._replication.dropped(row, evicted=True)

    def dropped(self, row: int) -> None:
        """A copy is none any more."""
        if self._copying:
            self._copying.dropped(self._keys[row], self._segments[row])
        if self._several:
            self._replication.dropped(row, evicted=False)

    def joined(self, segment: Segment) -> None:
        """A segment came."""
        self._tiering.joined(segment)
        self._rebalancing.joined(segment)
        self._watch()

    def left(self, segment: Segment) -> None:
        """A segment went, and its node with it."""
        self._tiering.left(segment)
        self._rebalancing.left(segment)
        self._draining.forget(segment.node.name)
        self._copying.lose_node(segment.node.name)
        self._copies.forget_node(segment.node.name)
        self._told.pop(segment.node.name, None)
        self._watch()

    def _watch(self) -> None:
        self._watches_hits = self._tiering.watches_hits or self._replication.watches_hits
