"""All books of one pool as one whole: segments, blocks, leases, open puts, tenants, groups, pins.

The master decides; the catalog carries out single changes so that all of them stay in step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import compress

from configs.schema import Eviction
from kvstore import row_loops
from kvstore.events.event_log import EventLog
from kvstore.master.books.block_index import BlockIndex
from kvstore.master.books.copy_state import COMMITTED, FREE, LOST, OPEN, QUARANTINED, RETIRED
from kvstore.master.books.copy_table import CopyTable
from kvstore.master.books.expected_keys import ExpectedKeys
from kvstore.master.books.groups import NO_GROUP, GroupBook
from kvstore.master.books.lease import Lease, LeaseTable
from kvstore.master.books.notices import Notices
from kvstore.master.books.open_puts import OpenPuts, PutBatch
from kvstore.master.books.pins import Pins
from kvstore.master.books.planned_copies import PlannedCopies
from kvstore.master.books.pool import SegmentPool
from kvstore.master.books.segment import Segment
from kvstore.master.books.tenants import NOBODY, Tenant, TenantBook, TenantRule
from kvstore.master.observer import PoolObserver
from kvstore.wire.messages import Pin


class Catalog:
    """All metadata of one pool. Not thread-safe.

    Args:
        lease_s: How long a lease lasts.
        soft_pin_s: How long a soft pin lasts if nobody says.
        eviction: Which blocks make room for others.
        events: Where it is noted that a block came or went; None if nobody wants to know.
        tenants: Who is configured.
    """

    def __init__(
        self,
        *,
        lease_s: float,
        soft_pin_s: float,
        eviction: Eviction = Eviction.LRU,
        events: EventLog | None = None,
        tenants: Sequence[TenantRule] = (),
    ) -> None:
        self.eviction = eviction
        self.table = CopyTable()
        self.pool = SegmentPool(self.table, clear=self._clear)
        self.puts = OpenPuts(self.table)
        self.index = BlockIndex(self.table)
        self.leases = LeaseTable(lease_s)
        self.tenants = TenantBook(self.table, tenants)
        self.groups = GroupBook()
        self.pins = Pins(self.table, self.index, self.pool, self.tenants, soft_pin_s=soft_pin_s)
        self.counts: Counter[str] = Counter()
        self.notices = Notices(self.table, self.pool, events)
        self.observers: list[PoolObserver] = self.notices.observers
        self.nodes_with_work: set[str] = set()
        self.expected = ExpectedKeys() if eviction is Eviction.PREFIX_AWARE else None
        self.planned = PlannedCopies(self)
        self._uses = 0

    def copies(self, key: bytes) -> list[int]:
        """Return the committed copies of a block; none if it is not there."""
        row = self.index.rows.get(key)
        return [] if row is None else self.table.copies(row)

    # -- a block comes ------------------------------------------------------------------------

    def describe(
        self, rows: Sequence[int], checksums: Sequence[int], chunk_bytes: int, tenant: Tenant
    ) -> None:
        """Fill in what fresh rows have besides a place; charge their tenant."""
        table = self.table
        row_loops.scatter(table.checksum, rows, checksums)
        row_loops.fill(table.chunk_bytes, rows, chunk_bytes)
        row_loops.fill(table.tenant, rows, tenant.number)
        row_loops.fill(table.group, rows, NO_GROUP)
        tenant.used_bytes += row_loops.total(table.space, rows)

    def attach(self, row: int, *, pin: int, pin_s: float, group: str, now: float) -> bool:
        """Make an OPEN copy a block, or a further copy of one; else free its bytes.

        A further copy is pinned and grouped as the block is. One of other bytes takes the place
        of a block that its node was told of before.
        """
        table, tenant = self.table, self.table.tenant[row]
        key = table.keys[row]
        first = self.index.rows.setdefault(key, row)
        if first != row and self._supersedes(row, first):
            for copy in table.copies(first):
                self.drop(copy)
            first = self.index.rows.setdefault(key, row)
        if first != row:
            pin, table.group[row] = table.pin[first], table.group[first]
            if table.tenant[first] != tenant or not self.index.attach(row):
                self._free(row)
                return False
        else:
            self.tenants[tenant].blocks += 1
            if pin:
                self.pins.enter(key, pin, pin_s, now)
            if group:
                table.group[row] = self.groups.enter(tenant, group, key)
        if pin:
            table.pin[row] = pin
            if first != row and pin == Pin.HARD:
                self.pins.untold.changed(row)
        self._enter((row,))
        return True

    def _supersedes(self, row: int, known: int) -> bool:
        """Whether a node tells of other bytes that came later than those another has told of.

        They came after the name had been removed or evicted, of which nodes hear nothing.
        """
        told = self.table.told
        if self.table.tenant[row] != self.table.tenant[known]:
            return False
        if self.index.same_bytes(row, known):  # both are as old as the later, which may go
            told[row] = told[known] = max(told[row], told[known]) if told[known] else 0
            return False
        known_told = [told[copy] for copy in self.table.copies(known)]
        return min(known_told) > 0 and max(known_told) < told[row]

    def commit_all(self, batch: PutBatch, places: Sequence[int], now: float) -> list[bool]:
        """Do what `commit` does for each of these, in this order."""
        rows = None if batch.pin or batch.group else self.puts.take_all(batch, places)
        if rows is None:
            return [self.commit(batch, place, now) for place in places]
        stored = self.attach_all(rows, now)
        ring = self.table.sibling
        if row_loops.all_own(ring, rows):
            self.counts["stored"] += sum(stored)
        else:
            self.counts["stored"] += sum(ring[row] == row for row in compress(rows, stored))
        return stored

    def attach_all(self, rows: list[int], now: float) -> list[bool]:
        """Do what `attach` does for each of these, without pins and groups, in this order."""
        stored, first = [True] * len(rows), rows
        taken = self.index.rows.claim(row_loops.pick(self.table.keys, rows), rows)
        if taken:
            for position in taken:
                stored[position] = False
            first = list(compress(rows, stored))
        for tenant, count in Counter(row_loops.gather(self.table.tenant, first)).items():
            self.tenants[tenant].blocks += count
        self._enter(first)
        if len(first) < len(rows):  # of some a node holds a copy that nobody knew of
            stored = [
                is_first or self.attach(row, pin=Pin.NONE, pin_s=0.0, group="", now=now)
                for row, is_first in zip(rows, stored, strict=True)
            ]
        return stored

    def _enter(self, rows: Sequence[int]) -> None:
        """Take copies that are in the index into all other books, in this order."""
        table = self.table
        for segment, entering in self.pool.by_segment(rows):
            parents: Sequence[bytes | None] = ()
            if self.expected is not None:
                found = self.expected.parents(row_loops.pick(table.keys, entering))
                parents = [self._name(parent) for parent in found]
            segment.enter(entering, parents)
        self._stamp(rows)
        if not row_loops.all_are(table.tenant, rows, NOBODY):
            for row in rows:
                self.tenants.order(row)
        self.notices.stored(rows)

    def _name(self, key: bytes | None) -> bytes | None:
        """Return a block's name as the table has it: one object for all that keep it."""
        row = None if key is None else self.index.rows.get(key)
        return key if row is None else self.table.keys[row]

    def _stamp(self, rows: Sequence[int]) -> None:
        row_loops.stairs(self.table.used_at, rows, self._uses + 1, 1)
        self._uses += len(rows)

    def commit(self, batch: PutBatch, place: int, now: float) -> bool:
        """Make a written copy a block; False if it is unknown, too late or superseded."""
        row = self.puts.take(batch, place)
        if row is None:
            return False
        if self.table.state[row] == QUARANTINED:  # too late, but now its bytes are at rest
            self._free(row)
            return False
        stored = self.attach(row, pin=batch.pin, pin_s=batch.pin_s, group=batch.group, now=now)
        self.counts["stored"] += stored and self.table.sibling[row] == row  # the first copy
        return stored

    def store(self, batch: PutBatch, row: int, key: bytes) -> None:
        """Commit a reserved place, as `commit` does: a block that is new, without pin and group."""
        self.puts.take_named(batch, row, key)
        tenant = self.table.tenant[row]
        self.index.rows[key] = row
        self.tenants[tenant].blocks += 1
        self.counts["stored"] += 1
        if self.expected is not None:
            self._enter((row,))
            return
        self.pool.of(row).enter_one(row)
        self._uses += 1
        self.table.used_at[row] = self._uses
        if tenant != NOBODY:
            self.tenants.order(row)
        self.notices.stored((row,))

    def store_all(
        self, batches: Sequence[PutBatch], rows: Sequence[int], keys: list[bytes]
    ) -> None:
        """Do what `store` does for each of these, under different keys, in this order."""
        self.puts.take_named_all(batches, rows, keys)
        taken = self.index.rows.claim(keys, list(rows))
        assert not taken, taken
        for tenant, count in Counter(row_loops.gather(self.table.tenant, rows)).items():
            self.tenants[tenant].blocks += count
        self.counts["stored"] += len(rows)
        self._enter(rows)

    def settle(self, batch: PutBatch, place: int) -> int:
        """Free a copy that is certainly not being written; return how many (0, 1)."""
        row = self.puts.take(batch, place)
        if row is None:
            return 0
        self._free(row)
        return 1

    def quarantine(self, batch: PutBatch, place: int) -> None:
        """Put an open copy beyond use. Unknown ones are ignored."""
        row = self.puts.close(batch, place)
        if row is not None:
            self.pool.of(row).become(row, QUARANTINED)

    def end_batch(self, batch: PutBatch, *, at_rest: bool) -> int:
        """Settle or quarantine all of a put; return of how many copies."""
        places = list(batch.rows)
        for place in places:
            if at_rest:
                self.settle(batch, place)
            else:
                self.quarantine(batch, place)
        self.planned.ended(batch)
        return len(places)

    # -- a block is read ----------------------------------------------------------------------

    def use(self, rows: Sequence[int]) -> None:
        """Count a use of these copies; of a chain, in its order."""
        from_leaf = rows[::-1]  # the root last: see EvictionPolicy
        self._stamp(from_leaf)
        if not row_loops.all_are(self.table.tenant, rows, NOBODY):
            for row in from_leaf:
                self.tenants.touch(row)
        for segment, used in self.pool.by_segment(from_leaf):
            segment.touch(used)
        self.notices.hit(rows)

    def lease(self, client: str, rows: Sequence[int], now: float) -> int:
        """Keep these bytes in place for a while; return the lease's id."""
        self.hold_bytes(rows)
        return self.leases.grant(client, rows, now)

    def hold_bytes(self, rows: Sequence[int]) -> None:
        """Keep committed copies in place for one reader more each, until `let_go`."""
        for segment, leased in self.pool.by_segment(row_loops.add(self.table.leases, rows, 1, 1)):
            segment.leased(leased)

    def end_leases(self, leases: Iterable[Lease]) -> None:
        """Let go of the bytes of leases that have ended."""
        for lease in leases:
            self.let_go(lease.rows)

    def let_go(self, rows: Sequence[int]) -> None:
        """One reader of each of these copies has ended."""
        table = self.table
        idle = row_loops.add(table.leases, rows[::-1], -1, 0)  # the root last
        staying = row_loops.where(table.state, idle, COMMITTED)
        for segment, settled in self.pool.by_segment(staying):
            segment.settle(settled)
        if len(staying) == len(idle):
            return
        for row in idle:
            if table.state[row] == RETIRED:
                self._free(row)
            elif table.state[row] == LOST:
                table.state[row] = FREE
                table.give_back(row)

    # -- a block goes -------------------------------------------------------------------------

    def drop(self, row: int, *, evicted: bool = False) -> None:
        """Make a copy unfindable; its bytes are free when nobody reads them any more."""
        self._detach(row, evicted=evicted)
        if self.table.leases[row]:
            self.pool.of(row).become(row, RETIRED)
        else:
            self._free(row)

    def drop_node(self, name: str) -> None:
        """Forget a node's copies and the puts into its memory. Unknown nodes are ignored."""
        node = self.pool.node(name)
        if node is None:
            return
        segments = {segment.index: segment for segment in node.segments.values()}
        for batch in self.puts.lose(set(segments)):
            self.planned.ended(batch)
        for segment in segments.values():
            for row in self.table.rows_in(segment.index, OPEN, COMMITTED, RETIRED, QUARANTINED):
                self._lose(row, segment)
            for observer in self.observers:
                observer.left(segment)
        self.pool.remove(name)
        self.pins.untold.forget(name)
        self.nodes_with_work.discard(name)

    def _lose(self, row: int, segment: Segment) -> None:
        table = self.table
        if table.state[row] == COMMITTED:
            self._detach(row)
            self.counts["lost"] += 1
        segment.become(row, LOST)
        self.tenants[table.tenant[row]].used_bytes -= table.space[row]
        if not table.leases[row]:
            table.state[row] = FREE
            table.give_back(row)

    def evict(self, row: int) -> None:
        """Drop a committed copy that nobody reads, and a block's group with its last copy."""
        self.pool.of(row).leave(row, evicted=True)
        self._clear((row,))
        self.pool.of(row).become(row, FREE)
        self.table.give_back(row)

    def _clear(self, rows: Sequence[int]) -> None:
        """Take victims out of all books but their segment's; see `SegmentPool`."""
        table = self.table
        assert row_loops.all_are(table.leases, rows, 0), rows
        self.notices.evicted(rows)
        self.counts["evicted"] += len(rows)
        special = (table.tenant, table.group, table.pin)
        if row_loops.all_own(table.sibling, rows) and all(
            row_loops.all_are(column, rows, 0) for column in special
        ):  # nobody's blocks with no other copy
            self.index.rows.drop(row_loops.pick(table.keys, rows))
            nobody = self.tenants[NOBODY]
            nobody.blocks -= len(rows)
            nobody.used_bytes -= row_loops.total(table.space, rows)
            return
        for row in rows:
            self.tenants[table.tenant[row]].used_bytes -= table.space[row]
            if self._unindex(row) and table.group[row]:
                assert len(rows) == 1, "a victim of a group comes alone"
                self._clear_group(table.group[row])

    def _clear_group(self, group: int) -> None:
        """Evict what is left of a group, as it is of no use without a block that went."""
        table = self.table
        for key in self.groups.keys(group):
            for copy in self.copies(key):
                if table.pin[copy] == Pin.NONE and not table.leases[copy]:
                    self.counts["evicted"] += 1
                    self.drop(copy, evicted=True)

    def _detach(self, row: int, *, evicted: bool = False) -> None:
        self.notices.dropped(row)
        self.pool.of(row).leave(row, evicted=evicted)
        self._unindex(row)

    def _unindex(self, row: int) -> bool:
        """Forget that a copy can be found; return whether the block went with it."""
        table, tenant = self.table, self.table.tenant[row]
        if tenant:
            self.tenants.disorder(row)
        if not self.index.detach(row):
            return False
        self.tenants[tenant].blocks -= 1
        if table.group[row]:
            self.groups.leave(table.group[row], table.keys[row])
        if table.pin[row]:
            self.pins.leave(table.keys[row], table.pin[row])
        return True

    def _free(self, row: int) -> None:
        table = self.table
        self.pool.of(row).become(row, FREE)
        self.tenants[table.tenant[row]].used_bytes -= table.space[row]
        table.give_back(row)
