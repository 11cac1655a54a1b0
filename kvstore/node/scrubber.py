"""Reads every block of a node again and again, so that a bad one is found before a reader needs it.

    pass     [ batch )  pause  [ batch )  pause ...  [ batch )          one per `period_s`

The pauses spread a pass over its period, and keep it below `bytes_per_s`; the thread runs at the
lowest priority. A block that does not match is read again a moment later: its place may just have
been given to another one, whose writer has not said so yet. Then it is forgotten and reported.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvstore.errors import KVStoreError
from kvstore.node.block_check import BUFFER_BYTES, BlockCheck, batches_of
from kvstore.node.indexed_block import IndexedBlock
from kvstore.node.segment import Segment

if TYPE_CHECKING:
    from configs.kvstore_segments import ScrubConfig

logger = logging.getLogger(__name__)

IDLE_S: Final = 60.0  # between looks at a node that holds nothing
AGAIN_S: Final = 0.05
READ_S: Final = 30.0
BLOCKS_MAX: Final = 256  # of one batch
UNREPORTED_MAX: Final = 1024
LOWEST_PRIORITY: Final = 19

# Tells the master of bad blocks of a segment; returns how many copies it dropped.
Report = Callable[[int, Sequence[IndexedBlock]], int]


@dataclass(slots=True, kw_only=True)
class ScrubFigures:
    """What the scrubber has done so far.

    Attributes:
        passes: Ended ones.
        last_pass_s: How long the last one took.
        blocks: Verified, good and bad.
        nbytes: Read for that.
        bad_blocks: Found wrong or unreadable, and forgotten.
        dropped_blocks: Of those, the ones that the master still believed in.
        late_blocks: Not read in time: left for the next pass.
    """

    passes: int = 0
    last_pass_s: float = 0.0
    blocks: int = 0
    nbytes: int = 0
    bad_blocks: int = 0
    dropped_blocks: int = 0
    late_blocks: int = 0


@dataclass(slots=True)
class _Unreported:
    segment: int
    blocks: list[IndexedBlock] = field(default_factory=list)


class Scrubber:
    """One thread. Thread-safe.

    Args:
        segments: What it looks after; open as long as it is.
        config: How often, and how fast.
        report: See `Report`. Raises KVStoreError if the master cannot be told now.
    """

    def __init__(self, segments: Sequence[Segment], config: ScrubConfig, report: Report) -> None:
        self._segments = segments
        self._config = config
        self._report = report
        self._checks = {segment.number: BlockCheck(segment.memory) for segment in segments}
        self._figures = ScrubFigures()
        self._unreported: deque[_Unreported] = deque(maxlen=UNREPORTED_MAX)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="store-scrubber", daemon=True)

    def open(self) -> None:
        """Start, if it is configured."""
        if self._config.enabled:
            self._thread.start()

    def close(self) -> None:
        """Stop after the batch under way. Idempotent."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def figures(self) -> ScrubFigures:
        """Return what was done so far; not to be changed."""
        return self._figures

    def _run(self) -> None:
        # Of this thread alone: Linux counts niceness by thread.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        try:
            while not self._closing.is_set():
                started_s = time.monotonic()
                found = sum(self._scrub(segment) for segment in self._segments)
                if self._closing.is_set():
                    return
                self._figures.passes += 1
                self._figures.last_pass_s = time.monotonic() - started_s
                left_s = self._config.period_s - self._figures.last_pass_s
                self._closing.wait(
                    max(left_s, 0.0) if found else min(self._config.period_s, IDLE_S)
                )
        except Exception:
            # Without it the store goes on; readers verify too.
            logger.exception("the scrubber ended")

    def _scrub(self, segment: Segment) -> int:
        """Read all of one segment; return how many blocks there were."""
        seen, at = 0, 0
        while not self._closing.is_set():
            upcoming = segment.index.after(at, BLOCKS_MAX)
            if not upcoming:
                break
            batch = next(batches_of(upcoming, BUFFER_BYTES))
            started_s = time.monotonic()
            self._verify(segment, batch)
            self._tell()
            seen += len(batch)
            at = batch[-1].offset + 1
            spent_s = time.monotonic() - started_s
            self._closing.wait(max(0.0, self._pause_s(batch) - spent_s))
        return seen

    def _verify(self, segment: Segment, batch: list[IndexedBlock]) -> None:
        bad = self._wrong(segment, batch)
        if bad and not self._closing.wait(AGAIN_S):
            bad = self._wrong(segment, [block for block in bad if segment.index.holds(block)])
        bad = [block for block in bad if segment.index.forget(block)]
        figures = self._figures
        figures.blocks += len(batch)
        figures.nbytes += sum(block.nbytes for block in batch)
        if bad:
            figures.bad_blocks += len(bad)
            logger.warning(
                "%s blocks of segment %s are corrupt, the first at %s",
                len(bad),
                segment.number,
                bad[0].offset,
            )
            self._unreported.append(_Unreported(segment.number, bad))

    def _wrong(self, segment: Segment, batch: list[IndexedBlock]) -> list[IndexedBlock]:
        check, wrong, judged = self._checks[segment.number], [], 0
        for block, intact in check.run(batch, deadline_s=time.monotonic() + READ_S):
            judged += 1
            if not intact:
                wrong.append(block)
        self._figures.late_blocks += len(batch) - judged
        return wrong

    def _tell(self) -> None:
        while self._unreported:
            first = self._unreported[0]
            try:
                self._figures.dropped_blocks += self._report(first.segment, first.blocks)
            except KVStoreError as error:
                logger.debug("bad blocks not reported yet: %s", error)
                return
            self._unreported.popleft()

    def _pause_s(self, batch: list[IndexedBlock]) -> float:
        """How long this batch may take, so that the pass fills its period."""
        held = sum(segment.figures().held_bytes for segment in self._segments)
        nbytes = sum(block.nbytes for block in batch)
        # What is held now may be less than the batch: its blocks went meanwhile.
        share = min(1.0, nbytes / held) if held else 0.0
        return max(nbytes / self._config.bytes_per_s, self._config.period_s * share)
