"""Where blocks of one request may go, and how a long batch is spread over it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Final

from kvstore.master.books.segment import Segment
from kvstore.wire.messages import Medium

RUN_BYTES: Final = 4 << 20  # of one batch, in one segment before the next has its turn


@dataclass(slots=True, kw_only=True)
class Candidates:
    """Where blocks of one request may go: sets of segments, the better sets first.

    A block exists to outlive its writer, so evicting an old block elsewhere comes before using
    free space at home. Within a set: preferred nodes, then faster media, then more free space, so
    that a batch stays on few nodes. What is long for that is spread over them in runs, so that
    those who read it do not all read from one.

    Attributes:
        sets: The segments.
        prefer: The preferred nodes.
        joined: Segments of the second set that are still to be filled: they get the blocks due to
            them before the first set's, and others only if that one can't have them.
        rivals: Bytes of capacity that the first set has in their medium.
        full: From which size on there is no free range in a set, by its position.
        evicting: Where the last eviction was; it goes on there for `runs_on` further ones, before
            the ages of all are compared again.
        runs_on: See there.
        overflow: Disks, which take a block before one that should be there is evicted for it.
        guarded: Nothing of that kind is evicted. Ends when the disks are full.
    """

    sets: tuple[tuple[Segment, ...], ...]
    prefer: Collection[str] = ()
    joined: tuple[Segment, ...] = ()
    rivals: int = 0
    full: dict[int, int] = field(default_factory=dict)
    evicting: Segment | None = None
    runs_on: int = 0
    overflow: tuple[Segment, ...] = ()
    guarded: bool = False

    def without_overflow(self) -> Candidates:
        """Return the same for what is not to go to disks, nor to evict what should be there."""
        return replace(self, full=dict(self.full), overflow=())

    def most(self, space: int) -> int:
        """Return what a block of this space takes where it takes most."""
        groups = (*self.sets, self.overflow)
        return max((s.space_of(space) for group in groups for s in group), default=space)

    def turns(self, blocks: int, space: int) -> Iterator[tuple[Segment, int]]:
        """Say in which turns the segments that come first get blocks of this space, and how many.

        Each gets as its share of the free bytes is, the emptiest first, in turns of `RUN_BYTES`.
        Nothing is said of a batch that is no longer than such a run, and of what is left over.
        """
        run = max(1, RUN_BYTES // space)
        if blocks <= run or not self.sets:
            return
        _, group = next(groupby(self.sets[0], self._rank))
        best = list(group)
        free = sum(segment.free for segment in best)
        if len(best) < 2 or not free:
            return
        shares: list[tuple[Segment, int]] = []  # in runs
        left = -(-blocks // run)
        for segment in best:
            share = min(left, max(1, round(blocks * segment.free / (free * run))))
            shares.append((segment, share))
            left -= share
        for turn in range(max(share for _, share in shares)):
            for segment, share in shares:
                if turn < share:
                    yield segment, run

    def _rank(self, segment: Segment) -> tuple[bool, Medium]:
        """Return what comes before free space."""
        return segment.node.name in self.prefer, segment.medium
