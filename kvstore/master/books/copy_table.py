"""All copies of all blocks, as columns: a row, a small int, is one copy.

A million keys are a million rows, not a million objects: what a block costs is its key, one entry
of the index, and about 90 bytes here. Rows are reused; whoever keeps a row number must be told
when the copy goes.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstore import row_loops
from kvstore.eviction import EvictionRows
from kvstore.master.books.copy_state import FREE, OPEN
from kvstore.master.books.freed_memory import return_freed_memory

GROWTH_MIN: Final = 1024
GROWTH_SHARE: Final = 8  # the table grows by an eighth
HOLES_FROM: Final = 1 << 16  # rows: what smaller tables leave behind is not worth a look


class CopyTable:
    """The columns. Not thread-safe.

    Attributes:
        keys: Name of the block; the eviction policies' names too.
        segment: `Segment.index` of where it lies.
        offset: From the start of the node's segment, in bytes.
        length: Bytes of payload.
        space: Bytes taken in the segment: payload, part table, padding.
        checksum, chunk_bytes: As in `HeldBlocks`.
        state: A `CopyState`.
        leases: How many readers the bytes must stay in place for.
        pin: A `Pin`.
        tenant, group: Numbers in the `TenantBook` and the `GroupBook`; 0 is none.
        sibling: The next copy of the block, in a ring; itself if it is the only one.
        used_at: Stamp of the last use, counted by the catalog.
        told: When its node was told of it, if the node has said so (`HeldBlocks.stamps`); 0: it was
            put in this master's time.
        eviction: What the eviction policies keep.
        tenant_older, tenant_newer: Neighbours in the tenant's order of use; see `keep_tenants`.
    """

    __slots__ = (
        "_columns",
        "_has_tenants",
        "_unused",
        "checksum",
        "chunk_bytes",
        "eviction",
        "group",
        "keys",
        "leases",
        "length",
        "offset",
        "pin",
        "segment",
        "sibling",
        "space",
        "state",
        "tenant",
        "tenant_newer",
        "tenant_older",
        "told",
        "used_at",
    )

    def __init__(self) -> None:
        self.keys: list[bytes] = []
        self.segment, self.leases, self.sibling = array("i"), array("i"), array("i")
        self.tenant, self.group = array("i"), array("i")
        self.tenant_older, self.tenant_newer = array("i"), array("i")
        self.offset, self.length, self.space = array("q"), array("q"), array("q")
        self.used_at, self.told, self.checksum = array("q"), array("q"), array("Q")
        self.chunk_bytes = array("I")
        self.state, self.pin = array("B"), array("B")
        self.eviction = EvictionRows()
        self.eviction.names = self.keys  # type: ignore[assignment]  # read only, there
        self._columns: tuple[array[int], ...] = (
            *(self.segment, self.leases, self.sibling, self.tenant, self.group),
            *(self.offset, self.length, self.space),
            *(self.used_at, self.told, self.checksum, self.chunk_bytes, self.state, self.pin),
        )
        self._has_tenants = False
        self._unused: list[int] = []

    def keep_tenants(self) -> None:
        """Have the columns `tenant_older` and `tenant_newer`, only for tenants, from now on."""
        if not self._has_tenants:
            self._has_tenants = True
            for column in (self.tenant_older, self.tenant_newer):
                column.frombytes(bytes(column.itemsize * len(self.keys)))
            self._columns += (self.tenant_older, self.tenant_newer)

    def __len__(self) -> int:
        """Count the rows in use."""
        return len(self.keys) - len(self._unused)

    def take(self, key: bytes, segment: int, offset: int, length: int, space: int) -> int:
        """Return a row for an OPEN copy; what is not given here is 0 or stale."""
        if not self._unused:
            self._grow()
        row = self._unused.pop()
        self.keys[row] = key
        self.state[row] = OPEN
        self.segment[row] = segment
        self.offset[row] = offset
        self.length[row] = length
        self.space[row] = space
        self.leases[row] = self.pin[row] = self.told[row] = 0
        self.sibling[row] = row
        return row

    def take_run(
        self, keys: Sequence[bytes], segment: int, offset: int, lengths: Sequence[int], space: int
    ) -> list[int]:
        """Return rows for OPEN copies that lie one behind the other from `offset` on."""
        unused, count = self._unused, len(keys)
        while len(unused) < count:
            self._grow()
        rows = unused[len(unused) - count :]
        rows.reverse()
        row_loops.place(self.keys, rows, keys)
        row_loops.scatter(self.length, rows, lengths)
        del unused[len(unused) - count :]
        row_loops.fill(self.state, rows, OPEN)
        row_loops.fill(self.segment, rows, segment)
        row_loops.stairs(self.offset, rows, offset, space)
        row_loops.fill(self.space, rows, space)
        row_loops.fill(self.leases, rows, 0)
        row_loops.fill(self.pin, rows, 0)
        row_loops.fill(self.told, rows, 0)
        row_loops.scatter(self.sibling, rows, rows)
        return rows

    def take_over(self, rows: Sequence[int], keys: Sequence[bytes], lengths: Sequence[int]) -> None:
        """Use rows, and the places that they name, for OPEN copies of other blocks."""
        assert row_loops.all_are(self.leases, rows, 0), rows
        row_loops.place(self.keys, rows, keys)
        row_loops.scatter(self.length, rows, lengths)
        row_loops.fill(self.state, rows, OPEN)
        row_loops.fill(self.pin, rows, 0)
        row_loops.fill(self.told, rows, 0)
        row_loops.scatter(self.sibling, rows, rows)

    def give_back(self, row: int) -> None:
        """Let a row be used for another copy. It must be FREE."""
        assert self.state[row] == FREE, row
        assert self.leases[row] == 0, row
        self.keys[row] = b""
        self._unused.append(row)

    def give_back_all(self, rows: Sequence[int]) -> None:
        """As `give_back`, of many."""
        assert row_loops.all_are(self.state, rows, FREE), rows
        assert row_loops.all_are(self.leases, rows, 0), rows
        row_loops.place(self.keys, rows, [b""] * len(rows))
        self._unused += rows

    def rows_in(self, segment: int, *states: int) -> list[int]:
        """Return the rows of a segment that are in one of these states. O(all rows)."""
        states_of = np.frombuffer(self.state, np.uint8)
        found: NDArray[np.bool_] = np.frombuffer(self.segment, np.int32) == segment
        found &= np.isin(states_of, states)
        rows: list[int] = np.flatnonzero(found).tolist()
        return rows

    def rows(self) -> list[int]:
        """Return all rows in use. O(all rows)."""
        rows: list[int] = np.flatnonzero(np.frombuffer(self.state, np.uint8)).tolist()
        return rows

    def copies(self, row: int) -> list[int]:
        """Return the rows of the ring that this one is in, itself first."""
        ring = [row]
        following = self.sibling[row]
        while following != row:
            ring.append(following)
            following = self.sibling[following]
        return ring

    def _grow(self) -> None:
        first = len(self.keys)
        count = max(GROWTH_MIN, first // GROWTH_SHARE)
        zeros = memoryview(bytes(max(column.itemsize for column in self._columns) * count))
        for column in self._columns:
            column.frombytes(zeros[: column.itemsize * count])
        self.eviction.grow(count)
        self.keys.extend([b""] * count)
        self._unused.extend(reversed(range(first, first + count)))
        if first >= HOLES_FROM:
            return_freed_memory()
