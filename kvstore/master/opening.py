"""Places that a client has ahead of its puts: opened, and told of in columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvstore import row_loops
from kvstore.master.abandoned import AbandonedBatches
from kvstore.master.books.allocator import padded
from kvstore.master.books.catalog import Catalog
from kvstore.master.books.open_puts import NO_KEY
from kvstore.master.books.tenants import Tenant
from kvstore.master.timing import MasterTiming
from kvstore.wire import messages as m
from kvstore.wire.granted import Granted

# So much of the pool is reserved at most: what one client keeps ahead, others cannot have.
RESERVED_SHARE: Final = 1 / 32
DISK_SHARE: Final = 1 / 16  # of disks, which are large
MORE_MAX: Final = 64  # places of one request


class PlaceOpener:
    """Opens reserved places. Not thread-safe.

    Args:
        catalog: The pool's books.
        timing: The master's durations.
        abandoned: Numbers that writers gave up.
    """

    def __init__(self, catalog: Catalog, timing: MasterTiming, abandoned: AbandonedBatches) -> None:
        self._catalog = catalog
        self._timing = timing
        self._abandoned = abandoned

    def open(
        self,
        client: str,
        numbers: Sequence[int],
        length: int,
        avoid: Sequence[str],
        tenant: Tenant,
        now: float,
        *,
        on_disks: bool = False,
    ) -> None:
        """Reserve places, as many as there are to spare; none for a client that is counted.

        Args:
            client: Whose they are.
            numbers: Theirs, in the order in which they are opened. What is in use is left alone.
            length: Bytes of payload of each.
            avoid: Nodes to leave alone.
            tenant: Of the client.
            now: As of `StoreMaster.step`.
            on_disks: On disks only; else nowhere there: a value alone takes a disk so long that a
                request more does not matter.
        """
        catalog, space = self._catalog, padded(length)
        pool, puts = catalog.pool, catalog.puts
        budget = pool.fast_bytes * RESERVED_SHARE
        if on_disks:
            budget += pool.disk_bytes * DISK_SHARE
        spare = int(budget - puts.reserved_bytes) // space
        fresh = self._abandoned.others(client, puts.unknown(client, numbers))[: max(0, spare)]
        if not fresh or tenant.quota_bytes is not None:
            return
        candidates = pool.candidates(client, now, avoid=avoid)
        sets = candidates.sets
        if not sets or (sets[0][0].medium is m.Medium.SSD) is not on_disks:
            return
        candidates = candidates.without_overflow()
        keys, lengths = [NO_KEY] * len(fresh), [length] * len(fresh)
        rows = pool.place_many(keys, lengths, space, candidates)
        while len(rows) < len(fresh):
            row = pool.place(NO_KEY, length, space, candidates)
            if row is None:
                break
            rows.append(row)
        catalog.describe(rows, [0] * len(rows), 0, tenant)
        puts.reserve(client, fresh, rows, catalog.leases.awake(now), tenant.number)

    def granted(self, client: str, numbers: Sequence[int]) -> Granted:
        """Tell where the first of these places are, up to one that is not the client's."""
        puts, pool = self._catalog.puts, self._catalog.pool
        rows = []
        for number in numbers:
            batch = puts.find(client, number)
            row = None if batch is None else puts.reserved(batch)
            if row is None:
                break
            rows.append(row)
        nodes, node_idx = pool.name(rows)
        offsets = row_loops.gather(self._catalog.table.offset, rows)
        return Granted(nodes, node_idx, offsets, self._timing.put_s)
