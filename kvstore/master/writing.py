"""What writers ask: space for blocks, and then that these be blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from kvstore import row_loops
from kvstore.checksum import table_bytes
from kvstore.master.abandoned import AbandonedBatches
from kvstore.master.books.allocator import padded
from kvstore.master.books.candidates import Candidates
from kvstore.master.books.catalog import Catalog
from kvstore.master.books.open_puts import PutBatch
from kvstore.master.books.tenants import Tenant
from kvstore.master.opening import MORE_MAX, PlaceOpener
from kvstore.master.timing import MasterTiming
from kvstore.master.transition import (
    Transition,
    are_checksums,
    equally_long,
    malformed,
    not_entered,
)
from kvstore.wire import messages as m

RETRY_S_MIN, RETRY_S_MAX = 0.005, 1.0
CHUNK_END: Final = 1 << 32
REFUSALS: Final = (m.PutOutcome.NO_SPACE, m.PutOutcome.TOO_LARGE, m.PutOutcome.OVER_QUOTA)
NO_CHECKSUM: Final = "a checksum that is not an unsigned 64-bit number"


class Writing:
    """Puts; see `MasterPart`.

    Args:
        catalog: The pool's books.
        timing: The master's durations.
        abandoned: Batches that writers gave up.
        opener: Opens places.
    """

    def __init__(
        self,
        catalog: Catalog,
        timing: MasterTiming,
        abandoned: AbandonedBatches,
        opener: PlaceOpener,
    ) -> None:
        self._catalog = catalog
        self._timing = timing
        self._abandoned = abandoned
        self._opener = opener

    def transitions(self) -> Mapping[type, Transition]:
        """Return what carries out which type of request."""
        return {m.Allocate: self._allocate, m.Finish: self._finish}

    def advance(self, now: float) -> float:
        """Quarantine what is written too slowly."""
        catalog = self._catalog
        asleep_s = now - catalog.leases.awake(now)
        for batch in catalog.puts.opened_before(now - asleep_s - self._timing.put_s):
            catalog.end_batch(batch, at_rest=False)
        return catalog.puts.oldest_s + asleep_s + self._timing.put_s

    def is_late(self, now: float) -> bool:
        """Whether `advance` would take a place from somebody."""
        catalog = self._catalog
        return catalog.puts.oldest_s + self._timing.put_s <= catalog.leases.awake(now)

    # -- space --------------------------------------------------------------------------------

    def _allocate(self, request: m.Allocate, now: float) -> m.Reply:
        problem = _problem(request)
        if problem:
            return malformed(problem)
        tenant = self._catalog.tenants.acting(request.client)
        if tenant is None:
            return not_entered(request.client)
        self._abandoned.end(request.client, request.abandoned)
        if (request.client, request.batch) in self._abandoned:
            return malformed(f"batch {request.batch} was abandoned")
        known = self._catalog.puts.find(request.client, request.batch)
        batch = known or self._new_batch(request, tenant, now)
        outcomes = self._grant_all(request, batch, tenant, now)
        if known is None and batch.rows:
            self._catalog.puts.add(batch)
        allocated = self._allocated(request, batch, outcomes, now)
        if not request.more:
            return allocated
        self._opener.open(
            request.client, request.more, request.more_bytes, request.avoid, tenant, now,
            on_disks=True,
        )  # fmt: skip
        return replace(allocated, ahead=self._opener.granted(request.client, request.more))

    def _new_batch(self, request: m.Allocate, tenant: Tenant, now: float) -> PutBatch:
        return PutBatch(
            client=request.client,
            batch=request.batch,
            opened_s=self._catalog.leases.awake(now),
            replicas=request.replicas,
            pin=request.pin,
            pin_s=request.pin_s,
            tenant=tenant.number,
            group=request.group,
            unsummed=not request.checksums,
        )

    def _grant_all(
        self, request: m.Allocate, batch: PutBatch, tenant: Tenant, now: float
    ) -> list[m.PutOutcome]:
        catalog = self._catalog
        candidates = catalog.pool.candidates(
            request.client,
            now,
            avoid=request.avoid,
            prefer=request.prefer,
            media=request.media,
        )
        outcomes, new = self._sort_out(request, batch, tenant, now)
        if request.places and new:
            new = self._take_places(request, new, batch, tenant)
        lengths = request.lengths
        by_length: dict[int, Sequence[int]] = {}
        if new and lengths.count(lengths[0]) == len(lengths):  # as nearly always
            by_length[lengths[0]] = new
        else:
            sorted_out: dict[int, list[int]] = {}
            for position in new:
                sorted_out.setdefault(lengths[position], []).append(position)
            by_length.update(sorted_out)
        for positions in by_length.values():
            self._place_all(request, positions, batch, tenant, candidates, outcomes)
        return outcomes

    def _sort_out(
        self, request: m.Allocate, batch: PutBatch, tenant: Tenant, now: float
    ) -> tuple[list[m.PutOutcome], Sequence[int]]:
        """Return what to answer of each block, and the positions of those that need a place."""
        catalog, chunk = self._catalog, request.chunk_bytes
        index, writers = catalog.index.rows, catalog.puts.writers
        keys = set(request.keys)
        if (
            len(keys) == len(request.keys)
            and not batch.rows
            and not index.has_any(keys)
            and not writers.has_any(keys)
        ):  # as nearly always
            return [m.PutOutcome.GRANTED] * len(keys), range(len(keys))
        outcomes: list[m.PutOutcome] = []
        fresh: dict[bytes, int] = {}
        for position, key in enumerate(request.keys):
            row = index.get(key)
            if row is not None:
                sums, there = request.checksums, catalog.table.checksum[row]
                wanted = (request.lengths[position], sums[position] if sums else there)
                outcome = compare(catalog, row, (*wanted, chunk, tenant.number))
                if outcome is m.PutOutcome.EXISTS and request.pin is not m.Pin.NONE:
                    catalog.pins.strengthen(row, request.pin, request.pin_s, now)
            elif key in writers or position * batch.replicas in batch.rows:
                outcome = self._being_written(key, batch, position)
            elif key in fresh:
                outcome = m.PutOutcome.IN_PROGRESS
            else:
                fresh[key] = position
                outcome = m.PutOutcome.GRANTED  # unless it can't be placed
            outcomes.append(outcome)
        return outcomes, list(fresh.values())

    def _take_places(
        self, request: m.Allocate, positions: Sequence[int], batch: PutBatch, tenant: Tenant
    ) -> list[int]:
        """Open copies in the reserved places that are named; return who needs one of the others."""
        catalog, table, left = self._catalog, self._catalog.table, list[int]()
        puts, places = catalog.puts, request.places
        for position in positions:
            if position >= len(places) or batch.replicas > 1 or request.chunk_bytes:
                left.append(position)
                continue
            length, held = request.lengths[position], puts.find(request.client, places[position])
            row = None if held is None else puts.reserved(held)
            fits = row is not None and table.space[row] == padded(length)
            if held is None or row is None or not fits or table.tenant[row] != tenant.number:
                left.append(position)
                continue
            puts.take_place(held, row)
            table.keys[row], table.length[row] = request.keys[position], length
            table.checksum[row] = _checksum_of(request, position)
            puts.hold(request.keys[position], row)
            batch.rows[position] = row
        return left

    def _place_all(
        self,
        request: m.Allocate,
        positions: Sequence[int],
        batch: PutBatch,
        tenant: Tenant,
        candidates: Candidates,
        outcomes: list[m.PutOutcome],
    ) -> None:
        """Open copies of blocks of one length; write down which of them can't be placed."""
        catalog, length = self._catalog, request.lengths[positions[0]]
        space = padded(length + table_bytes(length, request.chunk_bytes))
        rows: list[int] = []
        if batch.replicas == 1 and tenant.quota_bytes is None:
            keys, sums = request.keys, request.checksums or [0] * len(request.keys)
            if len(positions) < len(keys):
                keys = [keys[position] for position in positions]
                sums = [sums[position] for position in positions]
            lengths = [length] * len(keys)
            rows = catalog.pool.place_many(keys, lengths, space, candidates)
            catalog.describe(rows, sums[: len(rows)], request.chunk_bytes, tenant)
            batch.rows.update(zip(positions, rows, strict=False))
            catalog.puts.hold_all(keys[: len(rows)], rows)
        for position in positions[len(rows) :]:
            outcomes[position] = self._place(request, position, space, batch, tenant, candidates)

    def _being_written(self, key: bytes, batch: PutBatch, position: int) -> m.PutOutcome:
        first = position * batch.replicas
        holder = self._catalog.puts.writers.get(key)
        mine = [batch.rows.get(place) for place in range(first, first + batch.replicas)]
        if holder is not None and holder in mine:
            return m.PutOutcome.GRANTED  # asked again: the first reply was lost
        return m.PutOutcome.FAILED if holder is None else m.PutOutcome.IN_PROGRESS

    def _place(
        self,
        request: m.Allocate,
        position: int,
        space: int,
        batch: PutBatch,
        tenant: Tenant,
        candidates: Candidates,
    ) -> m.PutOutcome:
        """Open the copies of a block: the first with all means, others on other domains."""
        catalog = self._catalog
        key, length = request.keys[position], request.lengths[position]
        domains: list[str] = []
        for copy in range(batch.replicas):
            has_quota = tenant.quota_bytes is not None
            if has_quota and not self._make_way(tenant, candidates.most(space)):
                return m.PutOutcome.GRANTED if copy else m.PutOutcome.OVER_QUOTA
            row = catalog.pool.place(key, length, space, candidates, without=domains)
            if row is None:
                return m.PutOutcome.GRANTED if copy else catalog.pool.why_not(space)
            checksum = _checksum_of(request, position)
            catalog.describe([row], [checksum], request.chunk_bytes, tenant)
            if copy == 0:
                catalog.puts.hold(key, row)
            batch.rows[position * batch.replicas + copy] = row
            if batch.replicas > 1:
                domains.append(catalog.pool.of(row).node.domain)
        return m.PutOutcome.GRANTED

    def _make_way(self, tenant: Tenant, nbytes: int) -> bool:
        """Evict a tenant's own blocks until it may have so many bytes more; False if it can't."""
        if tenant.quota_bytes is not None and nbytes > tenant.quota_bytes:
            return False
        while tenant.exceeds(nbytes):
            row = self._catalog.tenants.victim(tenant)
            if row is None:
                return False
            self._catalog.evict(row)
        return True

    def _allocated(
        self, request: m.Allocate, batch: PutBatch, outcomes: list[m.PutOutcome], now: float
    ) -> m.Allocated:
        if batch.replicas == 1 and outcomes.count(m.PutOutcome.GRANTED) == len(outcomes):
            rows = list(map(batch.rows.__getitem__, range(len(outcomes))))
            nodes, node_idx = self._catalog.pool.name(rows)
            offsets = row_loops.gather(self._catalog.table.offset, rows)
            return m.Allocated(outcomes, nodes, node_idx, offsets, self._timing.put_s)
        table, row_at = self._catalog.table, batch.rows.get
        granted = [outcome is m.PutOutcome.GRANTED for outcome in outcomes]
        places = granted
        if batch.replicas > 1:
            places = [is_granted for is_granted in granted for _ in range(batch.replicas)]
        rows = [row_at(place, -1) if there else -1 for place, there in enumerate(places)]
        nodes, node_idx = self._catalog.pool.name(rows)
        offset = table.offset
        for refusal in REFUSALS:
            self._catalog.counts[refusal] += outcomes.count(refusal)
        no_space = m.PutOutcome.NO_SPACE in outcomes
        return m.Allocated(
            outcomes=outcomes,
            nodes=nodes,
            node_idx=node_idx,
            offsets=[offset[row] if row >= 0 else -1 for row in rows],
            put_s=self._timing.put_s,
            retry_s=self._retry_s(now) if no_space else 0.0,
            checksums=self._existing_checksums(request, outcomes),
        )

    def _existing_checksums(
        self, request: m.Allocate, outcomes: Sequence[m.PutOutcome]
    ) -> list[int]:
        """Return the checksums with which the writer has to compare its own."""
        if request.checksums or m.PutOutcome.EXISTS not in outcomes:
            return []
        index, checksum = self._catalog.index.rows, self._catalog.table.checksum
        return [
            checksum[index[key]] if outcome is m.PutOutcome.EXISTS else 0
            for key, outcome in zip(request.keys, outcomes, strict=True)
        ]

    def _retry_s(self, now: float) -> float:
        """Return when a lease ends or a segment may be used, whatever is first."""
        ends = [s.placeable_s for s in self._catalog.pool if s.placeable_s > now]
        lease_end_s = self._catalog.leases.next_end_s()
        if lease_end_s is not None:
            ends.append(lease_end_s)
        return min(max(min(ends, default=now + RETRY_S_MAX) - now, RETRY_S_MIN), RETRY_S_MAX)

    # -- the end of a put ---------------------------------------------------------------------

    def _finish(self, request: m.Finish, now: float) -> m.Reply:
        batch = self._catalog.puts.find(request.client, request.batch)
        if batch is None or batch.is_reserved:
            return m.Finished(stored=[False] * len(request.committed))
        if not equally_long(request.checksums, request.committed if batch.unsummed else ()):
            return malformed("a checksum for each committed copy, where `Allocate` had none")
        if not are_checksums(request.checksums):
            return malformed(NO_CHECKSUM)
        if request.checksums:
            self._note_checksums(batch, request)
        # From the last to the first, so that the root of a chain is the youngest.
        stored = self._catalog.commit_all(batch, request.committed[::-1], now)
        for place in request.aborted:
            self._catalog.settle(batch, place)
        for place in request.unsettled:
            self._catalog.quarantine(batch, place)
        return m.Finished(stored=stored[::-1])

    def _note_checksums(self, batch: PutBatch, request: m.Finish) -> None:
        column = self._catalog.table.checksum
        if request.committed == list(batch.rows):  # all of them, as nearly always
            row_loops.scatter(column, list(batch.rows.values()), request.checksums)
            return
        for place, checksum in zip(request.committed, request.checksums, strict=True):
            row = batch.rows.get(place)
            if row is not None:
                column[row] = checksum


