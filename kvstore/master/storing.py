"""Puts of one block in one request: into a place that the writer was given ahead.

    Reserve                       place 1
    (bytes are written)  Store 1  a block now; place 2 of the same size
    (bytes are written)  Store 2  ...           the name is taken: place 2 again, as number 3

A number is used up by its `Store`, whatever becomes of it. So a request that is repeated, or that
arrives late, never makes a block of bytes that were meant for another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from kvstore.master.abandoned import AbandonedBatches
from kvstore.master.books.allocator import padded
from kvstore.master.books.catalog import Catalog
from kvstore.master.books.open_puts import NO_KEY, PutBatch
from kvstore.master.books.tenants import Tenant
from kvstore.master.timing import MasterTiming
from kvstore.master.transition import NEVER, Transition, are_checksums, malformed, not_entered
from kvstore.master.writing import compare
from kvstore.wire import messages as m

# So much of the pool is reserved at most: what one client keeps ahead, others cannot have.
RESERVED_SHARE: Final = 1 / 32


class Storing:
    """Reserved places; see `MasterPart`.

    Args:
        catalog: The pool's books.
        timing: The master's durations.
        abandoned: Batches that writers gave up.
    """

    def __init__(self, catalog: Catalog, timing: MasterTiming, abandoned: AbandonedBatches) -> None:
        self._catalog = catalog
        self._timing = timing
        self._abandoned = abandoned

    def transitions(self) -> Mapping[type, Transition]:
        """Return what carries out which type of request."""
        return {m.Reserve: self._reserve, m.Store: self._store}

    def advance(self, now: float) -> float:
        """Nothing is due here: `Writing` quarantines what is reserved for too long."""
        return NEVER

    def _reserve(self, request: m.Reserve, now: float) -> m.Reply:
        tenant = self._catalog.tenants.acting(request.client)
        if tenant is None:
            return not_entered(request.client)
        self._abandoned.end(request.client, request.abandoned)
        batch = self._catalog.puts.find(request.client, request.batch)
        if request.nbytes and batch is None:
            batch = self._open(
                request.client, request.batch, request.nbytes, request.avoid, tenant, now
            )
        return m.Reserved(self._place(batch), self._timing.put_s)

    def _store(self, request: m.Store, now: float) -> m.Reply:
        catalog, client = self._catalog, request.client
        puts, table = catalog.puts, catalog.table
        if request.length <= 0 or not are_checksums((request.checksum,)):
            return malformed("a block of no bytes, or a checksum of more than 64 bits")
        if request.following == request.batch:
            return malformed(f"batch {request.batch} follows itself")
        tenant = catalog.tenants.acting(client)
        if tenant is None:
            return not_entered(client)
        if request.abandoned:
            self._abandoned.end(client, request.abandoned)
        batch, following = puts.find(client, request.batch), puts.find(client, request.following)
        row = None if batch is None else puts.reserved(batch)
        usable = (
            row is not None
            and following is None
            and table.tenant[row] == tenant.number
            and table.space[row] == catalog.pool.of(row).space_of(padded(request.length))
        )
        if batch is None or row is None or not usable:
            if batch is not None and batch.is_reserved:
                catalog.end_batch(batch, at_rest=True)  # its writer says so
            return m.Stored(m.PutOutcome.FAILED, self._place(following), self._timing.put_s)
        outcome = self._commit(request, batch, row, tenant, now)
        if outcome is m.PutOutcome.STORED:
            avoid, number = request.avoid, request.following
            following = self._open(client, number, request.length, avoid, tenant, now)
        elif (client, request.following) in self._abandoned:
            catalog.end_batch(batch, at_rest=True)
        else:
            puts.renumber(batch, request.following)
            following = batch
        return m.Stored(outcome, self._place(following), self._timing.put_s)

    def _commit(
        self, request: m.Store, batch: PutBatch, row: int, tenant: Tenant, now: float
    ) -> m.PutOutcome:
        """Make the place a block if its name is free; else leave it as it is."""
        catalog, table, key = self._catalog, self._catalog.table, request.key
        found = catalog.index.rows.get(key)
        if found is not None:
            wanted = (request.length, request.checksum, 0, tenant.number)
            outcome = compare(catalog, found, wanted)
            if outcome is m.PutOutcome.EXISTS and request.pin is not m.Pin.NONE:
                catalog.pins.strengthen(found, request.pin, request.pin_s, now)
            return outcome
        if key in catalog.puts.writers:
            return m.PutOutcome.IN_PROGRESS
        catalog.puts.name(row, key)
        table.length[row] = request.length
        table.checksum[row] = request.checksum
        batch.pin, batch.pin_s, batch.group = request.pin, request.pin_s, request.group
        stored = catalog.commit(batch, 0, now)
        assert stored, key
        return m.PutOutcome.STORED

    def _open(
        self,
        client: str,
        number: int,
        length: int,
        avoid: Sequence[str],
        tenant: Tenant,
        now: float,
    ) -> PutBatch | None:
        """Reserve a place; None if there is none to spare, or the client is one to be counted."""
        catalog, space = self._catalog, padded(length)
        pool, puts = catalog.pool, catalog.puts
        if tenant.quota_bytes is not None or (client, number) in self._abandoned:
            return None
        capacity = sum(s.capacity for s in pool if s.medium is not m.Medium.SSD)
        if puts.reserved_bytes + space > capacity * RESERVED_SHARE:
            return None
        candidates = pool.candidates(client, now, avoid=avoid)
        if not candidates.sets or candidates.sets[0][0].medium is m.Medium.SSD:
            return None  # a disk takes long: there a request more does not matter
        row = pool.place(NO_KEY, length, space, candidates)
        if row is None:
            return None
        catalog.describe((row,), (0,), 0, tenant)
        batch = PutBatch(
            client=client,
            batch=number,
            opened_s=catalog.leases.awake(now),
            tenant=tenant.number,
            is_reserved=True,
        )
        puts.reserve(batch, row)
        return batch

    def _place(self, batch: PutBatch | None) -> m.Place | None:
        """Return where a reserved batch is to be written."""
        row = None if batch is None else self._catalog.puts.reserved(batch)
        if row is None:
            return None
        return m.Place(self._catalog.pool.of(row).where, self._catalog.table.offset[row])
