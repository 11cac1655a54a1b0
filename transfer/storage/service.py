"""Access to storages of peers: asking for it, and serving those who ask.

Only its owner can move the bytes of a storage. So the requester offers a buffer and asks; the
owner moves one buffer full between its storage and the requester's buffer with its own one-sided
operations, and answers. One round trip of control frames per buffer.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from transfer.backends.cuda_ipc import place_of
from transfer.backends.cuda_memory import CudaMemory
from transfer.errors import (
    AccessRefused,
    DeviceUnavailable,
    PeerLost,
    ProtocolViolation,
    RegionUnknown,
    StorageFailed,
    TransferError,
    TransferTimeout,
)
from transfer.immediates import ImmediateBoard
from transfer.memory.region import Access, Bytes, Offer, OfferTable, RegionKey
from transfer.peer import PeerLink, PeerTable
from transfer.pieces import Ints, Pieces, out_of_bounds
from transfer.storage.batch_queue import BatchQueue
from transfer.storage.bounce import Bounce, Bounces, PeerMoves
from transfer.storage.messages import (
    ASK_BYTES_MAX,
    REASON_MAX,
    Answer,
    AnswerKind,
    Ask,
    AskKind,
    encode,
    parse_answer,
    parse_ask,
)
from transfer.storage.served_ask import ServedAsk
from transfer.storage.storage import StorageRegion
from transfer.wire import ControlKind, encode_control

# How often a waiting requester looks whether the peer is still there.
LOOK_S: Final = 0.1
BUSY_PAUSE_S: Final = 0.005
NONE: Final = np.zeros(0, dtype=np.int64)


@dataclass(slots=True)
class _Asked:
    peer: str
    answered: threading.Event = field(default_factory=threading.Event)
    answer: Answer | None = None


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
            message = Ask(
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
            answer = self._exchange(target.owner, message, deadline)
            if answer is not None and answer.kind is not AnswerKind.BUSY:
                _raise_refusal(target.owner, kind, answer)
                return answer.content
            if time.monotonic() + BUSY_PAUSE_S > deadline:
                raise TransferTimeout(
                    target.owner, kind.name.lower(), elapsed_s=time.monotonic() - started
                )
            time.sleep(BUSY_PAUSE_S)

    def on_answer(self, peer: str, content: bytes) -> None:
        """Take an answer. On the engine's thread.

        Raises:
            ProtocolViolation: the bytes are none.
        """
        answer = parse_answer(content)
        asked = self._open.get(answer.id)
        # An answer nobody waits for any more is late, not wrong.
        if asked is not None and asked.peer == peer:
            asked.answer = answer
            asked.answered.set()

    def _exchange(self, peer: str, message: Ask, deadline: float) -> Answer | None:
        link = self._table.ready(peer)
        asked = self._open[message.id] = _Asked(peer)
        try:
            frame = encode_control(ControlKind.STORAGE_ASK, encode(message))
            if not link.control.send(frame, deadline=deadline):
                self._table.ready(peer)
                return None
            while (remaining := deadline - time.monotonic()) > 0:
                if asked.answered.wait(min(LOOK_S, remaining)):
                    break
                if not link.alive:
                    raise PeerLost(peer, link.evidence or "lost while it was asked")
            return asked.answer
        finally:
            del self._open[message.id]


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


class UnstagedWrite:
    """Writes of host memory that the owner of a storage can map: it takes the bytes from there.

    Work of a `BatchQueue`.

    Args:
        asking: asks the owner.
        target: of its window.
        source: opens our memory to the owner.
        steps: what is asked for at a time.
        deadline: of all.
    """

    def __init__(
        self,
        asking: Asking,
        target: RegionKey,
        source: RegionKey,
        steps: list[Pieces],
        deadline: float,
    ) -> None:
        self._asking = asking
        self._target = target
        self._source = source
        self._steps = steps
        self._deadline = deadline

    def __len__(self) -> int:
        return len(self._steps)

    def weigh(self, index: int) -> int:
        """Bytes of a step."""
        return self._steps[index].nbytes

    def perform(self, index: int, lane: int) -> None:
        """Ask, and wait for the answer."""
        step = self._steps[index]
        self._asking.ask(
            AskKind.WRITE,
            self._target,
            self._deadline,
            buffer=self._source,
            offsets=step.target_offsets,
            lengths=step.lengths,
            places=step.source_offsets,
        )


class StorageService:
    """The owner's side. Thread-safe.

    Args:
        offers: what peers may ask for.
        board: counts the immediates of signals.
        moves: one-sided operations on the requesters' buffers.
        bounces: own buffers, for requesters whose buffers are not mapped here.
        queue: whose threads move the bytes; started by the first ask.
        mapped_buffer: (peer, key) -> a requester's buffer as memory of this process, None if it is
            not mapped.
        map_buffer: (peer, key, deadline) -> the same, mapped now if it was not; None where it
            cannot be. Waits for the requester.
    """

    def __init__(
        self,
        offers: OfferTable,
        board: ImmediateBoard,
        moves: PeerMoves,
        bounces: Bounces,
        queue: Callable[[], BatchQueue],
        mapped_buffer: Callable[[str, RegionKey], Bytes | None],
        map_buffer: Callable[[str, RegionKey, float], Bytes | None],
    ) -> None:
        self.moves = moves
        self.mapped_buffer = mapped_buffer
        self.map_buffer = map_buffer
        self.bounces = bounces
        self._offers = offers
        self._board = board
        self._queue = queue
        self._changed = threading.Condition()
        self._used: Counter[bytes] = Counter()

    def on_ask(self, link: PeerLink, content: bytes) -> None:
        """Serve an ask, or refuse it. On the engine's thread; never waits.

        Raises:
            ProtocolViolation: the bytes are none.
        """
        if link.control.full:
            raise ProtocolViolation("storage ask: the answers to those before are not read")
        ask = parse_ask(content)
        offer = self._offers.find(ask.token, to=link.name)
        if offer is None or not isinstance(offer.region, StorageRegion):
            self._answer(link, ask, AnswerKind.UNKNOWN)
            return
        needed = Access.READ if ask.kind is AskKind.READ else Access.WRITE
        if needed not in offer.access:
            self._answer(link, ask, AnswerKind.NO_RIGHT)
        elif ask.kind is AskKind.PLACE:
            self._tell_place(link, ask, offer)
        elif ask.kind is AskKind.SIGNAL:
            self._board.count(link.name, [ask.immediate])
            self._answer(link, ask, AnswerKind.DONE)
        else:
            self._serve(link, ask, offer)

    def begin_use(self, token: bytes) -> None:
        """Note that a key is being used, until `end_use`."""
        with self._changed:
            self._used[token] += 1

    def end_use(self, token: bytes) -> None:
        """Note that it is used once less."""
        with self._changed:
            self._used[token] -= 1
            if not self._used[token]:
                del self._used[token]
            self._changed.notify_all()

    def quiesce(self, token: bytes, timeout_s: float) -> bool:
        """Wait until nothing that was begun under a withdrawn key is under way any more."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._used[token], timeout_s)

    def _tell_place(self, link: PeerLink, ask: Ask, offer: Offer) -> None:
        """Who knows the place can read and write it, so only who may do both is told."""
        assert isinstance(offer.region, StorageRegion)
        storage = offer.region.storage
        if offer.access != Access.READ | Access.WRITE or not isinstance(storage, CudaMemory):
            self._answer(link, ask, AnswerKind.NO_RIGHT)
            return
        try:
            content = place_of(storage, offer.offset).encode()
        except DeviceUnavailable as error:
            self._answer(link, ask, AnswerKind.FAILED, str(error))
            return
        self._answer(link, ask, AnswerKind.DONE, content=content)

    def _serve(self, link: PeerLink, ask: Ask, offer: Offer) -> None:
        offsets, lengths = ask.pieces(ASK_BYTES_MAX)
        places, key = ask.buffer_places(lengths), ask.buffer_key(link.name)
        inside = out_of_bounds(offsets, lengths, offer.nbytes) is None
        if not inside or out_of_bounds(places, lengths, key.nbytes) is not None:
            self._answer(link, ask, AnswerKind.OUT_OF_BOUNDS)
            return

        def end(error: TransferError | None) -> None:
            kind = AnswerKind.DONE if error is None else AnswerKind.FAILED
            self._answer(link, ask, kind, "" if error is None else str(error))

        ends = (offsets, places) if ask.kind is AskKind.READ else (places, offsets)
        work = ServedAsk(self, link.name, ask, offer, key, Pieces(*ends, lengths), end)
        try:
            if not work.begin():
                operation = ask.kind.name.lower()
                self._queue().submit(work, operation, work.deadline, work.performed, wait=False)
        except TransferTimeout:
            work.drop()
            self._answer(link, ask, AnswerKind.BUSY)
        except TransferError as error:
            work.end(error)

    def _answer(
        self,
        link: PeerLink,
        ask: Ask,
        kind: AnswerKind,
        reason: str = "",
        *,
        content: bytes = b"",
    ) -> None:
        answer = Answer(ask.id, kind, reason[:REASON_MAX], content)
        link.control.send(encode_control(ControlKind.STORAGE_ANSWER, encode(answer)))


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
