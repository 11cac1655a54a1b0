"""Places for many blocks of one size at once: a pool that is full gives them by runs of victims.

    free ranges            ─▶ blocks one behind the other
    victims of their size  ─▶ each leaves its place to a block
    victims of other sizes ─▶ what they leave is free: one larger than many blocks, or many
                              smaller ones that lie one behind the other

    disks, before blocks are evicted that should be there: see `Overflow`

What is left then is placed block by block (`SegmentPool.place`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from kvstore.master.books.candidates import Candidates
from kvstore.master.books.copy_table import CopyTable
from kvstore.master.books.joined_segments import JoinedSegments
from kvstore.master.books.overflow import Overflow
from kvstore.master.books.segment import Segment

RUN_MAX: Final = 15  # evictions of a request in one segment before ages are compared again
RUNS_MAX: Final = 128  # of these, where it goes on in one segment
GIVEN_UP_MAX: Final = 256  # victims of another size at once


class BatchPlacement:
    """Not thread-safe.

    Args:
        table: The columns of the copies.
        of: Says in which segment a row is.
        joined: Segments that are still to be filled.
        clear: See `SegmentPool`.

    Attributes:
        overflow: See `SegmentPool`.
    """

    def __init__(
        self,
        table: CopyTable,
        of: Callable[[int], Segment],
        joined: JoinedSegments,
        clear: Callable[[Sequence[int]], None],
    ) -> None:
        self._table = table
        self._of = of
        self._joined = joined
        self._clear = clear
        self.overflow: Overflow | None = None

    def place(
        self, keys: Sequence[bytes], lengths: Sequence[int], space: int, candidates: Candidates
    ) -> list[int]:
        """Return rows of open copies of the first of these blocks; see `SegmentPool.place_many`."""
        rows: list[int] = []
        ways = self._in_free_ranges, self._on_disks, self._over_victims, self._where_others_go
        for way in ways:
            if len(rows) == len(keys) or (candidates.guarded and way == self._over_victims):
                break
            rest = slice(len(rows), None)
            rows += way(keys[rest], lengths[rest], space, candidates)
        return rows

    def _in_free_ranges(
        self, keys: Sequence[bytes], lengths: Sequence[int], space: int, candidates: Candidates
    ) -> list[int]:
        rows: list[int] = []

        def place(segment: Segment, blocks: int) -> None:
            end = min(len(rows) + blocks, len(keys))
            rows.extend(_cut(segment, keys[len(rows) : end], lengths[len(rows) : end], space))

        for segment in candidates.joined:
            place(segment, self._joined.blocks(segment, space))
        for segment, blocks in candidates.turns(len(keys) - len(rows), space):
            place(segment, blocks)
        for segment in candidates.sets[0] if candidates.sets else ():
            place(segment, len(keys))
        if candidates.joined:
            for segment, blocks in Counter(map(self._of, rows)).items():
                self._joined.placed(blocks, space, segment, candidates)
        return rows

    def _on_disks(
        self, keys: Sequence[bytes], lengths: Sequence[int], space: int, candidates: Candidates
    ) -> list[int]:
        rows: list[int] = []
        group = candidates.sets[0] if candidates.overflow and candidates.sets else ()
        if not group or self.overflow is None or not self.overflow.stops(group):
            return rows
        for segment in candidates.overflow:
            rows += _cut(segment, keys[len(rows) :], lengths[len(rows) :], space)
        candidates.guarded = len(rows) == len(keys)
        return rows

    def _over_victims(
        self, keys: Sequence[bytes], lengths: Sequence[int], space: int, candidates: Candidates
    ) -> list[int]:
        rows: list[int] = []
        ages = {s: s.age() for s in (candidates.sets[0] if candidates.sets else ())}
        alone = len(ages) == 1  # nobody's ages to compare with
        last: Segment | None = None
        most = 0
        while ages and len(rows) < len(keys):
            segment = min(ages, key=ages.__getitem__)
            if segment.may_fit(space):
                break
            wanted = len(keys) - len(rows)
            # Where the oldest were, the next oldest lie as a rule: each run there is twice as long.
            most = wanted if alone else min(2 * most, RUNS_MAX) if segment is last else RUN_MAX + 1
            last = segment
            victims = segment.evict(min(wanted, most), space)
            if not victims:
                break
            run = slice(len(rows), len(rows) + len(victims))
            self._clear(victims)
            segment.take_over(victims, keys[run], lengths[run])
            rows += victims
            ages[segment] = segment.age()  # the only one that has changed
            if candidates.joined:
                self._joined.placed(len(victims), space, segment, candidates)
        return rows

    def _where_others_go(
        self, keys: Sequence[bytes], lengths: Sequence[int], space: int, candidates: Candidates
    ) -> list[int]:
        """Runs of victims go as a whole, of no more bytes than the blocks take, or else one."""
        rows: list[int] = []
        group = candidates.sets[0] if candidates.sets and not candidates.joined else ()
        while group and len(rows) < len(keys):
            segment = min(group, key=Segment.age)
            wanted = len(keys) - len(rows)
            if not self._give_up(segment, wanted if len(group) == 1 else 1, space):
                break
            candidates.full.clear()
            fresh = _cut(segment, keys[len(rows) :], lengths[len(rows) :], space)
            if not fresh:
                break
            rows += fresh
        return rows

    def _give_up(self, segment: Segment, blocks: int, space: int) -> bool:
        """Free the oldest of a segment, all of one size, for so many blocks; False if none may."""
        victim, space = segment.victim(), segment.space_of(space)
        if victim is None or not segment.can_make_room(space):
            return False
        size = self._table.space[victim]
        for_one = -(-space // size)
        most = for_one * blocks if size < space else blocks * space // size
        victims = segment.evict(max(for_one, min(GIVEN_UP_MAX, most)), size)
        if not victims:
            return False
        self._clear(victims)
        segment.free_all(victims)
        return True


def _cut(segment: Segment, keys: Sequence[bytes], lengths: Sequence[int], space: int) -> list[int]:
    """Return rows of open copies in free ranges, of the first of these blocks."""
    rows: list[int] = []
    while len(rows) < len(keys) and segment.may_fit(space):
        run = segment.place_run(keys[len(rows) :], lengths[len(rows) :], space)
        if not run:
            break
        rows += run
    return rows
