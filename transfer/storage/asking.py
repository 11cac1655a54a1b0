"""Access to storages of peers: asking for it.

Only its owner can move the bytes of a storage. So the requester offers a buffer and asks; the
owner moves one buffer full between its storage and the requester's buffer with its own one-sided
operations, and answers. One round trip of control frames per buffer.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from transfer.errors import (
    AccessRefused,
    EngineClosed,
    PeerLost,
    RegionUnknown,
    StorageFailed,
    TransferError,
    TransferTimeout,
)
from transfer.memory.region import RegionKey
from transfer.peer import PeerLink, PeerTable
from transfer.pieces import Ints, Pieces
from transfer.storage.bounce import Bounce
from transfer.storage.messages import Answer, AnswerKind, Ask, AskKind, encode, parse_answer
from transfer.wire import ControlKind, encode_control

# How often a waiting requester looks whether the peer is still there.
LOOK_S: Final = 0.1
BUSY_PAUSE_S: Final = 0.005
NONE: Final = np.zeros(0, dtype=np.int64)


@dataclass(slots=True)
class _Asked:
    """What is not answered. `then`: what to do with the answer, where nobody waits for it."""

    peer: str
    link: PeerLink | None = None
    answered: threading.Event = field(default_factory=threading.Event)
    answer: Answer | None = None
    then: Callable[[Answer | TransferError], None] | None = None
    deadline: float = math.inf


@dataclass(frozen=True, slots=True)
class ReadAsked:
    """What was asked for and not waited for yet. One of the two is called, once.

    Attributes:
        wait: for the end. Raises as `Asking.ask`.
        forget: do not wait; the owner may still fill the buffer.
    """

    wait: Callable[[], None]
    forget: Callable[[], object]


class Asking:
    """The requester's side. Thread-safe."""

    def __init__(self, table: PeerTable) -> None:
        self._table = table
        self._ids = itertools.count(1)
        self._open: dict[int, _Asked] = {}

    def ask(
        self,
        kind: AskKind,
        target: RegionKey,
        deadline: float,
        *,
        buffer: RegionKey | None = None,
        offsets: Ints = NONE,
        lengths: Ints = NONE,
        places: Ints = NONE,
        immediate: int = 0,
    ) -> bytes:
        """Ask the owner of `target`, and wait for the answer. Not on the engine's thread.

        Returns:
            The content of the answer.

        Raises:
            AccessRefused, RegionUnknown: the owner refuses.
            StorageFailed: its storage failed.
            PeerLost, PeerUnknown: it is gone; what was asked may have been done.
            TransferTimeout: no answer in time; it may still be done.
        """
        started = time.monotonic()
        while True:
            message = self._ask_of(
                kind,
                target,
                deadline,
                buffer=buffer,
                offsets=offsets,
                lengths=lengths,
                places=places,
                immediate=immediate,
            )
            answer = self._exchange(target.owner, message, deadline)
            if answer is not None and answer.kind is not AnswerKind.BUSY:
                _raise_refusal(target.owner, kind, answer)
                return answer.content
            if time.monotonic() + BUSY_PAUSE_S > deadline:
                raise TransferTimeout(
                    target.owner, kind.name.lower(), elapsed_s=time.monotonic() - started
                )
            time.sleep(BUSY_PAUSE_S)

    def begin_read(
        self, source: RegionKey, buffer: RegionKey, offsets: Ints, lengths: Ints, deadline: float
    ) -> ReadAsked:
        """Ask the owner of `source` to fill our buffer with pieces, packed; do not wait for it.

        Raises:
            PeerLost, PeerUnknown: it is gone.
        """
        message = self._ask_of(
            AskKind.READ,
            source,
            deadline,
            buffer=buffer,
            offsets=offsets,
            lengths=lengths,
            places=NONE,
        )
        asked = self._send(source.owner, message, deadline)

        def wait() -> None:
            answer = self._answer_to(message.id, asked, deadline)
            if answer is not None and answer.kind is not AnswerKind.BUSY:
                _raise_refusal(source.owner, AskKind.READ, answer)
                return
            self.ask(
                AskKind.READ, source, deadline, buffer=buffer, offsets=offsets, lengths=lengths
            )

        return ReadAsked(wait, lambda: self._open.pop(message.id, None))

    def ask_to_write(
        self,
        target: RegionKey,
        source: RegionKey,
        pieces: Pieces,
        deadline: float,
        then: Callable[[TransferError | None, bool], None],
    ) -> bool:
        """Ask the owner of `target` to take pieces of our memory. Never waits.

        Args:
            target: its window.
            source: opens our memory to it.
            pieces: from the one to the other.
            deadline: `time.monotonic` after which nobody is told of the answer.
            then: called once, on the engine's thread: how it ended, and whether the owner was
                busy; then nothing was done.

        Returns:
            False if the peer is behind with its frames: nothing was asked, nobody is called.

        Raises:
            PeerLost, PeerUnknown: it is gone.
        """
        link = self._table.ready(target.owner)
        if link.control.full:
            return False
        message = self._ask_of(
            AskKind.WRITE,
            target,
            deadline,
            buffer=source,
            offsets=pieces.target_offsets,
            lengths=pieces.lengths,
            places=pieces.source_offsets,
        )

        def end(answer: Answer | TransferError) -> None:
            if isinstance(answer, TransferError):
                then(answer, False)
                return
            try:
                _raise_refusal(target.owner, AskKind.WRITE, answer)
            except TransferError as error:
                then(error, answer.kind is AnswerKind.BUSY)
            else:
                then(None, False)

        self._open[message.id] = _Asked(target.owner, then=end, deadline=deadline)
        sent = link.control.send(encode_control(ControlKind.STORAGE_ASK, encode(message)))
        # Lost meanwhile: then it may have been told already.
        return sent or self._open.pop(message.id, None) is None

    def _ask_of(
        self,
        kind: AskKind,
        target: RegionKey,
        deadline: float,
        *,
        buffer: RegionKey | None,
        offsets: Ints,
        lengths: Ints,
        places: Ints,
        immediate: int = 0,
    ) -> Ask:
        """Return the message, under a number of its own, with the time that is left now."""
        return Ask(
            next(self._ids),
            kind,
            target.token,
            b"" if buffer is None else buffer.encode(),
            offsets.astype("<i8").tobytes(),
            lengths.astype("<i8").tobytes(),
            immediate,
            max(deadline - time.monotonic(), 0.0),
            places.astype("<i8").tobytes(),
        )

    def on_answer(self, peer: str, content: bytes) -> None:
        """Take an answer. On the engine's thread.

        Raises:
            ProtocolViolation: the bytes are none.
        """
        answer = parse_answer(content)
        asked = self._open.get(answer.id)
        # An answer nobody waits for any more is late, not wrong.
        if asked is None or asked.peer != peer:
            return
        if asked.then is not None:
            self._tell(answer.id, answer)
        else:
            asked.answer = answer
            asked.answered.set()

    def forget(self, peer: str, error: TransferError) -> None:
        """Tell those who do not wait that a peer is lost; the others look themselves."""
        for number, asked in list(self._open.items()):
            if asked.peer == peer:
                self._tell(number, error)

    def expire(self, now: float) -> None:
        """Tell those who do not wait that it is too late. At every tick."""
        for number, asked in list(self._open.items()):
            if asked.deadline <= now:
                self._tell(number, TransferTimeout(asked.peer, "write"))

    def close(self) -> None:
        """Tell those who do not wait that there is no engine any more."""
        for number in list(self._open):
            self._tell(number, EngineClosed("the transfer engine was closed"))

    def _tell(self, number: int, how: Answer | TransferError) -> None:
        """Tell whoever does not wait, if nobody has; whoever waits is left alone."""
        asked = self._open.get(number)
        if asked is None or asked.then is None:
            return
        if self._open.pop(number, None) is not None:
            asked.then(how)

    def _exchange(self, peer: str, message: Ask, deadline: float) -> Answer | None:
        return self._answer_to(message.id, self._send(peer, message, deadline), deadline)

    def _send(self, peer: str, message: Ask, deadline: float) -> _Asked | None:
        """Send an ask; None if there was no room for it until the deadline."""
        link = self._table.ready(peer)
        asked = self._open[message.id] = _Asked(peer, link=link)
        sent = False
        try:
            frame = encode_control(ControlKind.STORAGE_ASK, encode(message))
            sent = link.control.send(frame, deadline=deadline)
            if not sent:
                self._table.ready(peer)
        finally:
            if not sent:
                del self._open[message.id]
        return asked if sent else None

    def _answer_to(self, number: int, asked: _Asked | None, deadline: float) -> Answer | None:
        """Wait for the answer to what was sent; None if none came in time."""
        if asked is None or asked.link is None:
            return None
        try:
            while (remaining := deadline - time.monotonic()) > 0:
                if asked.answered.wait(min(LOOK_S, remaining)):
                    break
                if not asked.link.alive:
                    evidence = asked.link.evidence or "lost while it was asked"
                    raise PeerLost(asked.peer, evidence)
            return asked.answer
        finally:
            del self._open[number]


