"""Access to our storages by peers: what `asking` asks for is served here."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

from transfer.backends.cuda_ipc import place_of
from transfer.backends.cuda_memory import CudaMemory
from transfer.errors import DeviceUnavailable, ProtocolViolation, TransferError, TransferTimeout
from transfer.immediates import ImmediateBoard
from transfer.memory.region import Access, Bytes, Offer, OfferTable, RegionKey
from transfer.peer import PeerLink
from transfer.pieces import Pieces, out_of_bounds
from transfer.storage.batch_queue import BatchQueue
from transfer.storage.bounce import Bounces, PeerMoves
from transfer.storage.messages import (
    ASK_BYTES_MAX,
    REASON_MAX,
    Answer,
    AnswerKind,
    Ask,
    AskKind,
    encode,
    parse_ask,
)
from transfer.storage.served_ask import ServedAsk
from transfer.storage.storage import StorageRegion
from transfer.wire import ControlKind, encode_control


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
