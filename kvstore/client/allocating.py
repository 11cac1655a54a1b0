"""Asking a master for places: for the blocks of a put, and on disks for those of the next."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvstore.client.steps import Steps
from kvstore.wire import messages as m

if TYPE_CHECKING:
    from kvstore.client.client_record import ClientRecord
    from kvstore.client.disk_places import DiskPlaces
    from kvstore.client.master_access import MasterAccess
    from kvstore.client.source import Source


class Allocating:
    """Thread-safe.

    Args:
        record: What the client remembers.
        master: Its requests.
        ahead: Places on disks that are had ahead of a put; None: never.
    """

    def __init__(
        self, record: ClientRecord, master: MasterAccess, ahead: DiskPlaces | None
    ) -> None:
        self._record = record
        self._master = master
        self._ahead = ahead

    def ask(
        self,
        batch: int,
        source: Source,
        places: Sequence[int],
        deadline_s: float,
        *,
        ahead: bool,
    ) -> Steps[tuple[m.Allocated, bool]]:
        """Ask for places; also return whether the master was told checksums.

        Args:
            batch: The number of the put.
            source: Its blocks.
            places: See `Allocate.places`.
            deadline_s: Of the monotonic clock.
            ahead: Whether the next put may need such places too.

        Raises:
            MasterUnavailable: It did not answer; it may have granted them.
            Fenced, MasterRefused, TenantRefused: It did not.
        """
        options, next_ones = source.options, self._ahead if ahead else None
        more = [] if next_ones is None else next_ones.order(source)
        abandoned = self._record.abandoned()
        request = m.Allocate(
            client=self._record.name,
            batch=batch,
            keys=list(source.keys),
            lengths=source.lengths.tolist(),
            checksums=source.sums.values.tolist() if source.sums.complete else [],
            chunk_bytes=options.chunk_bytes,
            pin=options.pin,
            pin_s=options.pin_s,
            group=options.group,
            replicas=options.replicas,
            media=list(options.media),
            prefer=list(options.prefer),
            avoid=self._record.avoided(),
            abandoned=abandoned,
            places=list(places),
            more=more,
            more_bytes=int(source.lengths[0]) if more else 0,
        )
        asked_s = time.monotonic()
        granted: m.Allocated | None = None
        try:
            left_s = max(0.001, deadline_s - asked_s)
            granted = yield from self._master.ask(request, m.Allocated, timeout_s=left_s)
        finally:
            if next_ones is not None and more:
                next_ones.keep(request, granted, asked_s)
        self._record.told_abandoned(abandoned)
        if next_ones is not None:
            next_ones.learn(granted.outcomes)
        return granted, bool(request.checksums)
