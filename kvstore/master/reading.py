"""What readers ask: where blocks are, with a lease on them."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from itertools import repeat
from typing import Final

from kvstore import row_loops
from kvstore.master.books.catalog import Catalog
from kvstore.master.books.pool import MEDIA
from kvstore.master.books.tenants import Tenant
from kvstore.master.transition import NEVER, Transition, not_entered
from kvstore.wire import messages as m

NOT_HERE: Final = -1
SPEED: Final = {medium: position for position, medium in enumerate(MEDIA)}


class Reading:
    """Lookups, and their leases; see `MasterPart`.

    Args:
        catalog: The pool's books.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._turn = 0  # equally good copies are read in turns

    def transitions(self) -> Mapping[type, Transition]:
        """Return what carries out which type of request."""
        return {
            m.Lookup: self._lookup,
            m.Renew: self._renew,
            m.Release: self._release,
            m.Exists: self._exists,
        }

    def advance(self, now: float) -> float:
        """End the leases whose time has come."""
        leases = self._catalog.leases
        self._catalog.end_leases(leases.expire(now))
        next_end_s = leases.next_end_s()
        return NEVER if next_end_s is None else next_end_s

    def _lookup(self, request: m.Lookup, now: float) -> m.Reply:
        catalog = self._catalog
        tenant = catalog.tenants.acting(request.client)
        if tenant is None:
            return not_entered(request.client)
        rows = self._find(request, tenant)
        found = rows if NOT_HERE not in rows else [row for row in rows if row != NOT_HERE]
        catalog.counts["hit"] += len(found)
        catalog.counts["missed"] += len(request.keys) - len(found)
        if catalog.expected is not None and len(rows) < len(request.keys):
            catalog.expected.miss(request.keys[max(0, len(rows) - 1) :])
        if not found and not request.every:
            return m.Located(0, catalog.leases.duration_s, [], [], [], [], [])
        catalog.use(found)
        lease_id = catalog.lease(request.client, found, now) if found else 0
        return self._located(lease_id, rows)

    def _find(self, request: m.Lookup, tenant: Tenant) -> list[int]:
        """Return a row per key, up to the first that is missing; with `every`, for all."""
        catalog, table = self._catalog, self._catalog.table
        index, siblings, every = catalog.index.rows, table.sibling, request.every
        avoid: Collection[str] = request.avoid
        if catalog.pool.doubted:
            avoid = {*avoid, *catalog.pool.doubted}
        plain = not avoid and not catalog.tenants.are_configured
        if plain:
            rows = list(map(index.get, request.keys, repeat(NOT_HERE)))
            if NOT_HERE in rows and not every:
                del rows[rows.index(NOT_HERE) :]
            here = rows if NOT_HERE not in rows else [row for row in rows if row != NOT_HERE]
            if row_loops.all_own(siblings, here):  # one copy each, as nearly always
                return rows
        rows = []
        for key in request.keys:
            row = index.get(key, NOT_HERE)
            if row != NOT_HERE and not (plain and siblings[row] == row):
                mine = not catalog.tenants.are_configured or table.tenant[row] == tenant.number
                row = self._choose(row, request.client, avoid) if mine else NOT_HERE
            if row == NOT_HERE and not every:
                break
            rows.append(row)
        return rows

    def _choose(self, first: int, reader: str, avoid: Collection[str]) -> int:
        """Return the copy for this reader: its own node's, else one in the fastest medium."""
        best: list[int] = []
        least = (True, len(MEDIA))
        for row in self._catalog.table.copies(first):
            where = self._catalog.pool.of(row).where
            cost = (where.node != reader, SPEED[where.medium])
            if where.node in avoid or cost > least:
                continue
            best = [*best, row] if cost == least else [row]
            least = cost
        if not best:
            return NOT_HERE
        self._turn += 1
        return best[self._turn % len(best)]

    def _located(self, lease_id: int, rows: Sequence[int]) -> m.Located:
        catalog, table = self._catalog, self._catalog.table
        nodes, node_idx = catalog.pool.name(rows)
        here = rows if NOT_HERE not in rows else [row for row in rows if row != NOT_HERE]
        chunked = not row_loops.all_are(table.chunk_bytes, here, 0)

        def column(values: array[int]) -> list[int]:
            if len(here) == len(rows):
                return row_loops.gather(values, rows)
            return [values[row] if row != NOT_HERE else 0 for row in rows]

        return m.Located(
            lease_id=lease_id,
            lease_s=catalog.leases.duration_s,
            nodes=nodes,
            node_idx=node_idx,
            offsets=column(table.offset),
            lengths=column(table.length),
            checksums=column(table.checksum),
            chunk_bytes=column(table.chunk_bytes) if chunked else [],
        )

    def _renew(self, request: m.Renew, now: float) -> m.Reply:
        leases = self._catalog.leases
        running = [leases.renew(request.client, lease_id, now) for lease_id in request.lease_ids]
        return m.Renewed(running=running, lease_s=leases.duration_s)

    def _release(self, request: m.Release, now: float) -> m.Reply:
        del now
        leases = self._catalog.leases
        ended = [leases.release(request.client, lease_id) for lease_id in request.lease_ids]
        known = [lease for lease in ended if lease is not None]
        self._catalog.end_leases(known)
        return m.Done(len(known))

    def _exists(self, request: m.Exists, now: float) -> m.Reply:
        del now
        tenant = self._catalog.tenants.acting(request.client)
        if tenant is None:
            return not_entered(request.client)
        index, doubted = self._catalog.index.rows, self._catalog.pool.doubted
        if not self._catalog.tenants.are_configured and not doubted:
            return m.Present(list(map(index.__contains__, request.keys)))
        owner = self._catalog.table.tenant
        rows = [index.get(key, NOT_HERE) for key in request.keys]
        mine = [row != NOT_HERE and owner[row] == tenant.number for row in rows]
        if doubted:
            mine = [
                is_mine and self._choose(row, request.client, doubted) != NOT_HERE
                for row, is_mine in zip(rows, mine, strict=True)
            ]
        return m.Present(mine)
