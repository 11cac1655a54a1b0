"""What the master knows of one segment of the memory that a node lends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kvstore import row_loops
from kvstore.errors import InvariantViolated
from kvstore.eviction import EvictionPolicy, RowQueue
from kvstore.eviction.rows import HELD
from kvstore.master.books.allocator import ReservedRanges, SegmentAllocator, class_of
from kvstore.master.books.copy_state import (
    COMMITTED,
    FREE,
    LOST,
    OPEN,
    CopyState,
    check_arrow,
)
from kvstore.master.books.copy_table import CopyTable
from kvstore.wire.messages import Medium, NodeAddress, Pin

NONE, SOFT, HARD = (int(pin) for pin in Pin)
DISK_BLOCK_BYTES: Final = 4096


@dataclass(slots=True, eq=False, kw_only=True)
class Node:
    """One store node.

    Attributes:
        name: Its incarnation.
        address: Where its transfer engine listens.
        domain: What fails together with it; its name if nothing else is known to.
        heard_s: When it was heard of last.
        draining: Nothing new is placed in its segments.
        segments: By number.
    """

    name: str
    address: str
    domain: str
    heard_s: float
    draining: bool = False
    segments: dict[int, Segment] = field(default_factory=dict)


class Segment:
    """One segment, or this master's share of it: its copies, free space, order of eviction.

    Keeps `bytes_in[state]` the space of its copies in each state, and `evictable_bytes` that of
    those committed, not pinned hard and not leased. Not thread-safe.

    Args:
        index: The pool's number for it, in `CopyTable.segment`.
        node: Who lends it.
        where: Its name on the wire.
        base: Where the share begins, in bytes; all offsets count from the segment's start.
        capacity: Bytes lent.
        placeable_s: Nothing new is placed here before this time.
        table: The columns of its copies.
        policy: Decides which block goes next; the segment's own from here on.
    """

    def __init__(
        self,
        index: int,
        node: Node,
        where: NodeAddress,
        *,
        base: int,
        capacity: int,
        placeable_s: float,
        table: CopyTable,
        policy: EvictionPolicy,
    ) -> None:
        self.index = index
        self.node = node
        self.where = where
        self._on_disk = where.medium is Medium.SSD
        self.base = base
        self.placeable_s = placeable_s
        self.bytes_in = [0] * len(CopyState)
        self.evictable_bytes = 0
        self.blocks = 0  # committed copies
        self._table = table
        self._policy = policy
        self._softly = RowQueue(table.eviction.older, table.eviction.newer)
        self._space: SegmentAllocator | ReservedRanges = ReservedRanges(capacity)

    @property
    def medium(self) -> Medium:
        """What it lies in."""
        return self.where.medium

    @property
    def capacity(self) -> int:
        """Usable bytes."""
        return self._space.capacity

    @property
    def free(self) -> int:
        """Bytes in no copy."""
        return self._space.capacity - self._space.used

    @property
    def largest_free(self) -> int:
        """Size of the largest block that fits now; 0 while its blocks are being told."""
        return self._space.largest_free if isinstance(self._space, SegmentAllocator) else 0

    @property
    def is_told(self) -> bool:
        """Whether the node has told all that it holds; before, nothing is placed or evicted."""
        return isinstance(self._space, SegmentAllocator)

    def finish_telling(self) -> None:
        """Give out the space in which nothing was told to be."""
        if isinstance(self._space, ReservedRanges):
            self._space = self._space.allocator()

    def adopt(self, key: bytes, offset: int, length: int, space: int) -> int | None:
        """Return a row for a copy that the node holds, OPEN yet; None if its range is not free."""
        assert isinstance(self._space, ReservedRanges), self.where
        space = self.space_of(space)
        if not self._space.reserve(offset - self.base, space):
            return None
        row = self._table.take(key, self.index, offset, length, space)
        self.bytes_in[OPEN] += space
        return row

    def may_fit(self, space: int) -> bool:
        """Tell, fast, whether `place` is worth a try: no means no."""
        return isinstance(self._space, SegmentAllocator) and bool(
            self._space.filled >> class_of(space)
        )

    def place(self, key: bytes, length: int, space: int) -> int | None:
        """Return a row for an open copy; None if no free range is large enough."""
        if not isinstance(self._space, SegmentAllocator):
            return None
        space = self.space_of(space)
        offset = self._space.allocate(space)
        if offset is None:
            return None
        row = self._table.take(key, self.index, self.base + offset, length, space)
        self.bytes_in[OPEN] += space
        return row

    def place_run(self, keys: Sequence[bytes], lengths: Sequence[int], space: int) -> list[int]:
        """Return rows for open copies, one behind the other; fewer, or none, if few fit so."""
        if not isinstance(self._space, SegmentAllocator):
            return []
        space = self.space_of(space)
        offset, count = self._space.allocate_run(space, len(keys))
        self.bytes_in[OPEN] += count * space
        return self._table.take_run(
            keys[:count], self.index, self.base + offset, lengths[:count], space
        )

    def may_take_over(self, row: int, space: int) -> bool:
        """Tell whether a copy that goes leaves exactly the space of one that comes."""
        return self._table.space[row] == self.space_of(space)

    def take_over(self, rows: Sequence[int], keys: Sequence[bytes], lengths: Sequence[int]) -> None:
        """Open copies in the places of committed ones, which are in none of the books any more."""
        table = self._table
        for state in set(row_loops.gather(table.state, rows)):
            check_arrow(state, FREE, self.where)
        table.take_over(rows, keys, lengths)
        space = row_loops.total(table.space, rows)
        self.bytes_in[COMMITTED] -= space
        self.bytes_in[OPEN] += space

    def free_all(self, rows: Sequence[int]) -> None:
        """Give back the rows and bytes of committed copies that are in no book any more."""
        table = self._table
        for state in set(row_loops.gather(table.state, rows)):
            check_arrow(state, FREE, self.where)
        row_loops.fill(table.state, rows, FREE)
        self.bytes_in[COMMITTED] -= row_loops.total(table.space, rows)
        ranges = zip(
            row_loops.gather(table.offset, rows), row_loops.gather(table.space, rows), strict=True
        )
        begin = end = 0  # of those that touch: they are given back as one
        for offset, space in sorted(ranges):
            if offset != end:
                if end:
                    self._space.release(begin - self.base, end - begin)
                begin = offset
            end = offset + space
        self._space.release(begin - self.base, end - begin)
        table.give_back_all(rows)

    def space_of(self, space: int) -> int:
        """Return the space that a block takes here: on a disk whole blocks of the file system.

        A block that shared one with its neighbour would make its writer read that one first.
        """
        return -(-space // DISK_BLOCK_BYTES) * DISK_BLOCK_BYTES if self._on_disk else space

    def become(self, row: int, state: int) -> None:
        """Change the state of a copy here; FREE and LOST give its bytes, but not its row, back."""
        table, before = self._table, self._table.state[row]
        check_arrow(before, state, self.where)
        space = table.space[row]
        table.state[row] = state
        self.bytes_in[before] -= space
        if state == FREE:
            self._space.release(table.offset[row] - self.base, space)
        elif state != LOST:
            self.bytes_in[state] += space

    # -- what may be evicted ------------------------------------------------------------------

    def enter(self, rows: Sequence[int], parents: Sequence[bytes | None] = ()) -> None:
        """Commit open copies, and take them into the order of eviction by their pins.

        Args:
            rows: In the order in which they come.
            parents: See `EvictionPolicy.admit`.
        """
        table = self._table
        for state in set(row_loops.gather(table.state, rows)):
            check_arrow(state, COMMITTED, self.where)
        row_loops.fill(table.state, rows, COMMITTED)
        space = row_loops.total(table.space, rows)
        self.bytes_in[OPEN] -= space
        self.bytes_in[COMMITTED] += space
        self.blocks += len(rows)
        if not row_loops.all_are(table.pin, rows, NONE):
            for row, parent in zip(rows, parents or [None] * len(rows), strict=True):
                self._order(row, parent)
        else:
            self._policy.admit(rows, parents)
            self.evictable_bytes += space

    def enter_one(self, row: int) -> None:
        """As `enter`, of one copy without a pin and a parent."""
        table, bytes_in = self._table, self.bytes_in
        if table.state[row] != OPEN:
            check_arrow(table.state[row], COMMITTED, self.where)
        space = table.space[row]
        table.state[row] = COMMITTED
        bytes_in[OPEN] -= space
        bytes_in[COMMITTED] += space
        self.blocks += 1
        self._policy.admit((row,))
        self.evictable_bytes += space

    def evict(self, count: int, space: int) -> list[int]:
        """Take victims of exactly this space from the order of eviction, at most so many.

        The run ends before a victim of another size, one that is pinned softly, and one of a
        group, with which others go.
        """
        space = self.space_of(space)
        rows = self._policy.evict(count, self._table.leases, _OfSpace(self._table, space))
        self.blocks -= len(rows)
        self.evictable_bytes -= len(rows) * space
        return rows

    def leave(self, row: int, *, evicted: bool = False) -> None:
        """Take a committed copy, on its way out, from the order of eviction."""
        self.blocks -= 1
        self._disorder(row, evicted=evicted)

    def set_pin(self, row: int, pin: int) -> None:
        """Pin a committed copy differently."""
        self._disorder(row)
        self._table.pin[row] = pin
        self._order(row, None)

    def touch(self, rows: Sequence[int]) -> None:
        """Count a use of committed copies, in this order."""
        pins = self._table.pin
        if not row_loops.all_are(pins, rows, NONE):
            for row in rows:
                if pins[row] == SOFT:
                    self._softly.renew(row)
            rows = [row for row in rows if pins[row] == NONE]
        self._policy.touch(rows)

    def leased(self, rows: Sequence[int]) -> None:
        """Committed copies that nobody read are read now."""
        self.evictable_bytes -= row_loops.total(self._table.space, self._not_hard(rows))

    def settle(self, rows: Sequence[int]) -> None:
        """Let committed copies be evicted again, after their last readers, in this order."""
        table = self._table
        rows = self._not_hard(rows)
        self.evictable_bytes += row_loops.total(table.space, rows)
        for row in row_loops.where(table.eviction.place, rows, HELD):
            if table.pin[row] == NONE:
                self._policy.unhold(row)

    def victim(self) -> int | None:
        """Return what would be evicted next; soft pins last, leased blocks and hard pins never.

        Leased ones step out of the way only when a search meets them: each once per lease.
        """
        leases = self._table.leases
        while (row := self._policy.victim()) is not None:
            if not leases[row]:
                return row
            self._policy.hold(row)
        return self._softly.oldest_where(lambda row: not leases[row])

    def age(self) -> float:
        """When what would be evicted next was used last; infinite if there is nothing."""
        victim = self.victim()
        return math.inf if victim is None else self._table.used_at[victim]

    def can_make_room(self, space: int) -> bool:
        """Tell whether evicting could free enough bytes at all, before anything is evicted for it.

        Holes between blocks that stay may still prevent it.
        """
        return self.is_told and self.free + self.evictable_bytes >= space

    def check_invariants(self) -> None:
        """Raise InvariantViolated unless every byte is free or in exactly one copy."""
        table = self._table
        rows = table.rows_in(self.index, *range(OPEN, LOST))
        if isinstance(self._space, SegmentAllocator):
            self._space.check_invariants(
                (table.offset[row] - self.base, table.space[row]) for row in rows
            )
        for state in CopyState:
            counted = sum(table.space[row] for row in rows if table.state[row] == state)
            self._check(counted == self.bytes_in[state], f"bytes {state.name} miscounted")
        self._check(self.free == self.capacity - sum(self.bytes_in), "used bytes miscounted")
        committed = [row for row in rows if table.state[row] == COMMITTED]
        self._check(self.blocks == len(committed), "blocks miscounted")
        idle = [row for row in committed if table.pin[row] != HARD and not table.leases[row]]
        evictable = sum(table.space[row] for row in idle)
        self._check(evictable == self.evictable_bytes, "evictable bytes miscounted")
        by_pin: dict[int, set[int]] = {NONE: set(), SOFT: set(), HARD: set()}
        for row in committed:
            by_pin[table.pin[row]].add(row)
        self._check(set(self._softly) == by_pin[SOFT], "soft pins are not those in order")
        self._check(len(self._policy) == len(by_pin[NONE]), "the policy knows others")
        queued = set(self._policy.evictable())
        self._check(queued <= by_pin[NONE], "the policy would evict a pinned block")
        aside = by_pin[NONE] - queued
        self._check(all(table.leases[row] for row in aside), "held without a lease")

    def _order(self, row: int, parent: bytes | None) -> None:
        pin = self._table.pin[row]
        if pin == HARD:
            return
        if pin == NONE:
            self._policy.admit((row,), (parent,))
        else:
            self._softly.push(row)
        if not self._table.leases[row]:
            self.evictable_bytes += self._table.space[row]

    def _disorder(self, row: int, *, evicted: bool = False) -> None:
        pin = self._table.pin[row]
        if pin == HARD:
            return
        if pin == NONE:
            self._policy.remove(row, evicted=evicted)
        else:
            self._softly.remove(row)
        if not self._table.leases[row]:
            self.evictable_bytes -= self._table.space[row]

    def _not_hard(self, rows: Sequence[int]) -> Sequence[int]:
        pins = self._table.pin
        if row_loops.all_are(pins, rows, NONE):
            return rows
        return [row for row in rows if pins[row] != HARD]

    def _check(self, holds: bool, problem: str) -> None:
        if not holds:
            raise InvariantViolated(where=f"segment {self.where}", problem=problem)


class _OfSpace:
    """Blocks of exactly this space and of no group; see `MayGo`."""

    __slots__ = ("_groups", "_space", "_spaces")

    def __init__(self, table: CopyTable, space: int) -> None:
        self._spaces, self._groups, self._space = table.space, table.group, space

    def __call__(self, row: int) -> bool:
        return self._spaces[row] == self._space and not self._groups[row]

    def all_may(self, rows: Sequence[int]) -> bool:
        return row_loops.all_are(self._spaces, rows, self._space) and row_loops.all_are(
            self._groups, rows, 0
        )
