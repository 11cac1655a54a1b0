"""What store nodes ask: to lend segments, to be known, to take them back."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import compress

from kvstore import row_loops
from kvstore.checksum import table_bytes
from kvstore.eviction import new_policy
from kvstore.master.books.allocator import ALIGNMENT, padded
from kvstore.master.books.catalog import Catalog
from kvstore.master.books.copy_state import COMMITTED, LOST
from kvstore.master.books.segment import Node, Segment
from kvstore.master.timing import MasterTiming
from kvstore.master.transition import Transition, are_checksums, equally_long, malformed
from kvstore.wire import messages as m

CHUNK_END = 1 << 32
STAMP_END = 1 << 63
NOBODY = ""  # who holds the leases of whom an earlier master knew


class Lending:
    """Segments come and go; see `MasterPart`.

    A segment's blocks may be told in pieces (`more`): each can be read as soon as it is told, but
    nothing is placed or evicted before the last, since only then the free ranges are known.

    Args:
        catalog: The pool's books.
        timing: The master's durations.
    """

    def __init__(self, catalog: Catalog, timing: MasterTiming) -> None:
        self._catalog = catalog
        self._timing = timing

    def transitions(self) -> Mapping[type, Transition]:
        """Return what carries out which type of request."""
        return {
            m.Register: self._register,
            m.Hold: self._hold,
            m.Heartbeat: self._heartbeat,
            m.Leave: self._leave,
        }

    def advance(self, now: float) -> float:
        """Drop the nodes that have been silent for too long."""
        pool = self._catalog.pool
        for node in pool.silent_since(now - self._timing.silence_s):
            self._catalog.drop_node(node)
        return pool.all_heard_s + self._timing.silence_s

    def is_silent(self, now: float) -> bool:
        """Whether `advance` might drop a node."""
        return self._catalog.pool.all_heard_s + self._timing.silence_s <= now

    def _register(self, request: m.Register, now: float) -> m.Reply:
        pool = self._catalog.pool
        if request.base % ALIGNMENT or request.capacity < 0:
            return malformed(f"a share from {request.base} of {request.capacity} bytes")
        problem = _problem(request.held)
        if problem:
            return malformed(problem)
        node = pool.node(request.node)
        if node is None:
            node = Node(
                name=request.node,
                address=request.address,
                domain=request.domain or request.node,
                heard_s=now,
            )
        pool.hear(node, now)
        segment = node.segments.get(request.segment)
        if segment is None:
            segment = self._new_segment(request, node, now)
            pool.add(segment)
        elif segment.is_told:  # the reply to the first was lost: what it holds is known already
            return m.Registered(adopted=0)
        return self._adopt(segment, request.held, request.more, now)

    def _new_segment(self, request: m.Register, node: Node, now: float) -> Segment:
        table = self._catalog.table
        if not request.untouched:
            self._end_lost_leases()
        return Segment(
            self._catalog.pool.next_index(),
            node,
            m.NodeAddress(node.name, node.address, request.segment, request.medium),
            base=request.base,
            capacity=request.capacity,
            # Somebody may have been writing here when the last master went, until the node says
            # that nobody is. It had to finish within `put_s`; a stopped process may not have, and
            # then the checksum tells.
            placeable_s=now if request.untouched else now + self._timing.put_s,
            table=table,
            policy=new_policy(self._catalog.eviction, table.eviction),
        )

    def _end_lost_leases(self) -> None:
        """Renew no lease on copies that went with their node: its memory may be in use again.

        They run to their ends, and for so long what a node brings stays in place.
        """
        catalog = self._catalog
        for lease in catalog.leases.running():
            if row_loops.where(catalog.table.state, lease.rows, LOST):
                lease.is_last = True

    def _hold(self, request: m.Hold, now: float) -> m.Reply:
        node = self._catalog.pool.node(request.node)
        segment = None if node is None else node.segments.get(request.segment)
        if node is None or segment is None:
            return m.Refused(
                m.RefusalReason.UNKNOWN_NODE, f"no segment {request.segment} of {request.node}"
            )
        self._catalog.pool.hear(node, now)
        if segment.is_told:
            return m.Registered(adopted=0)
        problem = _problem(request.held)
        return (
            malformed(problem) if problem else self._adopt(segment, request.held, request.more, now)
        )

    def _adopt(self, segment: Segment, held: m.HeldBlocks, more: bool, now: float) -> m.Registered:
        catalog = self._catalog
        count = len(held.keys)
        columns = (
            held.offsets,
            held.keys,
            held.lengths,
            held.checksums,
            held.pinned or [False] * count,
            held.chunk_bytes or [0] * count,
            held.tenants or [""] * count,
            held.groups or [""] * count,
            held.stamps or [0] * count,
        )
        adopted: list[int] = []
        plain: list[int] = []  # not pinned, of no group: nearly all
        for offset, key, length, checksum, pinned, chunk_bytes, tenant, group, stamp in sorted(
            zip(*columns, strict=True)
        ):
            if length <= 0:
                continue
            space = padded(length + table_bytes(length, chunk_bytes))
            row = segment.adopt(key, offset, length, space)
            if row is None:
                continue
            catalog.describe([row], [checksum], chunk_bytes, catalog.tenants.named(tenant))
            catalog.table.told[row] = stamp
            if not pinned and not group:
                plain.append(row)
                continue
            pin = m.Pin.HARD if pinned else m.Pin.NONE
            if catalog.attach(row, pin=pin, pin_s=0.0, group=group, now=now):
                adopted.append(row)
                if pinned:
                    catalog.pins.strengthen(row, pin, 0.0, now)
        if plain:
            adopted += compress(plain, catalog.attach_all(plain, now))
        # Of two of one name, told at once, the earlier is none any more.
        adopted = row_loops.where(catalog.table.state, list(dict.fromkeys(adopted)), COMMITTED)
        if adopted and segment.placeable_s > now:
            # Leases of the last master may run on them, and are respected without being known.
            catalog.lease(NOBODY, adopted, now)
        if not more:
            segment.finish_telling()
            for observer in catalog.observers:
                observer.joined(segment)
        return m.Registered(adopted=len(adopted))

    def _heartbeat(self, request: m.Heartbeat, now: float) -> m.Reply:
        pool = self._catalog.pool
        node = pool.node(request.node)
        if node is None:
            return m.Known(known=False)
        pool.hear(node, now)
        return m.Known(
            known=True,
            copies=request.node in self._catalog.nodes_with_work,
            pins=self._catalog.pins.untold.news(request.node, request.pins_heard),
        )

    def _leave(self, request: m.Leave, now: float) -> m.Reply:
        del now
        known = self._catalog.pool.node(request.node) is not None
        for batch in self._catalog.puts.of_client(request.node):
            if batch.batch < 0:  # the node's own copying has ended; a client of this name goes on
                self._catalog.end_batch(batch, at_rest=True)
        self._catalog.drop_node(request.node)
        return m.Done(int(known))


def _problem(held: m.HeldBlocks) -> str:
    required = (held.keys, held.offsets, held.lengths, held.checksums)
    optional = (held.pinned, held.chunk_bytes, held.tenants, held.groups, held.stamps)
    if not equally_long(*required, *(column for column in optional if column)):
        return "columns of different lengths"
    if not are_checksums(held.checksums):
        return "a checksum that is not an unsigned 64-bit number"
    if held.stamps and not (0 <= min(held.stamps) <= max(held.stamps) < STAMP_END):
        return "times that nobody can have"
    if held.chunk_bytes and not (0 <= min(held.chunk_bytes) <= max(held.chunk_bytes) < CHUNK_END):
        return "chunks of no sensible size"
    return ""
