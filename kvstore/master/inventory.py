"""What administrators ask: which blocks and which segments there are."""

from __future__ import annotations

from collections.abc import Mapping

from kvstore.master.books.catalog import Catalog
from kvstore.master.books.copy_state import OPEN, QUARANTINED
from kvstore.master.books.groups import NO_GROUP
from kvstore.master.key_order import KeyOrder
from kvstore.master.transition import NEVER, Transition
from kvstore.wire import messages as m


class Inventory:
    """Lists; see `MasterPart`.

    Args:
        catalog: The pool's books.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._order = KeyOrder(catalog.index.keys)

    def transitions(self) -> Mapping[type, Transition]:
        """Return what carries out which type of request."""
        return {
            m.ListBlocks: self._list_blocks,
            m.ListSegments: self._list_segments,
            m.ListWriters: self._list_writers,
        }

    def advance(self, now: float) -> float:
        """Nothing is ever due."""
        del now
        return NEVER

    def _list_blocks(self, request: m.ListBlocks, now: float) -> m.Reply:
        del now
        rows: list[int] = []
        after, more = request.after, True
        while more and len(rows) < request.limit:
            keys, more = self._order.after(after, request.limit - len(rows))
            rows += [row for key in keys if (row := self._wanted(key, request)) is not None]
            after = keys[-1] if keys else after
        if not more:
            self._order.forget()
        return self._page(rows, more=more)

    def _wanted(self, key: bytes, request: m.ListBlocks) -> int | None:
        catalog, table = self._catalog, self._catalog.table
        row = catalog.index.rows.get(key)
        if row is None:
            return None
        if request.tenant is not None and self._tenant(row) != request.tenant:
            return None
        if request.group is not None and catalog.groups.label(table.group[row]) != request.group:
            return None
        return row

    def _page(self, firsts: list[int], *, more: bool) -> m.BlockList:
        catalog, table = self._catalog, self._catalog.table
        copies = [table.copies(first) for first in firsts]
        nodes, positions = catalog.pool.name([row for rows in copies for row in rows])
        named = iter(positions)
        return m.BlockList(
            keys=[table.keys[row] for row in firsts],
            lengths=[table.length[row] for row in firsts],
            pins=[m.Pin(table.pin[row]) for row in firsts],
            leased=[any(table.leases[row] for row in rows) for rows in copies],
            tenants=[self._tenant(row) for row in firsts],
            groups=[self._group(row) for row in firsts],
            nodes=nodes,
            copies=[[next(named) for _ in rows] for rows in copies],
            more=more,
            offsets=[[table.offset[row] for row in rows] for rows in copies],
            checksums=[table.checksum[row] for row in firsts],
            chunk_bytes=[table.chunk_bytes[row] for row in firsts],
        )

    def _tenant(self, row: int) -> str:
        return self._catalog.tenants[self._catalog.table.tenant[row]].name

    def _group(self, row: int) -> str:
        number = self._catalog.table.group[row]
        return "" if number == NO_GROUP else self._catalog.groups.label(number)

    def _list_segments(self, request: m.ListSegments, now: float) -> m.Reply:
        del request
        return m.SegmentList(
            [
                m.SegmentFigures(
                    where=segment.where,
                    domain=segment.node.domain,
                    capacity_bytes=segment.capacity,
                    free_bytes=segment.free,
                    largest_free_bytes=segment.largest_free,
                    blocks=segment.blocks,
                    silent_s=max(0.0, now - segment.node.heard_s),
                    draining=segment.node.draining,
                )
                for segment in self._catalog.pool
            ]
        )

    def _list_writers(self, request: m.ListWriters, now: float) -> m.Reply:
        del request, now
        table = self._catalog.table
        nbytes: dict[str, dict[int, int]] = {}
        for batch in self._catalog.puts:
            sizes = nbytes.setdefault(batch.client, {OPEN: 0, QUARANTINED: 0})
            for row in batch.rows.values():
                sizes[table.state[row]] += table.space[row]
        return m.WriterList(
            [
                m.WriterFigures(
                    writer=name, open_bytes=sizes[OPEN], quarantined_bytes=sizes[QUARANTINED]
                )
                for name, sizes in sorted(nbytes.items())
            ]
        )
