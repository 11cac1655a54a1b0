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
from dataclasses import dataclass
from itertools import chain
from typing import Final

from kvstore.eviction.hit_rate import USE_CLASSES, HitRates

GONE_MIN: Final = 1 << 15  # names gone: also a small cache must see what it loses
GONE_PER_BLOCK: Final = 2


@dataclass(slots=True)
class Node:
    """What is known of one block.

    Attributes:
        parent: The block before it in its chain.
        uses: How often it was used since it first came, as far as is remembered.
        used_at: Tick of the last use.
    """

    parent: Hashable | None
    uses: int
    used_at: int

    @property
    def use_class(self) -> int:
        """Index of its queue."""
        return min(self.uses, USE_CLASSES - 1)


class PrefixAware:
    """Queues of leaves by number of uses; see `EvictionPolicy`."""

    def __init__(self) -> None:
        self._nodes: dict[Hashable, Node] = {}
        self._children: dict[Hashable, int] = {}  # how many known blocks name this parent
        self._queues: tuple[OrderedDict[Hashable, None], ...] = tuple(
            OrderedDict() for _ in range(USE_CLASSES)
        )
        self._aside: OrderedDict[Hashable, None] = OrderedDict()
        self._held: set[Hashable] = set()
        self._gone: OrderedDict[Hashable, Node] = OrderedDict()
        self._rates = HitRates()
        self._tick = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, name: Hashable) -> bool:
        return name in self._nodes

    def admit(self, name: Hashable, parent: Hashable | None = None) -> None:
        """Enter a block, with the uses that it had if it was here before."""
        self._tick += 1
        uses = 0
        before = self._gone.pop(name, None)
        if before is not None:
            self._rates.hit(before.use_class, self._tick - before.used_at)
            uses = before.uses + 1
        node = Node(parent, uses, self._tick)
        self._nodes[name] = node
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1
        self._queues[node.use_class][name] = None

    def touch(self, name: Hashable) -> None:
        """Count a use: the block goes to the young end of the queue for that many."""
        self._tick += 1
        node = self._nodes[name]
        self._rates.hit(node.use_class, self._tick - node.used_at)
        self._leave(name, node)
        node.uses += 1
        node.used_at = self._tick
        if name not in self._held:
            self._queues[node.use_class][name] = None

    def hold(self, name: Hashable) -> None:
        """Take a block out of its queue. What comes before it in its chain stays too."""
        if name not in self._held:
            self._leave(name, self._nodes[name])
            self._held.add(name)

    def unhold(self, name: Hashable) -> None:
        """Enter a held block as the youngest of its queue."""
        if name in self._held:
            self._held.remove(name)
            node = self._nodes[name]
            self._queues[node.use_class][name] = None

    def remove(self, name: Hashable, *, evicted: bool = False) -> None:
        """Forget a block; remember what is known of one that was evicted."""
        node = self._nodes.pop(name, None)
        if node is None:
            return
        self._leave(name, node)
        self._held.discard(name)
        if node.parent is not None:
            self._lose_child(node.parent)
        if evicted:
            self._gone[name] = node
            while len(self._gone) > max(GONE_MIN, GONE_PER_BLOCK * len(self._nodes)):
                _, lost = self._gone.popitem(last=False)
                self._rates.missed(lost.use_class, self._tick - lost.used_at)

    def victim(self) -> Hashable | None:
        """Return the leaf, oldest in its queue, that is least worth its place.

        If every leaf is held, what stepped aside goes after all, the latest first.
        """
        best: Hashable | None = None
        lowest = (0.0, 0)
        for use_class, queue in enumerate(self._queues):
            name = self._oldest_leaf(queue)
            if name is None:
                continue
            used_at = self._nodes[name].used_at
            worth = (self._rates.rate(use_class, self._tick - used_at), used_at)
            if best is None or worth < lowest:
                best, lowest = name, worth
        return next(reversed(self._aside), None) if best is None else best

    def evictable(self) -> Iterator[Hashable]:
        """Yield what is not held."""
        return chain(*self._queues, self._aside)

    def _oldest_leaf(self, queue: OrderedDict[Hashable, None]) -> Hashable | None:
        while queue:
            name = next(iter(queue))
            if name not in self._children:
                return name
            del queue[name]
            self._aside[name] = None
        return None

    def _lose_child(self, parent: Hashable) -> None:
        self._children[parent] -= 1
        if self._children[parent] > 0:
            return
        del self._children[parent]
        if parent in self._aside:
            del self._aside[parent]
            queue = self._queues[self._nodes[parent].use_class]
            queue[parent] = None
            queue.move_to_end(parent, last=False)

    def _leave(self, name: Hashable, node: Node) -> None:
        self._queues[node.use_class].pop(name, None)
        self._aside.pop(name, None)
