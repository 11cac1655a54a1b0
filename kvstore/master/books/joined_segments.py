"""How many of the new blocks a segment gets that came emptier than the others are.

                     mean
    old     ██████████|███    a share of the new bytes, by capacity
    joined  ██        |       `puts_max` times such a share at most, until it is near the mean

The emptiest segment is the first to be filled, so one that joined would get all of them: the whole
load of the writers, and everything that was stored lately in one place.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from configs.kvstore_policies import FillingPolicy
from kvstore.master.books.candidates import Candidates
from kvstore.master.books.segment import Segment
from kvstore.wire.messages import Medium

CREDIT_MAX: Final = 64 << 20  # bytes that one may have at once after it could not be used


class JoinedSegments:
    """Segments on their way to the mean, and the bytes of new blocks due to each.

    A segment earns bytes by those that others get, and pays with those that it gets itself.
    Not thread-safe.

    Attributes:
        policy: How they are filled.
    """

    def __init__(self) -> None:
        self.policy = FillingPolicy()
        self._credit: dict[int, float] = {}  # by `Segment.index`; below 0: had to take more

    def __bool__(self) -> bool:
        return bool(self._credit)

    def __contains__(self, segment: Segment) -> bool:
        return segment.index in self._credit

    def add(self, segment: Segment) -> None:
        """A segment came."""
        self._credit[segment.index] = 0.0

    def discard(self, segment: Segment) -> None:
        """A segment went."""
        self._credit.pop(segment.index, None)

    def graduate(self, segments: Iterable[Segment], now: float) -> None:
        """Forget those that are about as full as the mean of their medium is now."""
        used, capacity = dict.fromkeys(Medium, 0), dict.fromkeys(Medium, 0)
        joined: list[Segment] = []
        for segment in segments:
            if segment.is_told and segment.placeable_s <= now and not segment.node.draining:
                used[segment.medium] += segment.capacity - segment.free
                capacity[segment.medium] += segment.capacity
                if segment.index in self._credit:
                    joined.append(segment)
        for segment in joined:
            nbytes, medium = segment.capacity, segment.medium
            enough = used[medium] / max(1, capacity[medium]) - self.policy.tolerance
            if nbytes - segment.free >= enough * nbytes:
                del self._credit[segment.index]

    def blocks(self, segment: Segment, space: int) -> int:
        """Return how many new blocks of this space a joined segment may get now."""
        return max(0, int(self._credit[segment.index] // segment.space_of(space)))

    def placed(self, blocks: int, space: int, at: Segment, candidates: Candidates) -> None:
        """Count new blocks.

        Args:
            blocks: So many.
            space: Of each.
            at: Where they are.
            candidates: Which segments might have got them.
        """
        nbytes, joined = blocks * at.space_of(space), candidates.joined
        credit, most = self._credit, max(CREDIT_MAX, nbytes)
        if at in joined:
            credit[at.index] = max(credit[at.index] - nbytes, -most)
            return
        for segment in joined:
            earned = nbytes * self.policy.puts_max * segment.capacity / candidates.rivals
            before = credit[segment.index]
            credit[segment.index] = max(before, min(before + earned, most))
