"""One copy that the master wants made, and why."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum


class Purpose(IntEnum):
    """Why a block is copied; the more urgent first."""

    DRAIN = 0  # a node is about to go
    REPLICATE = 1  # a block lost one of the copies that its writer wanted
    DEMOTE = 2  # DRAM is nearly full: to the SSD, before it is evicted
    PROMOTE = 3  # read again and again from the SSD: to DRAM
    SPREAD = 4  # read very often: to a further node
    FILL = 5  # a node joined
    REBALANCE = 6  # an administrator asked for it

    @property
    def moves(self) -> bool:
        """Whether the source copy goes when the new one is there."""
        return self not in (Purpose.REPLICATE, Purpose.SPREAD)

    @property
    def counted_as(self) -> str:
        """Name in `MasterStatistics` of what it did, without `_blocks`."""
        names = {Purpose.DEMOTE: "demoted", Purpose.PROMOTE: "promoted"}
        return names.get(self, "moved" if self.moves else "replicated")

    @property
    def may_evict(self) -> bool:
        """Whether older blocks of the target may go for it. A drain loses nothing elsewhere."""
        return self is Purpose.DEMOTE


class Outcome(StrEnum):
    """How an order ended; `retried` is no end."""

    DONE = "done"
    GONE = "gone"  # the block, its source or its target are not there any more
    NO_SPACE = "no_space"
    FAILED = "failed"
    CORRUPT = "corrupt"  # the source's own bytes are wrong; that copy was dropped
    CANCELLED = "cancelled"
    RETRIED = "retried"


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOrder:
    """A copy to be made when its source node has a hand free.

    Attributes:
        key: The block.
        source: Segment of the copy that is read.
        purpose: Why.
        target: Segment to write to; None: chosen when its turn comes.
        attempts: How often it was tried in vain.
    """

    key: bytes
    source: int
    purpose: Purpose
    target: int | None = None
    attempts: int = 0
