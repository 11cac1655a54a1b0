"""Pins that came or went after their blocks were written: what nodes have still to hear of.

A writer says with its note whether a block is pinned hard. Of what changes later a node hears with
the replies to its heartbeats, until it says that it has: else the next master would not know.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

import xxhash

from kvstore.master.books.block_index import BlockIndex
from kvstore.master.books.copy_table import CopyTable
from kvstore.master.books.pool import SegmentPool
from kvstore.wire.messages import Pin, PinChanges

AT_ONCE_MAX: Final = 4096  # names in one reply


@dataclass(slots=True)
class _Untold:
    """Names of one node: `number` names the reply in which those `sent` were; 0: none was."""

    waiting: dict[bytes, None] = field(default_factory=dict)
    sent: dict[bytes, None] = field(default_factory=dict)
    number: int = 0


class UntoldPins:
    """Not thread-safe.

    Args:
        table: The columns of the copies.
        index: The blocks.
        pool: Where the copies are.

    Attributes:
        seed: A number of this master's life, so that what is said has a name that nothing else has:
            a node names what it has heard of all masters.
    """

    def __init__(self, table: CopyTable, index: BlockIndex, pool: SegmentPool) -> None:
        self._table = table
        self._index = index
        self._pool = pool
        self._nodes: dict[str, _Untold] = {}
        self._said = 0
        self.seed = 0

    def changed(self, row: int) -> None:
        """A copy is pinned hard, or is no more."""
        untold = self._nodes.setdefault(self._pool.of(row).node.name, _Untold())
        untold.waiting[self._table.keys[row]] = None

    def forget(self, node: str) -> None:
        """A node is gone; it may register again, with what it knows."""
        self._nodes.pop(node, None)

    def news(self, node: str, heard: Collection[int]) -> PinChanges | None:
        """Return what a node is to be told now; None if there is nothing.

        Args:
            node: Which.
            heard: Numbers of what it has heard.
        """
        untold = self._nodes.get(node)
        if untold is None:
            return None
        if untold.number not in heard:
            untold.waiting = {**untold.sent, **untold.waiting}
        names = list(untold.waiting)[:AT_ONCE_MAX]
        rows = [row for name in names for row in self._copies(name, node)]
        if not rows and len(names) == len(untold.waiting):
            del self._nodes[node]
            return None
        self._said += 1
        content = b"".join((self._said.to_bytes(8, "little"), *names))
        untold.number = xxhash.xxh3_64_intdigest(content, self.seed % (1 << 64))
        untold.sent = dict.fromkeys(names)
        for name in names:
            del untold.waiting[name]
        table = self._table
        return PinChanges(
            untold.number,
            [self._pool.of(row).where.segment for row in rows],
            [table.offset[row] for row in rows],
            [table.keys[row] for row in rows],
            [table.pin[row] == Pin.HARD for row in rows],
        )

    def _copies(self, name: bytes, node: str) -> list[int]:
        first = self._index.rows.get(name)
        copies = [] if first is None else self._table.copies(first)
        return [row for row in copies if self._pool.of(row).node.name == node]
