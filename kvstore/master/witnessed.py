"""Writers that a node has proved to be out of its segments: what they left there is free.

The node asks first what a writer has there, and frees that only if the writer had no access between
the question and the answer: so what is asked late, or twice, frees nothing that was granted later.
See `kvstore/node/writer_witness.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from kvstore.master.abandoned import AbandonedBatches
from kvstore.master.books.catalog import Catalog
from kvstore.master.books.open_puts import PutBatch
from kvstore.master.transition import NEVER, Transition
from kvstore.wire import messages as m

# Of the time of a put. A writer that lives begins with nothing that it has had for longer: half of
# it is for writing, and a place that is handed on within it counts anew once.
LATE_PUTS: Final = 2


class Witnessed:
    """See `MasterPart`.

    Args:
        catalog: The pool's books.
        abandoned: Batches that may not be granted again.
        put_s: How long a put may take.
    """

    def __init__(self, catalog: Catalog, abandoned: AbandonedBatches, *, put_s: float) -> None:
        self._catalog = catalog
        self._put_s = put_s
        self._abandoned = abandoned

    def transitions(self) -> Mapping[type, Transition]:
        """Return what carries out which type of request."""
        return {m.WritersAt: self._writers_at, m.WritesOver: self._writes_over}

    def advance(self, now: float) -> float:
        """Nothing is ever due."""
        del now
        return NEVER

    def _writers_at(self, request: m.WritersAt, now: float) -> m.Reply:
        puts, granted_s = self._catalog.puts, self._granted_s(now, is_dead=request.dead)
        where = self._indices(request.node, request.segments)
        if not request.writers:
            found = (batch.client for batch in puts if self._places(batch, where, granted_s))
            return m.WritersThere(list(dict.fromkeys(found)))
        batches = [
            [b.batch for b in puts.of_client(writer) if self._places(b, where, granted_s)]
            for writer in request.writers
        ]
        return m.WritersThere(request.writers, batches)

    def _writes_over(self, request: m.WritesOver, now: float) -> m.Reply:
        catalog, granted_s = self._catalog, self._granted_s(now, is_dead=request.dead)
        where = self._indices(request.node, request.segments)
        freed = 0
        for number in request.batches:
            batch = catalog.puts.find(request.writer, number)
            if batch is None:
                continue
            for place in self._places(batch, where, granted_s):
                freed += catalog.settle(batch, place)
            # Its request may come once more, and would be granted what is freed once more then.
            self._abandoned.remember(request.writer, number)
        return m.Done(freed)

    def _granted_s(self, now: float, *, is_dead: bool) -> float:
        """Return until when a place was granted that counts, in awake time."""
        return math.inf if is_dead else self._catalog.leases.awake(now) - LATE_PUTS * self._put_s

    def _places(self, batch: PutBatch, where: set[int], granted_s: float) -> list[int]:
        """Return where a writer may have been writing; who may come back, too late for that."""
        if batch.batch < 0 or batch.opened_s > granted_s:  # of copies a node says how they ended
            return []
        segment = self._catalog.table.segment
        return [place for place, row in batch.rows.items() if segment[row] in where]

    def _indices(self, node: str, numbers: list[int]) -> set[int]:
        found = (self._catalog.pool.find(node, number) for number in numbers)
        return {segment.index for segment in found if segment is not None}
