"""Who is told that copies come, are used and go: subscribers by events, and observers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final

from kvstore.events.event_log import EventLog
from kvstore.events.event_log import Medium as EventMedium
from kvstore.master.books.block_index import BlockIndex
from kvstore.master.books.copy_table import CopyTable
from kvstore.master.books.pool import SegmentPool
from kvstore.master.observer import PoolObserver
from kvstore.wire.messages import Medium

EVENT_MEDIA: Final = dict.fromkeys(Medium, EventMedium.DRAM) | {Medium.SSD: EventMedium.SSD}


class Notices:
    """Tells what the catalog does, in the middle of it. Not thread-safe.

    Args:
        table: The columns of the copies.
        pool: Where they are.
        events: Where it is noted that a block came or went; None if nobody wants to know.
    """

    def __init__(self, table: CopyTable, pool: SegmentPool, events: EventLog | None) -> None:
        self._table = table
        self._pool = pool
        self._events = events
        self.observers: list[PoolObserver] = []

    def present(self, index: BlockIndex) -> Iterator[tuple[bytes, EventMedium]]:
        """Iterate over the committed blocks and the media that they are in, each once."""
        for first in sorted(index):  # about as they came
            key = self._table.keys[first]
            for medium in {self._medium(row) for row in self._table.copies(first)}:
                yield key, medium

    def stored(self, rows: Sequence[int]) -> None:
        """Copies were committed, and are in the index."""
        events = self._events
        if events is not None:
            for medium, keys in self._first_or_last(rows):
                events.stored(keys, medium)
        for observer in self.observers:
            observer.stored(rows)

    def hit(self, rows: Sequence[int]) -> None:
        """Copies were given to a reader."""
        for observer in self.observers:
            observer.hit(rows)

    def evicted(self, rows: Sequence[int]) -> None:
        """Copies make room for others; they are in the index yet."""
        self._removed(rows)
        for observer in self.observers:
            observer.evicted(rows)

    def dropped(self, row: int) -> None:
        """A copy goes for any other reason; it is in the index yet."""
        self._removed((row,))
        for observer in self.observers:
            observer.dropped(row)

    def _removed(self, rows: Sequence[int]) -> None:
        events = self._events
        if events is not None:
            for medium, keys in self._first_or_last(rows):
                events.removed(keys, medium)

    def _first_or_last(self, rows: Sequence[int]) -> Iterator[tuple[EventMedium, list[bytes]]]:
        """Yield, in order, the blocks that have one copy, which is among these, in a medium."""
        keys = self._table.keys
        for medium, run in groupby(rows, self._medium):
            only = [keys[row] for row in run if self._is_only_in_medium(row, medium)]
            if only:
                yield medium, only

    def _medium(self, row: int) -> EventMedium:
        return EVENT_MEDIA[self._pool.of(row).medium]

    def _is_only_in_medium(self, row: int, medium: EventMedium) -> bool:
        if self._table.sibling[row] == row:
            return True
        return sum(self._medium(copy) is medium for copy in self._table.copies(row)) == 1