def compare(catalog: Catalog, row: int, wanted: tuple[int, int, int, int]) -> m.PutOutcome:
    """Say whether a block that is there is the one of a put: length, checksum, chunks, tenant."""
    table = catalog.table
    found = (table.length[row], table.checksum[row], table.chunk_bytes[row], table.tenant[row])
    return m.PutOutcome.EXISTS if found == wanted else m.PutOutcome.CONFLICT


def _checksum_of(request: m.Allocate, position: int) -> int:
    return request.checksums[position] if request.checksums else 0


def _problem(request: m.Allocate) -> str:
    """Say what is illegal about a request, if anything."""
    if not equally_long(request.keys, request.lengths, request.checksums or request.keys):
        return "columns of different lengths"
    if not request.checksums and request.keys and request.pin is not m.Pin.NONE:
        return "a pin of blocks without checksums"  # it may concern those that exist
    if request.batch < 0:
        return f"batch {request.batch}"
    if request.lengths and min(request.lengths) <= 0:
        return "a block of no bytes"
    if not are_checksums(request.checksums):
        return NO_CHECKSUM
    if not 0 <= request.chunk_bytes < CHUNK_END:
        return f"chunks of {request.chunk_bytes} bytes"
    if request.places or request.more:
        return _problem_ahead(request)
    return ""


def _problem_ahead(request: m.Allocate) -> str:
    """Say what is illegal about the places of a request."""
    if len(request.places) > len(request.keys):
        return f"{len(request.places)} places for {len(request.keys)} blocks"
    if len(request.more) > MORE_MAX or (request.more and not request.more_bytes):
        return f"{len(request.more)} places of {request.more_bytes} bytes at once"
    numbers = {request.batch, *request.places, *request.more}
    if len(numbers) < 1 + len(request.places) + len(request.more):
        return "a number that is used twice"
    return ""
