"""Blocks that are being written before the master was asked, in places that a client had ahead.

```text
places 0..15 taken ─▶ 0..15 begun ─▶ Allocate 0..95, with these places ─▶ 16..95 begun
                                        │ 3 exists: its place is given back once it is at rest
                                        └ 5 granted elsewhere: begun there, its place as that of 3
```

A node is told of a block, as of any other, when the master has granted its key to this put and its
bytes are there. What was written in vain nobody ever hears of.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Self

import numpy as np
from numpy.typing import NDArray

from kvstore.client.block_writer import Begun
from kvstore.wire import messages as m
from kvstore.wire.messages import PutOutcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.client.block_writer import UnderWay
    from kvstore.client.reserved_places import ReservedPlace
    from kvstore.client.source import Source
    from kvstore.client.writes_under_way import Target, WriteUnderWay

Ints = NDArray[np.int64]
NOWHERE: Final = -1


@dataclass(slots=True, kw_only=True, eq=False)
class EarlyWrites:
    """The first blocks of a put, one in each place.

    Attributes:
        places: Of the first blocks.
        write: Counts them among what is under way.
        begun: Them alone.
        parts: What is or was under way of them, and which blocks.
        ours: Which places the put has taken over.
        batch: The number under which their keys were asked for.
    """

    places: Sequence[ReservedPlace]
    write: WriteUnderWay
    begun: Begun
    parts: list[tuple[UnderWay, list[int]]] = field(default_factory=list)
    ours: set[int] = field(default_factory=set)
    batch: int | None = None

    @classmethod
    def of(cls, source: Source, places: Sequence[ReservedPlace], write: WriteUnderWay) -> Self:
        """Nothing is under way yet."""
        nodes = list(dict.fromkeys(place.where for place in places))
        others = [NOWHERE] * (source.num_blocks - len(places))
        granted = m.Allocated(
            outcomes=[PutOutcome.GRANTED] * source.num_blocks,
            nodes=nodes,
            node_idx=[*(nodes.index(place.where) for place in places), *others],
            offsets=[*(place.offset for place in places), *others],
            put_s=0.0,
        )
        return cls(places=places, write=write, begun=Begun.of(source, granted))

    @property
    def numbers(self) -> list[int]:
        """The places' numbers."""
        return [place.batch for place in self.places]

    @property
    def targets(self) -> list[Target]:
        """The segments in which they are."""
        return [(node.node, node.segment) for node in self.begun.granted.nodes]

    @property
    def until_s(self) -> float:
        """Until when all of it is to have ended, on the monotonic clock."""
        return min(place.until_s for place in self.places)

    def started(self) -> None:
        """All has been begun that will be."""
        self.parts = [(part, part.rows.tolist()) for part in self.begun.under_way]

    def hand_over(self, begun: Begun) -> Ints:
        """Make what was begun a part of a put; return the rows that are to be begun now.

        Args:
            begun: As the master has granted it; nothing of it is under way.
        """
        count, num_rows = len(self.places), len(begun.granted.node_idx)
        self.ours = {row for row in range(count) if self._is_ours(row, begun.granted)}
        begun.under_way.extend(self.begun.under_way)
        begun.result.lost_nodes += self.begun.result.lost_nodes
        if len(self.ours) == count == sum(len(theirs) for _, theirs in self.parts):
            return np.arange(count, num_rows)  # as nearly always
        done = self.ours.intersection(self.begun.result.unsettled)
        begun.result.unsettled += sorted(done)
        for part, theirs in self.parts:
            kept = [row for row in theirs if row in self.ours]
            part.rows = np.array(kept, dtype=np.int64)
            done.update(kept)
        return np.array([row for row in range(num_rows) if row not in done], dtype=np.int64)

    def let_go(self) -> None:
        """Nobody grants the keys: of what is under way no node is told."""
        for part, _ in self.parts:
            part.rows = part.rows[:0]

    def end(self) -> list[int]:
        """All has ended; return the numbers of places in which nothing is under way any more.

        Those that the put has taken over are not among them.
        """
        doubtful = set(self.begun.result.unsettled)
        for part, theirs in self.parts:
            if part.failed:
                doubtful.update(theirs)
        self.write.end([self._target(row) for row in doubtful])
        return [
            place.batch
            for row, place in enumerate(self.places)
            if row not in doubtful and row not in self.ours
        ]

    def _is_ours(self, row: int, granted: m.Allocated) -> bool:
        place, index = self.places[row], granted.node_idx[row]
        if index < 0 or granted.offsets[row] != place.offset:
            return False
        where = granted.nodes[index]
        return (where.node, where.segment) == (place.where.node, place.where.segment)

    def _target(self, row: int) -> Target:
        where = self.places[row].where
        return where.node, where.segment
