"""Makes the copies that a master orders: of drains, promotion, demotion, hot blocks, replication.

    master                       this node                          target
      │ ◀──────────── NextCopies  │                                   │
      │ Copies ─────────────────▶ │ read, verify                      │
      │                           │ == one-sided write ═════════════▶ │
      │                           │ Written ────────────────────────▶ │
      │ ◀── NextCopies(done, ...) │                                   │

Within the node (DRAM to SSD and back) the write is a call. A copy whose write ended in doubt is
not reported at all: its bytes may still land, so its place must not be given to another block
before the master's own deadline, which is later than ours.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvstore.client.writes_under_way import Target, WritesUnderWay
from kvstore.errors import Fenced, KVStoreError
from kvstore.node.copy_batches import CopyResults, batches_of
from kvstore.node.copy_work import CopyWork
from kvstore.node.segment import Segment
from kvstore.node.target_keys import TargetKeys
from kvstore.wire import messages as m
from kvstore.wire.master_link import MasterLink
from kvstore.wire.peer_messages import AskAtRest, AtRest, encode_to_node

if TYPE_CHECKING:
    from configs.schema import KVStoreConfig
    from transfer import TransferEngine

logger = logging.getLogger(__name__)

COPIES_MAX: Final = 256  # asked for at a time
AGAIN_S: Final = 1.0  # until a master that did not take a report is told again


@dataclass(slots=True, kw_only=True)
class CopyFigures:
    """Copies so far, by what became of them. `doubtful` ones were left to the master's deadline."""

    done: int = 0
    failed: int = 0
    corrupt: int = 0
    doubtful: int = 0
    nbytes: int = 0


class Copier:
    """One thread, one batch of bounded size under way at a time. Thread-safe.

    Args:
        engine: The node's.
        segments: Its segments, by number.
        config: `copy_bytes` bounds a batch, `open_put_s` is the master's deadline.
        keys: Of other nodes' segments.
    """

    def __init__(
        self,
        engine: TransferEngine,
        segments: Sequence[Segment],
        config: KVStoreConfig,
        keys: TargetKeys,
    ) -> None:
        self._name = engine.name
        self._config = config
        self._work = CopyWork(engine, segments, keys, buffer_bytes=config.copy_bytes)
        self._changed = threading.Condition()
        self._ready: list[MasterLink] = []
        self._again_s: dict[MasterLink, float] = {}  # when to ask without having been told
        self._unreported: dict[MasterLink, CopyResults] = {}
        self._turns: dict[MasterLink, int] = {}  # requests that each master answered
        self.under_way = WritesUnderWay()
        self._closing = threading.Event()
        self._figures = CopyFigures()
        self._thread = threading.Thread(target=self._run, name="store-copier", daemon=True)

    def open(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the batch under way, report it, and stop. Idempotent."""
        with self._changed:
            self._closing.set()
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        self._work.close()

    def wake(self, link: MasterLink) -> None:
        """This master has work. Never waits."""
        with self._changed:
            if link not in self._ready:
                self._ready.append(link)
                self._changed.notify_all()

    def say_at_rest(self, node: str, note: AskAtRest) -> None:
        """Answer another node's question about its segment, when that can be done."""
        answer = encode_to_node(AtRest(note.segment, note.number, for_copies=True))
        self.under_way.when_at_rest(
            (node, note.segment), note.number, lambda: self._work.note(node, answer)
        )

    def figures(self) -> CopyFigures:
        """Return what was done so far; not to be changed."""
        return self._figures

    def _run(self) -> None:
        while (link := self._next()) is not None:
            try:
                self._serve(link)
            except Fenced:
                logger.warning("store node %s is fenced: it copies nothing any more", self._name)
                return
            except KVStoreError as error:
                # The master asks again with its next heartbeat, or its deadline ends the copies.
                logger.info("copies for %s: %s", link.address, error)
        for link in list(self._unreported):
            self._report(link)

    def _next(self) -> MasterLink | None:
        """Wait for a master with work, or with something to be told; None at the end."""
        with self._changed:
            while True:
                next_link, next_s = min(
                    self._again_s.items(), key=lambda item: item[1], default=(None, math.inf)
                )
                pause_s = max(0.0, next_s - time.monotonic())
                if self._unreported:
                    pause_s = min(AGAIN_S, pause_s)
                self._changed.wait_for(
                    lambda: self._ready or self._closing.is_set(),
                    timeout=None if pause_s == math.inf else pause_s,
                )
                if self._closing.is_set():
                    return None
                if self._ready:
                    return self._ready.pop(0)
                if next_link is not None and next_s <= time.monotonic():
                    return next_link
                if self._unreported:
                    return next(iter(self._unreported))

    def _serve(self, link: MasterLink) -> None:
        """Ask, copy, report, until there is nothing more to do."""
        self._again_s.pop(link, None)
        while not self._closing.is_set():
            with self.under_way.begin() as write:
                copies = self._ask(link, COPIES_MAX)
                if not copies:
                    return
                targets = {(copy.target.node, copy.target.segment) for copy in copies}
                write.granted(targets, put_s=self._config.open_put_s)
                write.end(self._make(copies, link))

    def _make(self, copies: Sequence[m.Copy], link: MasterLink) -> set[Target]:
        """Make copies; return the segments in which some may still be under way."""
        doubtful: set[Target] = set()
        for batch in batches_of(copies, self._config.copy_bytes):
            if self._closing.is_set():
                break  # what was not begun is the master's again by its deadline
            deadline_s = time.monotonic() + self._config.open_put_s / 2
            results = self._work.make(batch, deadline_s)
            self._count(results, len(batch.copies), batch.nbytes)
            self._unreported[link] = results + self._unreported.get(link, CopyResults.none())
            if results.number < len(batch.copies):
                doubtful.add((batch.target.node, batch.target.segment))
        return doubtful

    def _ask(self, link: MasterLink, limit: int) -> list[m.Copy]:
        results = self._unreported.get(link, CopyResults.none())
        turn = self._turns.get(link, 0) + 1
        request = m.NextCopies(
            node=self._name,
            done=results.done,
            failed=results.failed,
            corrupt=results.corrupt,
            limit=limit,
            turn=turn,
        )
        reply = link.ask(request, m.Copies)
        self._unreported.pop(link, None)
        self._turns[link] = turn
        if not reply.copies and reply.again_s > 0:
            self._again_s[link] = time.monotonic() + reply.again_s
        return reply.copies

    def _report(self, link: MasterLink) -> None:
        try:
            self._ask(link, 0)
        except KVStoreError as error:
            logger.info("copies not reported to %s: %s", link.address, error)

    def _count(self, results: CopyResults, num_copies: int, nbytes: int) -> None:
        figures = self._figures
        figures.done += len(results.done)
        figures.failed += len(results.failed)
        figures.corrupt += len(results.corrupt)
        figures.doubtful += num_copies - results.number
        if len(results.done) == num_copies:
            figures.nbytes += nbytes
