"""Everything away from a node, so that it can go: copies elsewhere first, then drops.

    Drain ─▶ node.draining: nothing new is placed there
          ─▶ its blocks, a part at a time ─▶ copy elsewhere ─▶ drop here
                                               │ no node, no failure domain, or no room for it
                                               ▼
                                             stuck: counted, tried again with the next look

A block that has a copy elsewhere already is only dropped here, unless its writer wanted several
and the administrator did not say that fewer will do. So what is stuck waits for a node to come.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from kvstore.master.books.catalog import Catalog
from kvstore.master.books.copy_state import COMMITTED, OPEN, RETIRED
from kvstore.master.books.segment import Segment
from kvstore.master.copies.copy_order import CopyOrder, Outcome, Purpose
from kvstore.master.copies.copying import Copying
from kvstore.wire import messages as m

ORDERED_MAX: Final = 4096  # orders of one drain that wait at once
LOOK_S: Final = 1.0  # from one look at what is left to the next


class Stuck(Enum):
    """Why a block has nowhere to go."""

    NO_NODE = auto()  # no other node takes blocks
    NO_DOMAIN = auto()  # each of them shares its failure domain with a copy
    NO_ROOM = auto()


@dataclass(slots=True, kw_only=True)
class NodeDrain:
    """One drain.

    Attributes:
        waiting: (key, segment) of what was seen there and is not ordered yet.
        ordered: Keys with an order.
        stuck: Keys that had nowhere to go, and why.
        moved: Copies that went from here.
        look_s: When to look for what is left.
        fewer_copies: One copy elsewhere is enough.
    """

    waiting: deque[tuple[bytes, int]] = field(default_factory=deque)
    ordered: set[bytes] = field(default_factory=set)
    stuck: dict[bytes, Stuck] = field(default_factory=dict)
    moved: int = 0
    look_s: float = 0.0
    fewer_copies: bool = False


class Draining:
    """The nodes that are drained. Not thread-safe.

    Args:
        catalog: The pool's books.
        copying: Takes the orders.
        wanted: Returns how many copies a block's writer wanted.
    """

    def __init__(
        self, catalog: Catalog, copying: Copying, *, wanted: Callable[[bytes], int]
    ) -> None:
        self._catalog = catalog
        self._copying = copying
        self._wanted = wanted
        self._drains: dict[str, NodeDrain] = {}
        self._cancelled: set[str] = set()  # of nodes that are there

    def drain(self, request: m.Drain, now: float) -> m.Reply:
        """Begin, go on with, or cancel a drain; say how far it is."""
        node = self._catalog.pool.node(request.node)
        if node is None:
            return m.Refused(m.RefusalReason.UNKNOWN_NODE, f"no node {request.node}")
        if request.cancel or (request.again and request.node in self._cancelled):
            node.draining = False
            self._cancelled.add(request.node)
            ended = self._drains.pop(request.node, NodeDrain())
            for segment in node.segments.values():
                self._copying.cancel(Purpose.DRAIN, segment.index)
            return self._report(list(node.segments.values()), ended, cancelled=True)
        node.draining = True
        self._cancelled.discard(request.node)
        drain = self._drains.setdefault(request.node, NodeDrain())
        if request.fewer_copies and not drain.fewer_copies:
            drain.fewer_copies, drain.look_s = True, now
        self._go_on(request.node, drain, now)
        return self._report(list(node.segments.values()), drain)

    def advance(self, now: float) -> None:
        """Order further copies."""
        for name, drain in self._drains.items():
            if now >= drain.look_s or (drain.waiting and len(drain.ordered) < ORDERED_MAX):
                self._go_on(name, drain, now)

    def ended(self, order: CopyOrder, outcome: Outcome) -> None:
        """Take note of how an order of a drain ended."""
        segment = self._catalog.pool.segments.get(order.source)
        drain = None if segment is None else self._drains.get(segment.node.name)
        if segment is None or drain is None:
            return
        drain.ordered.discard(order.key)
        if outcome is Outcome.NO_SPACE:
            drain.stuck[order.key] = self._why(order.key, segment)
            return
        drain.stuck.pop(order.key, None)
        drain.moved += outcome is Outcome.DONE

    def forget(self, node: str) -> None:
        """A node has gone."""
        self._drains.pop(node, None)
        self._cancelled.discard(node)

    def _go_on(self, name: str, drain: NodeDrain, now: float) -> None:
        node = self._catalog.pool.node(name)
        assert node is not None, name
        if not drain.waiting and not drain.ordered and now >= drain.look_s:
            self._look(list(node.segments.values()), drain)
            drain.look_s = now + LOOK_S
        while drain.waiting and len(drain.ordered) < ORDERED_MAX:
            key, segment = drain.waiting.popleft()
            self._move(key, segment, drain)

    def _look(self, segments: list[Segment], drain: NodeDrain) -> None:
        table = self._catalog.table
        for segment in segments:
            for row in table.rows_in(segment.index, COMMITTED):
                drain.waiting.append((table.keys[row], segment.index))
        here = {key for key, _ in drain.waiting}
        drain.stuck = {key: why for key, why in drain.stuck.items() if key in here}

    def _move(self, key: bytes, segment: int, drain: NodeDrain) -> None:
        catalog = self._catalog
        rows = catalog.copies(key)
        here = [row for row in rows if catalog.table.segment[row] == segment]
        if not here:
            return
        elsewhere = sum(not catalog.pool.of(row).node.draining for row in rows)
        if elsewhere >= (1 if drain.fewer_copies else self._wanted(key)):
            catalog.drop(here[0])
            drain.stuck.pop(key, None)
            drain.moved += 1
        elif self._copying.order(CopyOrder(key=key, source=segment, purpose=Purpose.DRAIN)):
            drain.ordered.add(key)

    def _why(self, key: bytes, source: Segment) -> Stuck:
        """Tell why no segment could take a copy of a block."""
        pool = self._catalog.pool
        others = [pool.of(row).node for row in self._catalog.copies(key)]
        domains = {node.domain for node in others if node is not source.node}
        takers = {s.node.domain for s in pool if s.node is not source.node and not s.node.draining}
        if not takers:
            return Stuck.NO_NODE
        return Stuck.NO_ROOM if takers - domains else Stuck.NO_DOMAIN

    def _report(
        self, segments: list[Segment], drain: NodeDrain, *, cancelled: bool = False
    ) -> m.Draining:
        states = (OPEN, COMMITTED, RETIRED)  # what is read or written here still counts
        table = self._catalog.table
        left = sum(len(table.rows_in(segment.index, *states)) for segment in segments)
        in_use = sum(len(table.rows_in(segment.index, OPEN, RETIRED)) for segment in segments)
        why = Counter(drain.stuck.values())
        return m.Draining(
            left_blocks=left,
            left_bytes=sum(segment.bytes_in[s] for segment in segments for s in states),
            moved_blocks=drain.moved,
            stuck_blocks=len(drain.stuck),
            no_node_blocks=why[Stuck.NO_NODE],
            no_domain_blocks=why[Stuck.NO_DOMAIN],
            in_use_blocks=in_use,
            cancelled=cancelled,
        )
