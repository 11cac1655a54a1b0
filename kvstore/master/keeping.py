"""What is asked of blocks that are there: to stay, to go, or what is wrong with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvstore.master.books.catalog import Catalog
from kvstore.master.books.tenants import Tenant
from kvstore.master.timing import MasterTiming
from kvstore.master.transition import Transition, equally_long, malformed, not_entered
from kvstore.wire import messages as m

# Of the silence that drops a node: whoever says then that it cannot be reached is believed.
SILENT_SHARE: Final = 1 / 3


class Keeping:
    """Pins, removals and complaints; see `MasterPart`.

    Args:
        catalog: The pool's books.
        timing: The master's durations.
    """

    def __init__(self, catalog: Catalog, timing: MasterTiming) -> None:
        self._catalog = catalog
        self._timing = timing

    def transitions(self) -> Mapping[type, Transition]:
        """Return what carries out which type of request."""
        return {m.Remove: self._remove, m.SetPin: self._set_pin, m.ReportBad: self._report_bad}

    def advance(self, now: float) -> float:
        """End the soft pins whose time has come."""
        pins = self._catalog.pins
        pins.end_soft(now)
        return pins.soft.first_end_s

    def _remove(self, request: m.Remove, now: float) -> m.Reply:
        del now
        tenant = self._catalog.tenants.acting(request.client)
        if tenant is None:
            return not_entered(request.client)
        named = self._named(request.keys, request.group, tenant)
        for key in named:
            for row in self._catalog.copies(key):
                self._catalog.drop(row)
        return m.Done(len(named))

    def _set_pin(self, request: m.SetPin, now: float) -> m.Reply:
        tenant = self._catalog.tenants.acting(request.client)
        if tenant is None:
            return not_entered(request.client)
        named = self._named(request.keys, request.group, tenant)
        set_pin = self._catalog.pins.set
        return m.Done(sum(set_pin(key, request.pin, request.pin_s, now) for key in named))

    def _named(self, keys: list[bytes], group: str, tenant: Tenant) -> list[bytes]:
        """Return the tenant's blocks of these names and of this group, each once."""
        catalog = self._catalog
        index, owner = catalog.index.rows, catalog.table.tenant
        grouped = catalog.groups.keys(catalog.groups.number(tenant.number, group)) if group else []
        return [
            key
            for key in dict.fromkeys((*keys, *grouped))
            if key in index and owner[index[key]] == tenant.number
        ]

    def _report_bad(self, request: m.ReportBad, now: float) -> m.Reply:
        segments = request.segments or [0] * len(request.keys)
        columns = (request.keys, request.nodes, request.offsets, request.corrupt, segments)
        if not equally_long(*columns):
            return malformed("columns of different lengths")
        catalog, table = self._catalog, self._catalog.table
        dropped = 0
        for key, node, offset, corrupt, number in zip(*columns, strict=True):
            segment = catalog.pool.find(node, number)
            if segment is None:
                continue
            rows = [
                row
                for row in catalog.copies(key)
                if table.segment[row] == segment.index and table.offset[row] == offset
            ]
            if not rows:
                continue  # gone or replaced since the reporter looked it up
            catalog.counts["corrupt" if corrupt else "unreachable"] += 1
            if corrupt:
                catalog.drop(rows[0])
                dropped += 1
            # One client's broken link is not the end of a node that others can reach. And one that
            # was stopped has all its blocks when it goes on: nobody is sent there until then.
            elif now - segment.node.heard_s > self._timing.silence_s * SILENT_SHARE:
                catalog.pool.doubted.add(node)
        return m.Done(dropped)
