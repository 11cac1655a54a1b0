"""The catalog as `Copying` sees it."""

from __future__ import annotations

from typing import Final

from kvstore.checksum import table_bytes
from kvstore.master.books.catalog import Catalog
from kvstore.master.copies.copy_order import Purpose
from kvstore.wire import messages as m

EVICTED_MAX: Final = 16  # times a block's own size may go for it


class CatalogCopies:
    """Opens, commits and gives up copies in a catalog; see `CopyPool`. Not thread-safe."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._nodes: dict[int, str] = {}  # of the copies that were opened

    def row_in(self, key: bytes, segment: int) -> int | None:
        """Return the copy of a block in a segment."""
        where = self._catalog.table.segment
        return next((row for row in self._catalog.copies(key) if where[row] == segment), None)

    def stored_bytes(self, row: int) -> int:
        """Return the size of a copy, part table included, without padding."""
        table = self._catalog.table
        return table.length[row] + table_bytes(table.length[row], table.chunk_bytes[row])

    def node_of(self, segment: int) -> str | None:
        """Return the node that lends a segment; None if it is gone."""
        found = self._catalog.pool.segments.get(segment)
        return None if found is None else found.node.name

    def open_copy(self, row: int, target: int, now: float, purpose: Purpose) -> int | None:
        """Take space in `target`; None if there is none, or the block is there already.

        Args:
            row: What is copied.
            target: Segment.
            now: As everywhere in the master.
            purpose: Says whether older blocks of the target may go for it, and whether it is to
                be the only copy: that one may go over its tenant's quota for a while.
        """
        catalog = self._catalog
        segment = catalog.pool.segments.get(target)
        if segment is None or self.row_in(catalog.table.keys[row], target) is not None:
            return None
        if purpose.may_evict:
            self._make_room(row, target)
        copy_id = catalog.planned.open(row, segment, now, over_quota=purpose.moves)
        if copy_id is not None:
            self._nodes[copy_id] = catalog.pool.of(row).node.name
        return copy_id

    def commit_copy(self, copy_id: int, now: float) -> bool:
        """Make a written copy count; False if it is too late, or its segment is gone."""
        self._nodes.pop(copy_id, None)
        return self._catalog.planned.commit(copy_id, now)

    def abort_copy(self, copy_id: int, *, at_rest: bool) -> None:
        """Give a copy up; what may still be written is quarantined unless `at_rest`."""
        if at_rest:
            self._nodes.pop(copy_id, None)
        self._catalog.planned.abort(copy_id, at_rest=at_rest)

    def settle_late(self, node: str, copy_id: int) -> None:
        """Free what is quarantined for a copy that its node reports after all."""
        if self._nodes.get(copy_id) == node:
            self.abort_copy(copy_id, at_rest=True)

    def is_open(self, copy_id: int) -> bool:
        """Tell whether a copy was neither committed nor given up."""
        return copy_id in self._nodes and self._catalog.planned.row(copy_id) is not None

    def forget_node(self, node: str) -> None:
        """Forget a node that is gone."""
        self._nodes = {copy_id: name for copy_id, name in self._nodes.items() if name != node}

    def drop(self, row: int) -> None:
        """Let one copy go."""
        self._catalog.drop(row)

    def describe(self, copy_id: int, row: int, target: int) -> m.Copy | None:
        """Return the work order of an opened copy; None if its target was lost meanwhile."""
        catalog, table = self._catalog, self._catalog.table
        copy = catalog.planned.row(copy_id)
        segment = catalog.pool.segments.get(target)
        if copy is None or segment is None:
            return None
        return m.Copy(
            copy_id=copy_id,
            key=table.keys[row],
            nbytes=self.stored_bytes(row),
            checksum=table.checksum[row],
            chunk_bytes=table.chunk_bytes[row],
            source_segment=catalog.pool.of(row).where.segment,
            source_offset=table.offset[row],
            target=segment.where,
            target_offset=table.offset[copy],
        )

    def _make_room(self, row: int, target: int) -> None:
        """Evict in a segment until the copy fits, within a bound: it may be in pieces."""
        catalog, table = self._catalog, self._catalog.table
        segment, space = catalog.pool.segments[target], table.space[row]
        if not segment.can_make_room(space):
            return
        allowance = EVICTED_MAX * space
        while segment.largest_free < space and allowance > 0:
            victim = segment.victim()
            if victim is None:
                return
            allowance -= table.space[victim]
            catalog.evict(victim)
