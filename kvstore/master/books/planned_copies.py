"""Further copies of blocks, which the master plans and nodes write; see `kvstore.master.copies`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstore.checksum import table_bytes
from kvstore.master.books.allocator import padded
from kvstore.master.books.copy_state import COMMITTED
from kvstore.master.books.open_puts import PutBatch
from kvstore.master.books.segment import Segment

if TYPE_CHECKING:
    from kvstore.master.books.catalog import Catalog

SOURCE_LEFT: Final = -2  # in `PutBatch.source`: a planned copy that is not read any more


class PlannedCopies:
    """Planned copies as puts of the node that copies, which read a leased row. Not thread-safe.

    Args:
        catalog: The pool's books.

    Attributes:
        last_id: Of the copy that was planned last.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._batches: dict[int, PutBatch] = {}
        self.last_id = 0

    def open(
        self, row: int, target: Segment, now: float, *, over_quota: bool = False
    ) -> int | None:
        """Take space for another copy of a block; return its number. A move may go over a quota."""
        catalog, table = self._catalog, self._catalog.table
        assert table.state[row] == COMMITTED, row
        if target.placeable_s > now or target is catalog.pool.of(row):
            return None
        length, chunk_bytes = table.length[row], table.chunk_bytes[row]
        space = target.space_of(padded(length + table_bytes(length, chunk_bytes)))
        tenant = catalog.tenants[table.tenant[row]]
        full = tenant.exceeds(space) and not over_quota
        copy = None if full else target.place(table.keys[row], length, space)
        if copy is None:
            return None
        self.last_id += 1
        catalog.describe([copy], [table.checksum[row]], chunk_bytes, tenant)
        batch = PutBatch(
            client=catalog.pool.of(row).node.name,
            batch=-self.last_id,
            opened_s=catalog.leases.awake(now),
            source=row,
            rows={0: copy},
        )
        catalog.puts.add(batch)
        self._batches[self.last_id] = batch
        catalog.hold_bytes((row,))
        return self.last_id

    def row(self, copy_id: int) -> int | None:
        """Return the row that a planned copy goes to, until it ends or is lost."""
        batch = self._batches.get(copy_id)
        return None if batch is None else batch.rows.get(0)

    def commit(self, copy_id: int, now: float) -> bool:
        """A planned copy is written; False if it is too late, or gone."""
        batch = self._batches.pop(copy_id, None)
        if batch is None:
            return False
        stored = self._catalog.commit(batch, 0, now)
        self.ended(batch)
        return stored

    def abort(self, copy_id: int, *, at_rest: bool) -> None:
        """A planned copy is given up; `at_rest`: nothing is under way. Unknown ones are ignored."""
        batch = self._batches.get(copy_id)
        if batch is not None:
            self._catalog.end_batch(batch, at_rest=at_rest)

    def ended(self, batch: PutBatch) -> None:
        """A put is over, its bytes perhaps in quarantine: the source of a planned copy may go."""
        if batch.source >= 0:
            source, batch.source = batch.source, SOURCE_LEFT
            self._catalog.let_go((source,))
        if batch.batch < 0 and not batch.rows:
            self._batches.pop(-batch.batch, None)
