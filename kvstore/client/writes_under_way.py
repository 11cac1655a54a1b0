"""What one writer may still be writing, so that a node can be told when it is at rest.

    begin ── the master is asked for places ──▶ granted(targets) ── bytes move ──▶ end
      │                                                                             │
      └── counted for every segment ───┴─── counted for these segments ─────────────┘

A master that starts knows nothing of the places that the one before it gave out. So each node
asks the writers of its segments: is everything that you began before this question over? What is
granted is counted from before the request for it is sent. Hence at rest means: no place that the
earlier master gave is written any more, and none will be.

Who keeps places for later (see `on_question`) is asked to let go of them first, and once more at
the end: until then a reply of the earlier master may have brought new ones.

    question ─▶ let go ─▶ all begun before has ended ─▶ let go ─▶ all begun before has ended ─▶ tell

Who was never given access to a segment is not asked. Hence what a client began before it gets its
first key to a segment is void if the node says so with the key (`void`).

A write of which nobody knows how it ended is in doubt until the end of the time that the master
gave for it; whoever asks meanwhile gets no answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Final, Self

Target = tuple[str, int]  # node, number of the segment
Tell = Callable[[], None]

QUESTIONS_MAX: Final = 1024


class WriteUnderWay:
    """One request for places and what is written there; a context manager.

    Left by an exception before `granted` it has ended, as nothing is written then; after `granted`
    and without `end` it is in doubt.
    """

    __slots__ = ("_books", "number", "targets", "until_s")

    def __init__(self, books: WritesUnderWay, number: int) -> None:
        self._books = books
        self.number = number
        self.targets: Collection[Target] | None = None  # None: it may be any
        self.until_s = 0.0

    def may_start(self, target: Target) -> bool:
        """Tell whether bytes may go there; to be asked when the key to the segment is known.

        No, if the places are of an earlier master than the one that the node told us of with it.
        """
        return self.number > self._books.void_before(target)

    def granted(self, targets: Collection[Target], *, put_s: float) -> None:
        """From here on it is known where bytes go, and for how long the master expects them."""
        self._books.narrow(self, targets, put_s)

    def end(self, doubtful: Iterable[Target] = ()) -> None:
        """Nothing is under way any more but, for all anybody knows, in these. Idempotent."""
        self._books.end(self, doubtful)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.end(self.targets or ())


@dataclass(slots=True, eq=False, kw_only=True)
class _Question:
    number: int
    target: Target
    tell: Tell
    before: int = 0  # it concerns the writes with smaller numbers
    rounds: int  # how often keepers are still to be asked to let go


class WritesUnderWay:
    """The books of one writer. Thread-safe; never waits.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._last = 0
        self._live: dict[int, WriteUnderWay] = {}  # in the order of their beginnings
        self._doubts: dict[Target, float] = {}  # until when
        self._void: dict[Target, int] = {}  # what has a smaller number may not start there
        self._questions: dict[Target, _Question] = {}
        self._keepers: tuple[Callable[[Target], None], ...] = ()

    def on_question(self, let_go: Callable[[Target], None]) -> None:
        """Name who keeps places for later: it is called when a segment's node asks.

        It must not wait, and no place that it kept in that segment may be taken from it
        afterwards. Who takes one begins first: `begin`, take, `granted`, write, `end`.
        """
        with self._lock:
            self._keepers = (*self._keepers, let_go)

    def begin(self) -> WriteUnderWay:
        """Count a write, before its places are asked for or taken from where they are kept."""
        with self._lock:
            self._last += 1
            write = self._live[self._last] = WriteUnderWay(self, self._last)
        return write

    def narrow(self, write: WriteUnderWay, targets: Collection[Target], put_s: float) -> None:
        """See `WriteUnderWay.granted`."""
        with self._lock:
            write.targets, write.until_s = targets, self._clock() + put_s
            if not self._questions:
                return
        self._answer()

    def end(self, write: WriteUnderWay, doubtful: Iterable[Target] = ()) -> None:
        """See `WriteUnderWay.end`."""
        with self._lock:
            if self._live.pop(write.number, None) is None:
                return
            for target in doubtful:
                self._doubts[target] = max(self._doubts.get(target, 0.0), write.until_s)
            if not self._questions:
                return
        self._answer()

    def when_at_rest(self, target: Target, number: int, tell: Tell) -> None:
        """Call `tell` once what was begun before now in this segment is over; perhaps never.

        Args:
            target: The segment, whose node asks.
            number: Of the question. Asked again under the same number it keeps its place, under
                another it takes that of the earlier one.
            tell: Called without a lock, in this thread or in that of the last writer, at most once
                for each time the question is asked, and not while something is in doubt. Must
                not wait.
        """
        with self._lock:
            known = self._questions.get(target)
            keepers = self._keepers
        if known is None or known.number != number:
            question = _Question(number=number, target=target, tell=tell, rounds=2)
            self._ask(question if keepers else replace(question, rounds=0))
        self._answer()

    def void(self, target: Target) -> None:
        """Let nothing start in this segment that was begun before now; see `may_start`."""
        for let_go in self._keepers:
            let_go(target)
        with self._lock:
            self._last += 1
            self._void[target] = self._last

    def void_before(self, target: Target) -> int:
        """Return the number below which writes may not start in a segment."""
        return self._void.get(target, 0)

    def is_at_rest(self, target: Target) -> bool:
        """Tell whether nothing is under way in a segment now, nor in doubt."""
        with self._lock:
            doubted = self._doubts.get(target, 0.0) > self._clock()
            return not doubted and not self._is_busy(target, self._last + 1)

    def num_live(self) -> int:
        """Count the writes that have not ended."""
        return len(self._live)

    def _ask(self, question: _Question) -> None:
        if question.rounds:
            question.rounds -= 1
            for let_go in self._keepers:
                let_go(question.target)
        with self._lock:
            while len(self._questions) >= QUESTIONS_MAX:
                del self._questions[next(iter(self._questions))]
            self._last += 1
            question.before = self._last
            self._questions[question.target] = question

    def _answer(self) -> None:
        """Tell whoever can be told."""
        while (question := self._take_at_rest()) is not None:
            if question.rounds:
                self._ask(question)
            else:
                question.tell()

    def _take_at_rest(self) -> _Question | None:
        """Take out one question that nothing stands against."""
        with self._lock:
            now = self._clock()
            self._doubts = {target: end_s for target, end_s in self._doubts.items() if end_s > now}
            for target, question in self._questions.items():
                if target not in self._doubts and not self._is_busy(target, question.before):
                    return self._questions.pop(target)
        return None

    def _is_busy(self, target: Target, before: int) -> bool:
        for number, write in self._live.items():
            if number >= before:
                return False
            if write.targets is None or target in write.targets:
                return True
        return False
