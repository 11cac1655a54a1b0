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

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from itertools import chain
from typing import Final

from kvstore.eviction.hit_rate import USE_CLASSES, HitRates
from kvstore.eviction.rows import FIRST_QUEUE, HELD, NOWHERE, UNKNOWN, EvictionRows, RowQueue

GONE_MIN: Final = 1 << 15  # names gone: also a small cache must see what it loses
GONE_PER_BLOCK: Final = 2
ASIDE: Final = FIRST_QUEUE + USE_CLASSES
USES_MAX: Final = USE_CLASSES - 1  # more are not told apart


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
        self._aside_named: dict[Hashable, int] = {}  # rows that stepped aside, by name
        self._children: dict[Hashable, int] = {}  # how many known blocks name this parent
        self._gone: OrderedDict[Hashable, tuple[int, int]] = OrderedDict()  # uses, last tick
        self._rates = HitRates()
        self._tick = 0

    def __len__(self) -> int:
        return self._length

    def admit(self, row: int, parent: Hashable | None = None) -> None:
        """Enter a block, with the uses that it had if it was here before."""
        self._tick += 1
        uses = 0
        before = self._gone.pop(self._rows.names[row], None)
        if before is not None:
            self._rates.hit(before[0], before[1], self._tick)
            uses = min(before[0] + 1, USES_MAX)
        self._rates.wait(uses, self._tick)
        self._length += 1
        self._rows.ticks[row] = self._tick
        self._rows.parents[row] = parent
        self._rows.uses[row] = uses
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1
        self._enter(row)

    def touch(self, row: int) -> None:
        """Count a use: the block goes to the young end of the queue for that many."""
        self._tick += 1
        uses = self._rows.uses[row]
        self._rates.hit(uses, self._rows.ticks[row], self._tick)
        self._rates.wait(min(uses + 1, USES_MAX), self._tick)
        self._rows.ticks[row] = self._tick
        is_held = self._rows.place[row] == HELD
        if not is_held:
            self._leave(row)
        self._rows.uses[row] = min(uses + 1, USES_MAX)
        if not is_held:
            self._enter(row)

    def hold(self, row: int) -> None:
        """Take a block out of its queue. What comes before it in its chain stays too."""
        if self._rows.place[row] != HELD:
            self._leave(row)
            self._rows.place[row] = HELD

    def unhold(self, row: int) -> None:
        """Enter a held block as the youngest of its queue."""
        if self._rows.place[row] == HELD:
            self._enter(row)

    def remove(self, row: int, *, evicted: bool = False) -> None:
        """Forget a block; remember what is known of one that was evicted."""
        used_at, parent = self._rows.ticks[row], self._rows.parents[row]
        self._length -= 1
        self._rows.parents[row] = None
        if self._rows.place[row] != HELD:
            self._leave(row)
        self._rows.place[row] = UNKNOWN
        if parent is not None:
            self._lose_child(parent)
        if evicted:
            self._gone[self._rows.names[row]] = (self._rows.uses[row], used_at)
            while len(self._gone) > max(GONE_MIN, GONE_PER_BLOCK * self._length):
                _, (uses, last_tick) = self._gone.popitem(last=False)
                self._rates.missed(uses, last_tick, self._tick)
        else:
            self._rates.leave(self._rows.uses[row], used_at)

    def victim(self) -> int | None:
        """Return the leaf, oldest in its queue, that is least worth its place.

        If every leaf is held, what stepped aside goes after all, the latest first.
        """
        best: int | None = None
        lowest = (0.0, 0)
        for use_class, queue in enumerate(self._queues):
            row = self._oldest_leaf(queue)
            if row is None:
                continue
            used_at = self._rows.ticks[row]
            worth = (self._rates.rate(use_class, self._tick - used_at), used_at)
            if best is None or worth < lowest:
                best, lowest = row, worth
        if best is None and self._aside.youngest != NOWHERE:
            return self._aside.youngest
        return best

    def evictable(self) -> Iterator[int]:
        """Yield what is not held."""
        return chain(*self._queues, self._aside)

    def _oldest_leaf(self, queue: RowQueue) -> int | None:
        while queue.length:
            row = queue.oldest
            name = self._rows.names[row]
            if name not in self._children:
                return row
            queue.remove(row)
            self._aside.push(row)
            self._rows.place[row] = ASIDE
            self._aside_named[name] = row
        return None

    def _lose_child(self, parent: Hashable) -> None:
        self._children[parent] -= 1
        if self._children[parent] > 0:
            return
        del self._children[parent]
        row = self._aside_named.pop(parent, None)
        if row is not None:
            self._aside.remove(row)
            uses = self._rows.uses[row]
            self._rows.place[row] = FIRST_QUEUE + uses
            self._queues[uses].push_oldest(row)

    def _enter(self, row: int) -> None:
        uses = self._rows.uses[row]
        self._rows.place[row] = FIRST_QUEUE + uses
        self._queues[uses].push(row)

    def _leave(self, row: int) -> None:
        place = self._rows.place[row]
        if place == ASIDE:
            self._aside.remove(row)
            del self._aside_named[self._rows.names[row]]
        else:
            self._queues[place - FIRST_QUEUE].remove(row)
