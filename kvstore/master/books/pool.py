"""The segments of all nodes, and where in them the next block goes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Final

from kvstore import row_loops
from kvstore.master.books.batch_placement import RUN_MAX, BatchPlacement
from kvstore.master.books.candidates import Candidates
from kvstore.master.books.copy_state import FREE
from kvstore.master.books.copy_table import CopyTable
from kvstore.master.books.joined_segments import JoinedSegments
from kvstore.master.books.overflow import Overflow
from kvstore.master.books.segment import Node, Segment
from kvstore.wire.messages import Medium, NodeAddress, PutOutcome

MEDIA: Final = tuple(Medium)  # fastest first
SEARCHED_MAX: Final = 8  # segments for each of which rows are gone through once
EVICTED_MAX: Final = 16  # times a block's own size may go for it: then its segment is in pieces


class SegmentPool:
    """All nodes and their segments. Not thread-safe.

    Args:
        table: The columns of their copies.
        clear: Called with committed copies that have to go, that nobody reads, and that are out of
            their segment's order of eviction: they are in none of the other books afterwards, and
            their places are the pool's.
    """

    def __init__(self, table: CopyTable, *, clear: Callable[[Sequence[int]], None]) -> None:
        self._table = table
        self._clear = clear
        self._nodes: dict[str, Node] = {}
        self._segments: dict[int, Segment] = {}  # by `Segment.index`
        self._last_index = -1
        self.joined = JoinedSegments()
        self._batches = BatchPlacement(table, self.of, self.joined, clear)
        self.all_heard_s = -math.inf  # nobody's silence began before this
        self.doubted: set[str] = set()  # nodes that are not sent readers until they are heard of
        # Capacity of all segments that are no disks, and of the disks; read them only.
        self.fast_bytes = self.disk_bytes = 0

    @property
    def overflow(self) -> Overflow | None:
        """When puts go to disks, though there are faster segments; None: never."""
        return self._batches.overflow

    @overflow.setter
    def overflow(self, overflow: Overflow) -> None:
        self._batches.overflow = overflow

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._segments.values())

    def __len__(self) -> int:
        return len(self._segments)

    @property
    def segments(self) -> dict[int, Segment]:
        """By index; read it, change it here only."""
        return self._segments

    @property
    def nodes(self) -> Collection[Node]:
        """All nodes that lend something."""
        return self._nodes.values()

    def node(self, name: str) -> Node | None:
        """Return a node."""
        return self._nodes.get(name)

    def find(self, node: str, number: int) -> Segment | None:
        """Return a node's segment of this number."""
        known = self._nodes.get(node)
        return None if known is None else known.segments.get(number)

    def of(self, row: int) -> Segment:
        """Return the segment in which a living copy lies."""
        return self._segments[self._table.segment[row]]

    def by_segment(self, rows: Sequence[int]) -> Iterable[tuple[Segment, Sequence[int]]]:
        """Sort living copies by where they lie, those of a segment in this order."""
        where = self._table.segment
        if rows and row_loops.all_are(where, rows, where[rows[0]]):
            return ((self.of(rows[0]), rows),)
        indices = row_loops.gather(where, rows)
        distinct = list(dict.fromkeys(indices))
        if len(distinct) <= SEARCHED_MAX:
            return [(self._segments[i], row_loops.where(where, rows, i)) for i in distinct]
        found: dict[int, list[int]] = {}
        for row, index in zip(rows, indices, strict=True):
            found.setdefault(index, []).append(row)
        return [(self._segments[index], theirs) for index, theirs in found.items()]

    def name(self, rows: Sequence[int]) -> tuple[list[NodeAddress], list[int]]:
        """Return the segments of these copies, each once, and every copy's position in that list.

        Row -1 is no copy and has position -1.
        """
        where = self._table.segment
        if rows and min(rows) >= 0:  # as nearly always
            if row_loops.all_are(where, rows, where[rows[0]]):
                return [self.of(rows[0]).where], [0] * len(rows)
            indices = row_loops.gather(where, rows)
        else:
            indices = [where[row] if row >= 0 else -1 for row in rows]
        distinct = [index for index in dict.fromkeys(indices) if index >= 0]
        position = {index: i for i, index in enumerate(distinct)}
        position[-1] = -1
        nodes = [self._segments[index].where for index in distinct]
        return nodes, list(map(position.__getitem__, indices))

    def next_index(self) -> int:
        """Return an index that no segment ever had."""
        self._last_index += 1
        return self._last_index

    def add(self, segment: Segment) -> None:
        """Take a segment into the pool, and its node with the first."""
        node = self._nodes.setdefault(segment.node.name, segment.node)
        assert node is segment.node, node
        assert segment.where.segment not in node.segments, segment.where
        node.segments[segment.where.segment] = segment
        self._segments[segment.index] = segment
        self._count_fast()
        self.joined.add(segment)
        self.all_heard_s = min(self.all_heard_s, node.heard_s)

    def remove(self, name: str) -> list[Segment]:
        """Take a node out, if it is in; return what were its segments."""
        node = self._nodes.pop(name, None)
        self.doubted.discard(name)
        if node is None:
            return []
        for segment in node.segments.values():
            del self._segments[segment.index]
            self.joined.discard(segment)
        self._count_fast()
        return list(node.segments.values())

    def _count_fast(self) -> None:
        fast = (s.capacity for s in self if s.medium is not Medium.SSD)
        self.fast_bytes = sum(fast)
        self.disk_bytes = sum(s.capacity for s in self) - self.fast_bytes

    def silent_since(self, deadline_s: float) -> list[str]:
        """Nodes not heard of after this time. Looks at all only when one may be among them."""
        if self.all_heard_s > deadline_s:
            return []
        silent = [node.name for node in self.nodes if node.heard_s <= deadline_s]
        spoken = [node.heard_s for node in self.nodes if node.heard_s > deadline_s]
        self.all_heard_s = min(spoken, default=math.inf)
        return silent

    def pardon(self, now: float) -> None:
        """Count every node as heard of now: it was us who did not listen."""
        for node in self.nodes:
            self.hear(node, now)

    def hear(self, node: Node, now: float) -> None:
        """It has spoken."""
        node.heard_s = now
        if self.doubted:
            self.doubted.discard(node.name)

    def candidates(
        self,
        writer: str,
        now: float,
        *,
        avoid: Collection[str] = (),
        prefer: Collection[str] = (),
        media: Sequence[Medium] = (),
    ) -> Candidates:
        """Return the segments in which a writer may place blocks now."""
        usable = [
            segment
            for segment in self
            if segment.placeable_s <= now
            and segment.is_told
            and not segment.node.draining
            and segment.node.name not in avoid
        ]
        if len(usable) == 1 and not media and not self.joined:
            return Candidates(sets=(tuple(usable),), prefer=prefer)
        overflow: list[Segment] = []
        if not media:  # the slow ones are filled by copies, unless there are no others
            fast = [segment for segment in usable if segment.medium is not Medium.SSD]
            if fast and len(fast) < len(usable):
                overflow = self._with_room(usable)
            usable, media = fast or usable, MEDIA
        rank = {medium: position for position, medium in enumerate(media)}
        usable = [segment for segment in usable if segment.medium in rank]

        def order(segment: Segment) -> tuple[bool, int, int, str, int]:
            preferred = segment.node.name in prefer
            where = segment.where
            return (not preferred, rank[where.medium], -segment.free, where.node, where.segment)

        home = self._nodes.get(writer)
        sets: tuple[list[Segment], list[Segment], list[Segment]] = ([], [], [])
        for segment in sorted(usable, key=order):
            node = segment.node
            if home is None or node.domain != home.domain or node.name in prefer:
                sets[0].append(segment)
            else:
                sets[1 if node is not home else 2].append(segment)
        groups = tuple(tuple(group) for group in sets if group)
        candidates = Candidates(sets=groups, prefer=prefer)
        if self.joined:
            self.joined.graduate(self, now)
            if groups and not any(segment.node.name in prefer for segment in groups[0]):
                candidates = self._sparing(groups)
        if overflow:
            candidates.guarded = True
            candidates.overflow = tuple(sorted(overflow, key=lambda s: (s.node is home, order(s))))
        return candidates

    def _with_room(self, segments: Iterable[Segment]) -> list[Segment]:
        """Return the disks that take what should not make faster segments evict."""
        rule = self.overflow
        if rule is None:
            return []
        return [s for s in segments if s.medium is Medium.SSD and rule.has_room(s)]

    def _sparing(self, groups: tuple[tuple[Segment, ...], ...]) -> Candidates:
        """Let those that joined have a share of what goes to the best segments, not all."""
        best, *others = groups
        medium = best[0].medium  # slower ones are the last in their set anyway
        joined = tuple(s for s in best if s.medium is medium and s in self.joined)
        rest = tuple(s for s in best if s not in joined)
        rivals = sum(segment.capacity for segment in rest if segment.medium is medium)
        if not joined or not rivals:
            return Candidates(sets=groups)
        return Candidates(sets=(rest, joined, *others), joined=joined, rivals=rivals)

    def place_many(
        self, keys: Sequence[bytes], lengths: Sequence[int], space: int, candidates: Candidates
    ) -> list[int]:
        """Return rows of open copies of the first of these blocks, as many as can be had at once.

        Like `place` for each of them; see `BatchPlacement`.
        """
        return self._batches.place(keys, lengths, space, candidates)

    def place(
        self,
        key: bytes,
        length: int,
        space: int,
        candidates: Candidates,
        *,
        without: Collection[str] = (),
    ) -> int | None:
        """Return the row of an open copy, evicting older blocks where that is what it takes.

        Args:
            key: The block.
            length: Bytes of payload.
            space: Bytes to take.
            candidates: Where.
            without: Failure domains in which a copy is already.
        """
        if not candidates.joined:
            return self._place(key, length, space, candidates, without)
        for segment in candidates.joined:
            if segment.node.domain not in without and self.joined.blocks(segment, space):
                row = segment.place(key, length, space)
                if row is not None:
                    break
        else:
            row = self._place(key, length, space, candidates, without)
        if row is not None:
            self.joined.placed(1, space, self.of(row), candidates)
        return row

    def _place(
        self,
        key: bytes,
        length: int,
        space: int,
        candidates: Candidates,
        without: Collection[str],
    ) -> int | None:
        for number, group in enumerate(candidates.sets):
            allowed = group
            if without:
                allowed = tuple(s for s in group if s.node.domain not in without)
            if space < candidates.full.get(number, math.inf):
                row = _in_room(key, length, space, allowed)
                if row is not None:
                    return row
                if not without:
                    candidates.full[number] = space
            row = self._evict_for(key, length, space, allowed, candidates)
            if row is None and candidates.overflow and candidates.guarded:
                disks = [s for s in candidates.overflow if s.node.domain not in without]
                row = _in_room(key, length, space, disks)
                if row is None:
                    candidates.guarded = False
                    row = self._evict_for(key, length, space, allowed, candidates)
            if row is not None:
                return row
        return None

    def _evict_for(
        self,
        key: bytes,
        length: int,
        space: int,
        segments: Sequence[Segment],
        candidates: Candidates,
    ) -> int | None:
        last = candidates.evicting
        if candidates.runs_on and last is not None and last in segments:
            candidates.runs_on -= 1
            row = self._make_room(last, key, length, space, candidates)
            if row is not None:
                return row
        for segment in sorted(segments, key=Segment.age) if len(segments) > 1 else segments:
            row = self._make_room(segment, key, length, space, candidates)
            if row is not None:
                candidates.evicting, candidates.runs_on = segment, RUN_MAX
                return row
        return None

    def why_not(self, space: int) -> PutOutcome:
        """Return what to tell the writer of a block for which there is no place now."""
        largest = max((segment.capacity for segment in self), default=space)
        return PutOutcome.NO_SPACE if space <= largest else PutOutcome.TOO_LARGE

    def _make_room(
        self, segment: Segment, key: bytes, length: int, space: int, candidates: Candidates
    ) -> int | None:
        if not segment.can_make_room(space):
            return None
        allowance, rule = EVICTED_MAX * space, self.overflow if candidates.guarded else None
        while allowance > 0 and (victim := segment.victim()) is not None:
            if rule is not None and rule.keeps(victim):
                return None
            allowance -= self._table.space[victim]
            segment.leave(victim, evicted=True)
            if segment.may_take_over(victim, space):
                self._clear((victim,))
                segment.take_over((victim,), (key,), (length,))
                return victim
            self._clear((victim,))
            candidates.full.clear()  # there may be something left over
            segment.become(victim, FREE)
            self._table.give_back(victim)
            row = segment.place(key, length, space)
            if row is not None:
                return row
        return None


def _in_room(key: bytes, length: int, space: int, segments: Iterable[Segment]) -> int | None:
    """Return the row of an open copy in the first of these that has room; None if none has."""
    for segment in segments:
        if segment.may_fit(space):
            row = segment.place(key, length, space)
            if row is not None:
                return row
    return None
