"""Leaves before roots, and what has shown the fewest hits for its age first.

Blocks are sorted by how often they have been used (0, 1, 2, 3 and more times), each sort in a
queue by last use. Only the oldest leaf of each queue is a candidate. Which of the four goes is
learned: for every sort and age there is a rate, hits per block and tick, measured over
blocks present and, so that what was evicted too early is seen, over names gone. A tick is one
block entered or used. So a scan of new blocks cannot drive out what is used again and again (LRU
lets it), and a conversation that pauses keeps its place where pauses are seen to end (S3-FIFO does
not keep it).

A block with a known child is never a victim. It leaves its queue when it gets to the old end, and
comes back there when its last child goes:

    queue   r  a  b  leaf        victim(): r, a, b have children and step aside; leaf goes
    aside   r  a  b              b has no child left: back to the old end, the next victim
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Hashable, Iterator, Sequence
from itertools import chain
from typing import Final

from kvstore import row_loops
from kvstore.eviction.gone import GoneBlocks
from kvstore.eviction.hit_rate import USE_CLASSES, HitRates
from kvstore.eviction.policy import MayGo
from kvstore.eviction.rows import FIRST_QUEUE, HELD, NOWHERE, UNKNOWN, EvictionRows, RowQueue

GONE_MIN: Final = 1 << 15  # names gone: also a small cache must see what it loses
GONE_PER_BLOCK: Final = 1  # twice as many change hit rates of the traces by 0.0013 at most
ASIDE: Final = FIRST_QUEUE + USE_CLASSES
USES_MAX: Final = USE_CLASSES - 1  # more are not told apart
USES_BITS: Final = USES_MAX.bit_length()  # a block gone: its last tick, and behind that its uses
Candidate = tuple[float, int, int]  # rate, last tick, row: the least goes first
NOBODY: Final[Candidate] = (math.inf, 0, NOWHERE)


class PrefixAware:
    """Queues of leaves by number of uses; see `EvictionPolicy`.

    Args:
        rows: Its columns.
    """

    def __init__(self, rows: EvictionRows) -> None:
        rows.keep_chains()
        self._rows = rows
        self._length = 0
        self._queues = [RowQueue(rows.older, rows.newer) for _ in range(USE_CLASSES)]
        self._aside = RowQueue(rows.older, rows.newer)
        self._absent: dict[Hashable, int] = {}  # children of blocks that are not known, by name
        self._gone = GoneBlocks()
        self._rates = HitRates()
        self._tick = 0

    def __len__(self) -> int:
        return self._length

    def admit(self, rows: Sequence[int], parents: Sequence[Hashable | None] = ()) -> None:
        """Enter blocks, each with the uses that it had if it was here before."""
        if not rows:
            return
        columns, first = self._rows, self._tick + 1
        names, ticks, parents_of = columns.names, columns.ticks, columns.parents
        places, uses, children = columns.place, columns.uses, columns.children
        new: list[int] = []
        coming = row_loops.pick(names, rows)
        returned = self._gone.returned(coming)
        entries = zip(rows, coming, returned, parents or [None] * len(rows), strict=True)
        following = chain(coming[1:], (None,))  # from a leaf on it is the parent, nearly always
        born = 0  # children of the next one, among those that came before it
        for tick, ((row, name, before, parent), behind) in enumerate(
            zip(entries, following, strict=True), first
        ):
            ticks[row] = tick
            parents_of[row] = parent if parent != name else None
            children[row] = born + (self._absent.pop(name, 0) if self._absent else 0)
            born = int(parent is not None and parent == behind != name)
            if not born and parent is not None and parent != name:
                self._count_child(row, parent)
            if before is None:
                uses[row] = 0
                places[row] = FIRST_QUEUE
                new.append(row)
            else:
                self._return(row, before, tick)
        self._tick += len(rows)
        self._length += len(rows)
        self._queues[0].extend(new)
        if len(new) == len(rows):  # their ticks are one behind the other
            self._rates.wait(0, first, len(rows))
        else:
            for row in new:
                self._rates.wait(0, ticks[row])

    def touch(self, rows: Sequence[int]) -> None:
        """Count uses: each block goes to the young end of the queue for that many."""
        ticks, uses, places = self._rows.ticks, self._rows.uses, self._rows.place
        hit, wait, tick = self._rates.hit, self._rates.wait, self._tick
        for row in rows:
            tick += 1
            before = uses[row]
            after = before + 1 if before < USES_MAX else USES_MAX
            hit(before, ticks[row], tick)
            wait(after, tick)
            ticks[row] = tick
            if places[row] == HELD:
                uses[row] = after
            else:
                self._leave(row)
                self._enter(row, after)
        self._tick = tick

    def hold(self, row: int) -> None:
        """Take a block out of its queue. What comes before it in its chain stays too."""
        if self._rows.place[row] != HELD:
            self._leave(row)
            self._rows.place[row] = HELD

    def unhold(self, row: int) -> None:
        """Enter a held block as the youngest of its queue."""
        if self._rows.place[row] == HELD:
            self._enter(row, self._rows.uses[row])

    def remove(self, row: int, *, evicted: bool = False) -> None:
        """Forget a block; remember what is known of one that was evicted."""
        self._length -= 1
        if self._rows.place[row] != HELD:
            self._leave(row)
        self._rows.place[row] = UNKNOWN
        self._lose_children(row)
        self._lose_parent(row)
        if evicted:
            self._remember((row,))
        else:
            self._rates.leave(self._rows.uses[row], self._rows.ticks[row])

    def evict(self, count: int, busy: array[int], may_go: MayGo) -> list[int]:
        """Forget what `victim` names, and remember what is known of it."""
        places, uses, parents = self._rows.place, self._rows.uses, self._rows.parents
        newer, children = self._rows.newer, self._rows.children
        candidates = [self._candidate(use_class) for use_class in range(USE_CLASSES)]
        rows: list[int] = []
        while len(rows) < count:
            row = min(candidates)[2]
            if row == NOWHERE:
                row = self._aside.youngest
                if row == NOWHERE:
                    break
            use_class = uses[row]
            if busy[row]:
                self.hold(row)
            elif may_go(row):
                if places[row] == ASIDE:
                    self._leave(row)
                else:
                    self._queues[use_class].cut(1, newer[row])
                places[row] = UNKNOWN
                rows.append(row)
                if children[row]:
                    self._lose_children(row)
                if parents[row] is not None:
                    leaf = self._lose_parent(row)
                    if leaf != NOWHERE and uses[leaf] != use_class:
                        candidates[uses[leaf]] = self._candidate(uses[leaf])
            else:
                break
            candidates[use_class] = self._candidate(use_class)
        if rows:
            self._length -= len(rows)
            self._remember(rows)
        return rows

    def victim(self) -> int | None:
        """Return the leaf, oldest in its queue, that is least worth its place.

        If every leaf is held, what stepped aside goes after all, the latest first.
        """
        row = min(map(self._candidate, range(USE_CLASSES)))[2]
        if row == NOWHERE:
            row = self._aside.youngest
        return None if row == NOWHERE else row

    def evictable(self) -> Iterator[int]:
        """Yield what is not held."""
        return chain(*self._queues, self._aside)

    def _candidate(self, use_class: int) -> Candidate:
        """Return the oldest leaf of a queue, and what it is worth; blocks before it step aside."""
        queue, children = self._queues[use_class], self._rows.children
        while (row := queue.oldest) != NOWHERE:
            if not children[row]:
                used_at = self._rows.ticks[row]
                return self._rates.rate(use_class, self._tick - used_at), used_at, row
            queue.remove(row)
            self._aside.push(row)
            self._rows.place[row] = ASIDE
        return NOBODY

    def _count_child(self, row: int, parent: Hashable) -> None:
        """One more known block names this parent."""
        found = self._rows.find(parent, row)
        if found != NOWHERE and self._rows.place[found] != UNKNOWN:
            self._rows.children[found] += 1
        else:
            self._absent[parent] = self._absent.get(parent, 0) + 1

    def _lose_children(self, row: int) -> None:
        """Remember, of a block that goes, how many know it as their parent."""
        if self._rows.children[row]:
            self._absent[self._rows.names[row]] = self._rows.children[row]
            self._rows.children[row] = 0

    def _lose_parent(self, row: int) -> int:
        """Forget what comes before a block; return what is a leaf in its queue again for that."""
        parents, children, places = self._rows.parents, self._rows.children, self._rows.place
        parent = parents[row]
        if parent is None:
            return NOWHERE
        parents[row] = None
        if self._absent and (left := self._absent.get(parent)) is not None:
            if left > 1:
                self._absent[parent] = left - 1
            else:
                del self._absent[parent]
            return NOWHERE
        leaf = self._rows.find(parent, row)
        assert leaf != NOWHERE, parent
        children[leaf] -= 1
        if children[leaf] or places[leaf] != ASIDE:
            return NOWHERE
        self._aside.remove(leaf)
        uses = self._rows.uses[leaf]
        places[leaf] = FIRST_QUEUE + uses
        self._queues[uses].push_oldest(leaf)
        return leaf

    def _return(self, row: int, before: int, tick: int) -> None:
        """Enter a block that was evicted not long ago."""
        uses = before & USES_MAX
        self._rates.hit(uses, before >> USES_BITS, tick)
        uses = min(uses + 1, USES_MAX)
        self._rates.wait(uses, tick)
        self._enter(row, uses)

    def _remember(self, rows: Sequence[int]) -> None:
        names, ticks, uses = self._rows.names, self._rows.ticks, self._rows.uses
        self._gone.extend(
            [names[row] for row in rows], [ticks[row] << USES_BITS | uses[row] for row in rows]
        )
        forgotten = self._gone.shrink(max(GONE_MIN, GONE_PER_BLOCK * self._length))
        if forgotten:
            self._rates.missed(
                [(number & USES_MAX, number >> USES_BITS) for number in forgotten], self._tick
            )

    def _enter(self, row: int, uses: int) -> None:
        self._rows.uses[row] = uses
        self._rows.place[row] = FIRST_QUEUE + uses
        self._queues[uses].push(row)

    def _leave(self, row: int) -> None:
        place = self._rows.place[row]
        if place == ASIDE:
            self._aside.remove(row)
        else:
            self._queues[place - FIRST_QUEUE].remove(row)
