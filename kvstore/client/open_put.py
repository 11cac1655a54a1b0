"""What became of the blocks of one request for places, while they are written and afterwards."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from kvstore.wire.messages import Medium, Pin, PutOutcome

if TYPE_CHECKING:
    from kvstore._native import PostBox
    from kvstore.client.block_writer import Begun
    from kvstore.client.early_writes import EarlyWrites
    from kvstore.client.writes_under_way import Target, WriteUnderWay

Ints = NDArray[np.int64]
PAUSE_S_MIN: Final = 0.005
PAUSE_S_MAX: Final = 0.25
SETTLING_S: Final = 0.05  # until a master that has just started is asked again


@dataclass(slots=True)
class Attempt:
    """What became of blocks, and of which of them when to try again.

    Attributes:
        outcomes: Of each.
        retry_s: When there may be space, as the master says.
        provisional: It has just started, and there may be space soon.
        lost: Blocks that were granted or written in vain.
        elsewhere: Blocks that their nodes did not get or did not confirm; other nodes may.
    """

    outcomes: list[PutOutcome]
    retry_s: float
    provisional: bool
    lost: set[int] = field(default_factory=set)
    elsewhere: set[int] = field(default_factory=set)

    @property
    def pause_s(self) -> float:
        """How long to wait before it is tried again."""
        if self.provisional:
            return SETTLING_S
        return min(max(self.retry_s, PAUSE_S_MIN), PAUSE_S_MAX)

    def followed_by(self, later: Attempt) -> Attempt:
        """Return what became of these blocks and of those behind them."""
        count = len(self.outcomes)
        return Attempt(
            self.outcomes + later.outcomes,
            max(self.retry_s, later.retry_s),
            self.provisional or later.provisional,
            self.lost | {count + block for block in later.lost},
            self.elsewhere | {count + block for block in later.elsewhere},
        )


@dataclass(slots=True, kw_only=True)
class OpenPut:
    """One `Allocate` and its copies.

    Attributes:
        batch: Its number.
        write: Counts it among what is under way.
        begun: What is written, and was.
        summed: Whether the master was told checksums when it was asked for places.
        granted_s: When the answer came.
        generation: From before that; see `PostBoxes.generation`.
        attempt: What became of the blocks.
        num_first: How much is under way that was begun before anything else.
        early: What was begun before the master was asked; the first `num_early` blocks, which are
            committed after all else.
        num_early: So many.
        committed: Which of the first so many written copies are copies of blocks now.
    """

    batch: int
    write: WriteUnderWay
    begun: Begun
    summed: bool
    granted_s: float
    generation: int
    attempt: Attempt
    num_first: int = 0
    early: EarlyWrites | None = None
    num_early: int = 0
    committed: list[bool] = field(default_factory=list)

    def post_end(self, box: PostBox | None, blocks: Ints) -> bool:
        """Say that all is written without waiting for the answer; False if that is to be asked for.

        It is if there is anything to be told beside: several copies, a pin, what was not granted
        or not written; and of disks, whose puts take long anyway.

        Args:
            box: Where puts are posted, if they are.
            blocks: Those that were written and not committed, rising.
        """
        begun, granted = self.begun, self.begun.granted
        if box is None or self.summed or self.committed or self.early or begun.replicas > 1:
            return False
        if begun.source.options.pin is not Pin.NONE or not len(blocks):
            return False
        if any(node.medium is Medium.SSD for node in granted.nodes):
            return False
        if granted.outcomes.count(PutOutcome.GRANTED) != len(blocks):
            return False
        if time.monotonic() > self.granted_s + granted.put_s / 2:
            return False
        return box.finish(self.batch, begun.source.sums.values[blocks].tobytes(), self.generation)

    def in_doubt(self) -> list[Target]:
        """Return the segments in which something may be under way for all we know."""
        granted = self.begun.granted
        in_doubt = {granted.node_idx[row] for row in self.begun.result.unsettled}
        return [(n.node, n.segment) for i, n in enumerate(granted.nodes) if i in in_doubt]

    def settle(self) -> None:
        """Note what became of the blocks, once nothing is under way."""
        attempt, num_rows = self.attempt, len(self.begun.granted.node_idx)
        result, num_blocks = self.begun.result, self.begun.source.num_blocks
        replicas = self.begun.replicas
        if len(self.committed) == num_rows and all(self.committed):  # as nearly always
            attempt.outcomes = [PutOutcome.STORED] * num_blocks
            return
        written = np.array(result.written, dtype=np.int64) // replicas
        stored = np.zeros(num_blocks, dtype=bool)
        stored[written[np.array(self.committed, dtype=bool)]] = True
        attempt.outcomes = [
            outcome if outcome is not PutOutcome.GRANTED
            else PutOutcome.STORED if good else PutOutcome.FAILED
            for outcome, good in zip(attempt.outcomes, stored.tolist(), strict=True)
        ]  # fmt: skip
        granted_to = np.array([*result.written, *result.void], dtype=np.int64) // replicas
        attempt.lost = set(granted_to[~stored[granted_to]].tolist())
        missed = np.array([*result.unreached, *result.unsettled], dtype=np.int64) // replicas
        attempt.elsewhere = set(missed[~stored[missed]].tolist()) - attempt.lost
