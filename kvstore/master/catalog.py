"""Blocks, segments, leases and open puts as one whole: what a block's bytes are counted under.

The master decides; the catalog carries out single changes so that all four stay in step.

Policies that plan copies (draining, promotion, hot blocks, ...) work on this, in rows of
`kvstore/master/copy_table.py`: one row, a small int, per copy of a block.

    copies(key) -> [row]                   committed copies of a block
    rows_in(segment) -> [row]              committed copies in one segment; O(all rows)
    open_copy(row, target, now) -> id      space in segment `target` for another copy of this
                                           block, written by the node of `row`, whose bytes stay
                                           in place meanwhile; None: no room (nothing is evicted)
    commit_copy(id) -> bool                it is written and verified; False: too late, or gone
    abort_copy(id, at_rest=...)            at_rest: nothing is under way, the space is free again;
                                           else it is quarantined until the source node is dead
    drop(row)                              one copy goes (the block with its last)
    observers: list[PoolObserver]          told of stored(row), hit(rows), evicting(row),
                                           dropped(row), joined(segment), left(segment)

A copy counts as an open put of the source node: a fenced node's copies are quarantined, those of
a dead one freed, those into a lost segment forgotten (`commit_copy` is False then).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import Final

from kvstore.errors import InvariantViolated
from kvstore.events.event_log import EventLog, Medium
from kvstore.master.block import Block, Extent, ExtentState
from kvstore.master.block_index import BlockIndex
from kvstore.master.lease import LeaseTable
from kvstore.master.open_puts import OpenPuts, PutId
from kvstore.master.pool import SegmentPool
from kvstore.master.segment import Segment
from kvstore.wire.messages import MasterStatistics, NodeAddress

EXPECTED_MAX: Final = 1 << 15  # keys looked for in vain whose parent is remembered


class Catalog:
    """All metadata of one pool. Not thread-safe.

    Args:
        lease_s: How long a lease lasts.
        events: Where it is noted that a block came or went; None if nobody wants to know.
    """

    def __init__(self, *, lease_s: float, events: EventLog | None = None) -> None:
        self._events = events
        self.pool = SegmentPool(evict=self._evict)
        self.puts = OpenPuts()
        self.counts: Counter[str] = Counter()
        self._index = BlockIndex()
        self._leases = LeaseTable(lease_s)
        self._uses = 0
        self._parents: OrderedDict[bytes, bytes] = OrderedDict()  # of keys looked for in vain

    def find(self, key: bytes) -> Block | None:
        """Return a committed block."""
        return self._index.get(key)

    def present(self) -> Iterator[tuple[bytes, Medium]]:
        """Iterate over the committed blocks and the media that they are in."""
        return ((block.key, Medium.DRAM) for block in self._index)

    # -- a block comes ------------------------------------------------------------------------

    def adopt(self, segment: Segment, key: bytes, offset: int, nbytes: int, checksum: int) -> bool:
        """Enter a copy that a node already holds; False if it does not fit in with the rest."""
        extent = segment.adopt(key, offset, nbytes)
        return extent is not None and self._attach(extent, checksum=checksum)

    def pin(self, key: bytes) -> None:
        """Keep a committed block from eviction for good."""
        block = self._index.get(key)
        assert block is not None, key
        block.pinned = True
        for extent in block.replicas.values():
            self.pool.of(extent).keep(extent)

    def commit(self, put_id: PutId) -> bool:
        """Make a written extent a block; False if the put is unknown, too late or superseded."""
        put = self.puts.take(put_id)
        if put is None:
            return False
        if put.extent.state is ExtentState.QUARANTINED:  # too late, but now its bytes are at rest
            self.pool.of(put.extent).release(put.extent)
            return False
        put.extent.become(ExtentState.COMMITTED)
        if not self._attach(put.extent, checksum=put.checksum):
            return False
        if put.pinned:
            self.pin(put.extent.key)
        self.counts["stored"] += 1
        return True

    def settle(self, put_id: PutId) -> int:
        """Free the extent of a put that is certainly not being written; return how many (0, 1)."""
        put = self.puts.take(put_id)
        if put is None:
            return 0
        self.pool.of(put.extent).release(put.extent)
        return 1

    # -- a block is read ----------------------------------------------------------------------

    def leading_run(
        self, keys: Sequence[bytes], *, reader: str, avoid: Collection[str]
    ) -> list[Extent]:
        """Return the copies to read of the keys up to the first that is missing; counts as use."""
        extents: list[Extent] = []
        for key in keys:
            extent = self._index.choose(key, reader=reader, avoid=avoid)
            if extent is None:
                break
            extents.append(extent)
        self.counts["hit"] += len(extents)
        self.counts["missed"] += len(keys) - len(extents)
        self._expect(keys[max(0, len(extents) - 1) :])
        for extent in reversed(extents):  # the root last: see EvictionPolicy
            self._touch(extent)
        return extents

    def _expect(self, run: Sequence[bytes]) -> None:
        """Remember the order of keys that are not here: who misses a chain often stores it soon."""
        for parent, key in pairwise(run):
            self._parents[key] = parent
            self._parents.move_to_end(key)
        while len(self._parents) > EXPECTED_MAX:
            self._parents.popitem(last=False)

    def lease(self, client: str, extents: Sequence[Extent], now: float) -> int:
        """Keep these bytes in place for a while; return the lease's id."""
        for extent in extents:
            self.pool.of(extent).hold(extent)
        return self._leases.grant(client, tuple(extents), now).lease_id

    def end_lease(self, client: str, lease_id: int) -> int:
        """End one lease of a client; return how many ended (0, 1)."""
        before = len(self._leases)
        self._reap(self._leases.release(client, lease_id))
        return before - len(self._leases)

    def end_leases_of(self, client: str) -> None:
        """End all leases of a client."""
        self._reap(self._leases.drop_client(client))

    def expire_leases(self, now: float) -> None:
        """End the leases whose time has come."""
        self._reap(self._leases.expire(now))

    # -- a block goes -------------------------------------------------------------------------

    def drop(self, extent: Extent) -> None:
        """Make a copy unfindable; its bytes are free when nobody reads them any more."""
        self._detach(extent)
        segment = self.pool.of(extent)
        segment.keep(extent)
        if extent.leases:
            extent.become(ExtentState.RETIRED)
        else:
            segment.release(extent)

    def drop_node(self, node: str) -> None:
        """Forget a node's copies and the puts into its memory. Unknown nodes are ignored."""
        segment = self.pool.remove(node)
        if segment is None:
            return
        for extent in segment.extents():
            if extent.state is ExtentState.COMMITTED:
                self._detach(extent)
                self.counts["lost"] += 1
        self.puts.lose(set(segment.lose()))

    def _evict(self, extent: Extent) -> None:
        self.counts["evicted"] += 1
        self.pool.of(extent).keep(extent, evicted=True)
        self.drop(extent)

    def _reap(self, idle: list[Extent]) -> None:
        for extent in reversed(dict.fromkeys(idle)):  # the root last
            if extent.state is ExtentState.RETIRED:
                self.pool.of(extent).release(extent)
            elif extent.state is ExtentState.COMMITTED:
                self.pool.of(extent).unhold(extent)

    def _attach(self, extent: Extent, *, checksum: int) -> bool:
        if not self._index.attach(extent, checksum=checksum):
            self.pool.of(extent).release(extent)
            return False
        if self._events is not None and self._copies(extent.key) == 1:
            self._events.stored(extent.key)
        self._touch(extent)
        return True

    def _detach(self, extent: Extent) -> None:
        self._index.detach(extent)
        if self._events is not None and self._copies(extent.key) == 0:
            self._events.removed(extent.key)

    def _copies(self, key: bytes) -> int:
        block = self._index.get(key)
        return 0 if block is None else len(block.replicas)

    def _touch(self, extent: Extent) -> None:
        self._uses += 1
        extent.used_at = self._uses
        block = self._index.get(extent.key)
        assert block is not None, extent
        if not block.pinned:
            self.pool.of(extent).use(extent, parent=self._parents.pop(extent.key, None))

    # -- figures and checks -------------------------------------------------------------------

    def name_nodes(self, extents: Sequence[Extent]) -> tuple[list[NodeAddress], list[int]]:
        """Return the nodes of these extents, each once, and every extent's index in that list."""
        idx = {node: i for i, node in enumerate(dict.fromkeys(e.node for e in extents))}
        segments = [self.pool.get(node) for node in idx]
        nodes = [NodeAddress(s.node, s.address) for s in segments if s is not None]
        assert len(nodes) == len(idx), idx
        return nodes, [idx[extent.node] for extent in extents]

    def statistics(self) -> MasterStatistics:
        """Return the figures of the pool now."""

        def total(state: ExtentState) -> int:
            return sum(segment.bytes_in(state) for segment in self.pool)

        return MasterStatistics(
            nodes=len(self.pool),
            blocks=len(self._index),
            leases=len(self._leases),
            open_puts=len(self.puts),
            capacity_bytes=sum(segment.capacity for segment in self.pool),
            free_bytes=sum(segment.free for segment in self.pool),
            committed_bytes=total(ExtentState.COMMITTED),
            open_bytes=total(ExtentState.OPEN),
            retired_bytes=total(ExtentState.RETIRED),
            quarantined_bytes=total(ExtentState.QUARANTINED),
            hit_blocks=self.counts["hit"],
            missed_blocks=self.counts["missed"],
            stored_blocks=self.counts["stored"],
            evicted_blocks=self.counts["evicted"],
            corrupt_blocks=self.counts["corrupt"],
            unreachable_blocks=self.counts["unreachable"],
            lost_blocks=self.counts["lost"],
        )

    def check_invariants(self) -> None:
        """Raise InvariantViolated unless index, segments, leases and puts agree."""
        self._index.check_invariants()
        self.puts.check_invariants()
        leased = self._leases.counts()
        indexed: dict[Extent, Block] = {
            extent: block for block in self._index for extent in block.replicas.values()
        }
        by_state: dict[ExtentState, set[Extent]] = {state: set() for state in ExtentState}
        for segment in self.pool:
            segment.check_invariants()
            for extent in segment.extents():
                by_state[extent.state].add(extent)
                evictable = extent in indexed and not indexed[extent].pinned
                _check(extent.leases == leased.get(extent, 0), "leases are miscounted", extent)
                _check(evictable == segment.may_evict(extent), "wrongly evictable", extent)
        written = by_state[ExtentState.OPEN] | by_state[ExtentState.QUARANTINED]
        _check(by_state[ExtentState.COMMITTED] == set(indexed), "committed is not indexed")
        _check(written == self.puts.extents(), "extents being written are not those of the puts")
        _check(all(e.leases for e in by_state[ExtentState.RETIRED]), "retired without a lease")
        _check(not by_state[ExtentState.FREE] | by_state[ExtentState.LOST], "ended extent kept")


def _check(holds: bool, problem: str, extent: Extent | None = None) -> None:
    if not holds:
        raise InvariantViolated(where="Catalog", problem=f"{problem}: {extent}")
