"""Where a copy may go: segments that take something new, the better ones first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvstore.master.books.catalog import Catalog
from kvstore.master.books.segment import Segment
from kvstore.master.copies.copy_order import CopyOrder, Purpose
from kvstore.wire.messages import Medium

SPEED: Final = {medium: position for position, medium in enumerate(Medium)}


class Targets:
    """Chooses the targets of orders that name none.

    Args:
        catalog: The pool's books.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def __call__(self, order: CopyOrder, row: int) -> Iterable[int]:
        """Return the segments that the copy of a row may go to, the best first."""
        pool, table = self._catalog.pool, self._catalog.table
        source = pool.of(row)
        others = [pool.of(copy) for copy in self._catalog.copies(table.keys[row])]
        if order.purpose.moves:
            others.remove(source)
        domains = {segment.node.domain for segment in others}
        found = [
            segment
            for segment in pool
            if segment.is_told
            and not segment.node.draining
            and segment not in others
            and _suits(order.purpose, source, segment)
            and segment.node.domain not in domains
        ]
        # A tier is left within the node where that is possible; else space is what counts.
        found.sort(
            key=lambda s: (
                s.node is not source.node,
                abs(SPEED[s.medium] - SPEED[source.medium]),
                -s.free,
                s.index,
            )
        )
        return [segment.index for segment in found]


def _suits(purpose: Purpose, source: Segment, target: Segment) -> bool:
    if target is source:
        return False
    match purpose:
        case Purpose.DEMOTE:
            return target.medium is Medium.SSD
        case Purpose.PROMOTE:
            return target.medium is Medium.DRAM
        case Purpose.SPREAD | Purpose.REPLICATE:
            return target.node is not source.node and target.medium is not Medium.SSD
        case Purpose.DRAIN:
            return target.node is not source.node
    return True
