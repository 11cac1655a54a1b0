"""Asks everybody who may write in a node's segments whether they are at rest.

    node                          writers, here and elsewhere       master
      │ Register ──────────────────────────────────────────────────▶ │ places nothing here
      │ AskAtRest ────────────────▶ │                                │
      │ ◀─────────────────── AtRest │                                │
      │ Settled ───────────────────────────────────────────────────▶ │ places here again

`kvstore/node/rest_questions.py` decides, this carries it out; `Registration` tells the masters.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from kvstore.node.rest_questions import News, Question, RestQuestions, Role, Writer
from kvstore.node.writer_witness import WriterWitness
from kvstore.wire.messages import Medium
from kvstore.wire.peer_messages import (
    AskAtRest,
    AtRest,
    Leader,
    encode_to_client,
    encode_to_node,
)
from kvstore.wire.standing import MasterRecord
from transfer import TransferError

if TYPE_CHECKING:
    from kvstore.client.writes_under_way import WritesUnderWay
    from kvstore.node.segment import Segment
    from transfer import TransferEngine

logger = logging.getLogger(__name__)

Heed = Callable[[Sequence[Leader]], None]


class Settlement:
    """Thread-safe; never waits.

    Args:
        engine: The node's.
        segments: Its segments, by number.
        put_s: How long a put may take.

    Attributes:
        witness: Of writers that end without a word.
    """

    def __init__(
        self, engine: TransferEngine, segments: Sequence[Segment], *, put_s: float
    ) -> None:
        self._engine = engine
        self._segments = segments
        self._questions = RestQuestions(put_s)
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._unasked: set[str] = set()  # the log says so already; for the thread that asks
        # Never changed, but replaced: it is read without the lock.
        self._local: dict[Writer, tuple[WritesUnderWay, Heed]] = {}
        self._leaders: dict[int, Leader] = {}  # by shard
        self._on_news: Callable[[], None] = _nobody
        self.witness = WriterWitness(engine, self._cut_off, period_s=put_s / 2)
        engine.on_peer_lost(self._lost)

    def on_news(self, wake: Callable[[], None]) -> None:
        """Name who tells the masters: it is called when there is something to be told."""
        self._on_news = wake

    def meet_writer(self, writes: WritesUnderWay, heed: Heed) -> None:
        """Count a writer in this process among those who are asked.

        Args:
            writes: Its books.
            heed: Tells it of elected masters; must not wait.
        """
        with self._lock:
            writer = Writer(self._engine.name, Role.CLIENT, next(self._numbers))
            self._local = {**self._local, writer: (writes, heed)}

    def part_with(self, writes: WritesUnderWay) -> None:
        """A writer in this process ends; unless something of it is in doubt, it counts no more."""
        with self._lock:
            known = next((w for w, (theirs, _) in self._local.items() if theirs is writes), None)
            targets = [(self._engine.name, segment.number) for segment in self._segments]
            if known is None or not all(map(writes.is_at_rest, targets)):
                return
            self._local = {w: local for w, local in self._local.items() if w != known}
        self._gone(known, [segment.number for segment in self._segments])

    def is_anew(self) -> bool:
        """See `OfferSegment.anew`."""
        return self._questions.is_anew(time.monotonic())

    @property
    def leaders(self) -> list[Leader]:
        """The elected masters that the node has registered with, or is about to."""
        return list(self._leaders.values())

    def meet(self, record: MasterRecord, *, again: bool) -> None:
        """A master is about to be told of the segments; `again`: perhaps another was before."""
        if record.term:
            leader = Leader(record.shard, record.term, record.address)
            self._leaders = {**self._leaders, record.shard: leader}
        if again:
            self._questions.renew(time.monotonic())
            self._unasked.clear()

    def registered(self, shard: int, touched: Collection[int]) -> None:
        """One shard's master knows the segments; in the touched ones it places nothing yet."""
        writers = {number: [*self._segments[number].writers(), *self._local] for number in touched}
        self._questions.registered(shard, writers, time.monotonic())

    def ask(self) -> list[News]:
        """Ask those who have not answered; return what the masters are to be told. One thread."""
        for question in self._questions.due(time.monotonic()):
            self._ask(question)
        return self._questions.news()

    def told(self, news: News) -> None:
        """A master was told."""
        self._questions.told(news)

    def receive(self, peer: str, note: AtRest) -> None:
        """Take an answer; on the engine's thread."""
        role = Role.COPIER if note.for_copies else Role.CLIENT
        self._at_rest(Question(Writer(peer, role), note.segment, note.number))

    def leave(self, peer: str, segment: Segment) -> bool:
        """A client gave its key back: it is not asked any more. As `Segment.withdraw_from`."""
        is_still = segment.withdraw_from(peer)
        if is_still:
            self._gone(Writer(peer, Role.CLIENT), [segment.number])
            if not any(writer.name == peer for s in self._segments for writer in s.writers()):
                self.witness.left(peer)
        return is_still

    def _cut_off(self, peer: str, *, disks: bool) -> bool:
        concerned = [s for s in self._segments if (s.medium is Medium.SSD) is disks]
        left = [self.leave(peer, segment) for segment in concerned]  # all of them, though one hangs
        return all(left)

    def _lost(self, peer: str, evidence: str) -> None:
        del evidence
        self.witness.lost(peer)
        self._on_news()

    def _ask(self, question: Question) -> None:
        writer, segment, number = question
        local = self._local.get(writer)
        if local is not None:
            writes, heed = local
            heed(self.leaders)
            target = self._engine.name, segment
            writes.when_at_rest(target, number, lambda: self._at_rest(question))
            return
        copies = writer.role is Role.COPIER
        note = AskAtRest(segment, number, for_copies=copies, leaders=self.leaders)
        try:
            encode = encode_to_node if copies else encode_to_client
            self._engine.notify(writer.name, encode(note))
        except TransferError as error:
            # Once for each: it is asked again and again, until its end is known.
            level = logging.DEBUG if writer.name in self._unasked else logging.INFO
            self._unasked.add(writer.name)
            logger.log(level, "%s cannot be asked whether it is at rest: %s", writer.name, error)

    def _at_rest(self, question: Question) -> None:
        if self._questions.at_rest(*question):
            self._on_news()

    def _gone(self, writer: Writer, segments: Collection[int]) -> None:
        if self._questions.gone(writer, segments):
            self._on_news()


def _nobody() -> None:
    """Nobody tells the masters yet."""
