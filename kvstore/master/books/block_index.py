"""key -> row: the committed blocks, each the ring of its copies."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from kvstore import row_loops
from kvstore.errors import InvariantViolated
from kvstore.key_index import make_key_index
from kvstore.master.books.copy_state import COMMITTED
from kvstore.master.books.copy_table import CopyTable
from kvstore.row_loops import NOWHERE


class BlockIndex:
    """All committed blocks. A block is here exactly as long as it has a copy. Not thread-safe.

    Args:
        table: Where the copies are.
    """

    def __init__(self, table: CopyTable) -> None:
        self._table = table
        # Any one copy of each. Read it; it is changed here, and by the catalog for many at once.
        self.rows = make_key_index(table.keys)
        table.eviction.find = self.beside

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[int]:
        return iter(self.rows.rows())

    def keys(self) -> list[bytes]:
        """Return the names of all blocks, in no order."""
        return row_loops.pick(self._table.keys, self.rows.rows())

    def beside(self, key: Hashable, row: int) -> int:
        """Return a block's copy in the segment in which this row lies; NOWHERE if it has none."""
        assert isinstance(key, bytes), key
        first = self.rows.get(key, NOWHERE)
        if first == NOWHERE:
            return NOWHERE
        where = self._table.segment
        if where[first] == where[row]:
            return first
        return next((c for c in self._table.copies(first) if where[c] == where[row]), NOWHERE)

    def attach(self, row: int) -> bool:
        """Enter a committed copy.

        Returns:
            False if other bytes of this name, or another copy in this segment, are there.
        """
        table = self._table
        first = self.rows.setdefault(table.keys[row], row)
        if first == row:
            return True
        if not self.same_bytes(first, row):
            return False
        where = table.segment[row]
        if any(table.segment[copy] == where for copy in table.copies(first)):
            return False
        table.sibling[row] = table.sibling[first]
        table.sibling[first] = row
        return True

    def detach(self, row: int) -> bool:
        """Forget one copy; return whether the block went with it."""
        table = self._table
        key, following = table.keys[row], table.sibling[row]
        if following == row:
            assert self.rows.get(key) == row, row
            del self.rows[key]
            return True
        before = following
        while table.sibling[before] != row:
            before = table.sibling[before]
        table.sibling[before] = following
        table.sibling[row] = row
        self.rows[key] = following
        return False

    def same_bytes(self, row: int, other: int) -> bool:
        """Tell whether two copies are of the same bytes, as far as their columns say."""
        table = self._table
        return (table.length[row], table.checksum[row], table.chunk_bytes[row]) == (
            table.length[other],
            table.checksum[other],
            table.chunk_bytes[other],
        )

    def check_invariants(self) -> None:
        """Raise InvariantViolated unless every block has copies that are its own."""
        table = self._table
        firsts = self.rows.rows()
        if len(firsts) != len(self.rows):
            raise InvariantViolated(where="the index", problem="blocks miscounted")
        for first in firsts:
            key, copies = table.keys[first], table.copies(first)
            if self.rows.get(key) != first:
                self._fail(key, "is not found")
            if len({table.segment[row] for row in copies}) != len(copies):
                self._fail(key, "has two copies in a segment")
            for row in copies:
                if table.keys[row] != key or not self.same_bytes(row, first):
                    self._fail(key, f"claims row {row}")
                if table.state[row] != COMMITTED:
                    self._fail(key, f"has a copy in state {table.state[row]}")
                alike = (table.pin, table.tenant, table.group)
                if any(column[row] != column[first] for column in alike):
                    self._fail(key, "has copies of different pins, tenants or groups")

    @staticmethod
    def _fail(key: bytes, problem: str) -> None:
        raise InvariantViolated(where=f"block {key.hex()}", problem=problem)