class PeerStorageEnd:
    """A peer's window of a storage; an end of a staged transfer."""

    def __init__(self, asking: Asking, key: RegionKey) -> None:
        self._asking = asking
        self._key = key

    def fill(self, bounce: Bounce, offsets: Ints, lengths: Ints, deadline: float) -> None:
        """Let the owner write into our buffer."""
        self._ask(AskKind.READ, bounce, offsets, lengths, deadline)

    def drain(self, bounce: Bounce, offsets: Ints, lengths: Ints, deadline: float) -> None:
        """Let the owner read our buffer."""
        self._ask(AskKind.WRITE, bounce, offsets, lengths, deadline)

    def _ask(
        self, kind: AskKind, bounce: Bounce, offsets: Ints, lengths: Ints, deadline: float
    ) -> None:
        self._asking.ask(
            kind, self._key, deadline, buffer=bounce.key, offsets=offsets, lengths=lengths
        )


def _raise_refusal(peer: str, kind: AskKind, answer: Answer) -> None:
    if answer.kind is AnswerKind.DONE:
        return
    if answer.kind is AnswerKind.UNKNOWN:
        raise RegionUnknown(peer, "the key was withdrawn, or never offered to us")
    if answer.kind is AnswerKind.NO_RIGHT:
        raise AccessRefused(peer, f"the key does not give the right to {kind.name}")
    if answer.kind is AnswerKind.OUT_OF_BOUNDS:
        raise AccessRefused(peer, "a piece is outside of the window")
    raise StorageFailed(f"storage of {peer}", kind.name.lower(), answer.reason)
