"""Which writers of a node's segments have still to say that they are at rest, and who is told.

After a master, another: it cannot know where writers of the first are still writing, so it
places nothing in a segment to which anybody had access, for as long as a put may take. It is told
sooner if all writers say that what they had begun is over:

    registered ─▶ asked (again and again) ── all at rest ─────────────▶ told, over
                        │                └── some are silent, told who ─▶ told, asked on
                        └── the time of a put is over ────────────────▶ over

Events in, questions and news out: no clock, no network.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

PATIENCE: Final = 2  # rounds of questions before a master is told of those who are silent


class Role(StrEnum):
    """For whom an incarnation writes: one engine may serve several, which answer by themselves."""

    CLIENT = "client"
    COPIER = "copier"


class Writer(NamedTuple):
    """Who may write in a segment. `local` numbers those in the node's own process."""

    name: str
    role: Role
    local: int = 0


class Question(NamedTuple):
    """One writer is to be asked about one segment."""

    writer: Writer
    segment: int
    number: int


class News(NamedTuple):
    """What one master is to be told of a segment: who is still silent."""

    shard: int
    segment: int
    number: int
    waiting: tuple[str, ...]


@dataclass(slots=True, kw_only=True)
class _Open:
    number: int
    waiting: dict[Writer, None]
    until_s: float
    shards: set[int]
    told: dict[int, tuple[str, ...]] = field(default_factory=dict)
    rounds: int = 0

    def names(self) -> tuple[str, ...]:
        return tuple(sorted({writer.name for writer in self.waiting}))


class RestQuestions:
    """Thread-safe.

    Args:
        put_s: How long a put may take; then a master does not wait any more.
    """

    def __init__(self, put_s: float) -> None:
        self._put_s = put_s
        self._lock = threading.Lock()
        self._last = 0
        self._open: dict[int, _Open] = {}  # by segment
        self._anew_until_s: float | None = None

    def renew(self, now: float) -> None:
        """Another master than before leads a shard: who gets access now is to know of it."""
        self._anew_until_s = now + self._put_s

    def is_anew(self, now: float) -> bool:
        """Tell whether places that an earlier master gave may still be about."""
        return self._anew_until_s is not None and now < self._anew_until_s

    def registered(self, shard: int, writers: Mapping[int, Collection[Writer]], now: float) -> None:
        """One shard's master was told of segments: by number, who had access to them."""
        with self._lock:
            for segment, theirs in writers.items():
                self._last += 1
                earlier = self._open.get(segment)
                shards = {shard} if earlier is None else {shard, *earlier.shards}
                self._open[segment] = _Open(
                    number=self._last,
                    waiting=dict.fromkeys(theirs),
                    until_s=now + self._put_s,
                    shards=shards,
                )

    def at_rest(self, writer: Writer, segment: int, number: int) -> bool:
        """A writer answered; return whether there is news now."""
        with self._lock:
            question = self._open.get(segment)
            if question is None or question.number != number:
                return False
            question.waiting.pop(writer, None)
            return not question.waiting

    def gone(self, writer: Writer, segments: Collection[int]) -> bool:
        """A writer writes nothing there any more, for certain; return whether there is news."""
        with self._lock:
            theirs = [q for s, q in self._open.items() if s in segments and writer in q.waiting]
            for question in theirs:
                del question.waiting[writer]
            return any(not question.waiting for question in theirs)

    def due(self, now: float) -> list[Question]:
        """Return whom to ask, once more if they were asked before; begins a round."""
        with self._lock:
            self._open = {s: q for s, q in self._open.items() if q.until_s > now}
            asked = []
            for segment, question in self._open.items():
                question.rounds += 1
                asked += [Question(writer, segment, question.number) for writer in question.waiting]
            return asked

    def news(self) -> list[News]:
        """Return what masters do not know yet."""
        with self._lock:
            found = []
            for segment, question in self._open.items():
                names = question.names()
                if names and question.rounds < PATIENCE:
                    continue
                found += [
                    News(shard, segment, question.number, names)
                    for shard in sorted(question.shards)
                    if question.told.get(shard) != names
                ]
            return found

    def told(self, news: News) -> None:
        """A master knows; the last that had to ends the question."""
        with self._lock:
            question = self._open.get(news.segment)
            if question is None or question.number != news.number:
                return
            if news.waiting:
                question.told[news.shard] = news.waiting
                return
            question.shards.discard(news.shard)
            if not question.shards:
                del self._open[news.segment]
