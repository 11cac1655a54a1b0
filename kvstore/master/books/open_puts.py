"""Puts between allocation and commit, and the copies of those that ended badly.

A put holds its key: nobody else writes the same block meanwhile. It loses the key, and its copies
go to quarantine, when its writer is fenced, is too slow, or gives up without knowing whether its
bytes are still under way. Quarantine ends when the writer itself says that the write is over (it
answers for its own engine), or when its incarnation is certainly dead.

A reserved place is an open copy without a key: a client asked for it ahead of a put. It gets its
key and is committed in one step (`name`), and ends as other open copies do.

These are the books only; the catalog changes the states of the copies along with them.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvstore import row_loops
from kvstore.errors import InvariantViolated
from kvstore.key_index import make_key_index
from kvstore.master.books.copy_state import OPEN, QUARANTINED
from kvstore.master.books.copy_table import CopyTable

NO_SOURCE: Final = -1
NO_KEY: Final = b""  # of a reserved place
UNKNOWN_ROW: Final = -1


@dataclass(slots=True, eq=False, kw_only=True)
class PutBatch:
    """The copies of one `Allocate` that are being written, or in quarantine.

    Attributes:
        client: Who writes; with `batch` this names the put.
        batch: The client's number; negative for copies that the master planned.
        opened_s: When, in awake time (see `LeaseTable`).
        replicas: Places per key in `rows`.
        pin: What the blocks are to be pinned as.
        pin_s: For how long.
        tenant: Whose they are.
        group: What they go together with.
        source: The row that a planned copy is read from.
        is_reserved: Its only copy is, or was before it went to quarantine, a reserved place.
        unsummed: Checksums are told with the commit.
        rows: place -> row; places are those of `Allocated.node_idx`.
    """

    client: str
    batch: int
    opened_s: float
    replicas: int = 1
    pin: int = 0
    pin_s: float = 0.0
    tenant: int = 0
    group: str = ""
    source: int = NO_SOURCE
    is_reserved: bool = False
    unsummed: bool = False
    rows: dict[int, int] = field(default_factory=dict)


class OpenPuts:
    """The puts under way and in quarantine. Not thread-safe.

    Args:
        table: The columns of their copies.
    """

    def __init__(self, table: CopyTable) -> None:
        self._table = table
        self._clients: dict[str, dict[int, PutBatch]] = {}
        self._open: OrderedDict[int, PutBatch] = OrderedDict()  # by id(), in order of opening
        self.writers = make_key_index(table.keys)  # of one open copy each; read it only
        self._reserved: set[int] = set()  # rows
        self.reserved_bytes = 0  # space of those; read it only

    def __iter__(self) -> Iterator[PutBatch]:
        return (batch for batches in self._clients.values() for batch in batches.values())

    def count_open(self) -> int:
        """Count the open copies that are being written under a key."""
        state = self._table.state
        return sum(
            state[row] == OPEN
            for batch in self._open.values()
            if not batch.is_reserved
            for row in batch.rows.values()
        )

    def find(self, client: str, batch: int) -> PutBatch | None:
        """Return a batch of which something is open or in quarantine."""
        batches = self._clients.get(client)
        return None if batches is None else batches.get(batch)

    def add(self, batch: PutBatch) -> None:
        """Enter a batch, whose copies are entered in `rows` and `hold` by the caller."""
        assert self.find(batch.client, batch.batch) is None, batch
        self._clients.setdefault(batch.client, {})[batch.batch] = batch
        self._open[id(batch)] = batch

    def hold(self, key: bytes, row: int) -> None:
        """Give a key, which nobody holds, to the put of this open copy."""
        assert key not in self.writers, key
        self.writers[key] = row

    def hold_all(self, keys: list[bytes], rows: list[int]) -> None:
        """Give keys, none of which anybody holds, to the put of these open copies."""
        held = self.writers.claim(keys, rows)
        assert not held, held

    # -- reserved places ----------------------------------------------------------------------

    def reserve(
        self, client: str, numbers: Sequence[int], rows: Sequence[int], opened_s: float, tenant: int
    ) -> None:
        """Enter batches whose only copies, open ones without keys, are reserved places."""
        if not rows:
            return
        batches = self._clients.setdefault(client, {})
        assert batches.keys().isdisjoint(numbers), numbers
        for number, row in zip(numbers, rows, strict=False):
            assert self._table.keys[row] == NO_KEY, row
            batch = PutBatch(
                client=client,
                batch=number,
                opened_s=opened_s,
                tenant=tenant,
                is_reserved=True,
                rows={0: row},
            )
            batches[number] = self._open[id(batch)] = batch
        self._reserved.update(rows)
        self.reserved_bytes += row_loops.total(self._table.space, rows)

    def unknown(self, client: str, numbers: Sequence[int]) -> Sequence[int]:
        """Return those of these numbers that are of no batch of this client."""
        batches = self._clients.get(client)
        if batches is None or batches.keys().isdisjoint(numbers):
            return numbers
        return [number for number in numbers if number not in batches]

    def reserved(self, batch: PutBatch) -> int | None:
        """Return the row of a reserved place; None if it is none, or not any more."""
        row = batch.rows.get(0, -1) if batch.is_reserved else -1
        return row if row in self._reserved else None

    def name(self, row: int, key: bytes) -> None:
        """Give a reserved place a key that nobody holds: it is committed in the same step."""
        self._unreserve(row)
        self._table.keys[row] = key

    def take_named(self, batch: PutBatch, row: int, key: bytes) -> None:
        """Do what `name` and `take` do, of the only copy of a batch."""
        table = self._table
        self._reserved.remove(row)
        self.reserved_bytes -= table.space[row]
        table.keys[row] = key
        batch.rows.clear()
        self._open.pop(id(batch), None)
        batches = self._clients[batch.client]
        del batches[batch.batch]
        if not batches:
            del self._clients[batch.client]

    def take_named_all(
        self, batches: Sequence[PutBatch], rows: Sequence[int], keys: Sequence[bytes]
    ) -> None:
        """Do what `take_named` does for each of these."""
        self._reserved.difference_update(rows)
        self.reserved_bytes -= row_loops.total(self._table.space, rows)
        row_loops.place(self._table.keys, rows, keys)
        for batch in batches:
            batch.rows.clear()
            self._forget(batch)

    def take_place(self, batch: PutBatch, row: int) -> None:
        """Make the only copy of a batch, a reserved place, one that is to be another put's.

        That gives it a key and adds it to its own in the same step.
        """
        self._unreserve(row)
        batch.rows.clear()
        self._forget(batch)

    def renumber(self, batch: PutBatch, number: int) -> None:
        """Let a batch have another number, which is not in use."""
        assert self.find(batch.client, number) is None, batch
        batches = self._clients[batch.client]
        del batches[batch.batch]
        batch.batch = number
        batches[number] = batch

    def _unreserve(self, row: int) -> None:
        self._reserved.remove(row)
        self.reserved_bytes -= self._table.space[row]

    # -- the end ------------------------------------------------------------------------------

    def take_all(self, batch: PutBatch, places: Sequence[int]) -> list[int] | None:
        """Remove copies that their writer ended; None, and nothing else, if that is not plain.

        It is if all of them are open, hold their keys, and no block has another copy in this put.
        """
        rows_at, states = batch.rows, self._table.state
        is_put = batch.source == NO_SOURCE and not batch.is_reserved
        if batch.replicas > 1 or not is_put:
            return None
        everything = len(places) == len(rows_at) and places == list(reversed(rows_at))
        if everything:  # as nearly always
            rows = list(reversed(rows_at.values()))
        else:
            rows = [rows_at.get(place, UNKNOWN_ROW) for place in places]
            if len(set(rows)) < len(rows) or UNKNOWN_ROW in rows:
                return None
        if not row_loops.all_are(states, rows, OPEN):
            return None
        self.writers.drop(row_loops.pick(self._table.keys, rows))
        if everything:
            rows_at.clear()
        else:
            row_loops.drop(rows_at, places)
        if not rows_at:
            self._forget(batch)
        return rows

    def take(self, batch: PutBatch, place: int) -> int | None:
        """Remove a copy that its writer ended, from quarantine too; None if it is unknown."""
        row = batch.rows.pop(place, None)
        if row is None:
            return None
        if row in self._reserved:
            self._unreserve(row)
        elif batch.replicas == 1 and self.writers.get(self._table.keys[row]) == row:
            del self.writers[self._table.keys[row]]
        elif self._table.state[row] == OPEN:
            self._let_go(batch, place, row)
        if not batch.rows:
            self._forget(batch)
        return row

    def close(self, batch: PutBatch, place: int) -> int | None:
        """Take the key from an open copy, which goes to quarantine now; return its row."""
        row = batch.rows.get(place)
        if row is None or self._table.state[row] != OPEN:
            return None
        if row in self._reserved:
            self._unreserve(row)
        self._let_go(batch, place, row)
        return row

    def of_client(self, client: str) -> list[PutBatch]:
        """Batches of one client."""
        return list(self._clients.get(client, {}).values())

    @property
    def oldest_s(self) -> float:
        """When the oldest open batch was opened, in awake time; infinite if none is open."""
        return next(iter(self._open.values())).opened_s if self._open else math.inf

    def opened_before(self, deadline_s: float) -> list[PutBatch]:
        """Batches older than this, taken out of the order of opening: close all of them."""
        late = []
        while self._open:
            number, oldest = next(iter(self._open.items()))
            if oldest.opened_s >= deadline_s:
                break
            late.append(oldest)
            del self._open[number]
        return late

    def lose(self, segments: set[int]) -> list[PutBatch]:
        """Forget the copies in lost segments; their writers find out when they commit.

        Returns:
            The batches that ended with it.
        """
        where = self._table.segment
        ended = []
        for batch in list(self):
            for place in [p for p, row in batch.rows.items() if where[row] in segments]:
                self.take(batch, place)
            if not batch.rows:
                ended.append(batch)
        return ended

    def check_invariants(self) -> None:
        """Raise InvariantViolated unless keys, puts and copies agree."""
        state, open_rows = self._table.state, set()
        for batch in self:
            for row in batch.rows.values():
                if state[row] not in (OPEN, QUARANTINED):
                    self._fail(f"{batch} has a copy in state {state[row]}")
                if state[row] == OPEN:
                    open_rows.add(row)
            if not batch.rows:
                self._fail(f"{batch} is kept without copies")
        for row in self.writers.rows():
            if row not in open_rows or self.writers.get(self._table.keys[row]) != row:
                self._fail(f"{self._table.keys[row].hex()} is held by row {row}")
        puts = {row for row in open_rows if self._is_put(row)} - self._reserved
        if not all(self._table.keys[row] in self.writers for row in puts):
            self._fail("an open put does not hold its key")
        for row in self._reserved:
            if row not in open_rows or self._table.keys[row] != NO_KEY:
                self._fail(f"row {row} is no reserved place")
        if self.reserved_bytes != sum(self._table.space[row] for row in self._reserved):
            self._fail("reserved bytes are miscounted")

    def rows(self) -> set[int]:
        """All copies that a writer may still write."""
        return {row for batch in self for row in batch.rows.values()}

    def _is_put(self, row: int) -> bool:
        return any(row in b.rows.values() for b in self if b.source == NO_SOURCE)

    def _let_go(self, batch: PutBatch, place: int, row: int) -> None:
        key = self._table.keys[row]
        if self.writers.get(key) != row:
            return
        del self.writers[key]
        if batch.replicas > 1:  # another copy of the same put may hold the key on
            first = place - place % batch.replicas
            for other in range(first, first + batch.replicas):
                sibling = batch.rows.get(other)
                if sibling is not None and sibling != row and self._table.state[sibling] == OPEN:
                    self.writers[key] = sibling
                    return

    def _forget(self, batch: PutBatch) -> None:
        self._open.pop(id(batch), None)
        batches = self._clients[batch.client]
        del batches[batch.batch]
        if not batches:
            del self._clients[batch.client]

    @staticmethod
    def _fail(problem: str) -> None:
        raise InvariantViolated(where="OpenPuts", problem=problem)
