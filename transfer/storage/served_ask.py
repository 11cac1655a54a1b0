"""One ask of a peer, moved between our storage and the peer's buffer."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from transfer.errors import RegionUnknown, StorageFailed, TransferError
from transfer.memory.region import Bytes, Offer, RegionKey
from transfer.pieces import Ints, Pieces, packed
from transfer.storage.bounce import BUFFER_BYTES, PeerEnd, StorageEnd
from transfer.storage.messages import Ask, AskKind
from transfer.storage.storage import Done, StorageRegion, Waiter

if TYPE_CHECKING:
    from transfer.storage.service import StorageService


class ServedAsk:
    """Work of a `BatchQueue`, of one step.

    Files move straight from and to a buffer that is mapped here; then nobody waits for the disk,
    and its thread answers. All else waits in a thread of the queue.

    Args:
        service: whose ask it is.
        peer: who asks.
        ask: for what.
        offer: the window.
        key: of the peer's buffer.
        pieces: between the window and the buffer, in the direction of the ask; checked.
        end: answers. Called exactly once, by whoever ends it.
    """

    def __init__(
        self,
        service: StorageService,
        peer: str,
        ask: Ask,
        offer: Offer,
        key: RegionKey,
        pieces: Pieces,
        end: Done,
    ) -> None:
        assert isinstance(offer.region, StorageRegion)
        self._service = service
        self._peer = peer
        self._kind = ask.kind
        self._token = ask.token
        self._offer = offer
        self._storage = offer.region.storage
        self._key = key
        self._pieces = pieces
        self._end = end
        self._lock = threading.Lock()
        self._ended = False
        self._handed_over = False
        self.deadline = time.monotonic() + ask.timeout_s
        service.begin_use(self._token)

    def __len__(self) -> int:
        return 1

    def weigh(self, index: int) -> int:
        """Bytes of it."""
        return self._pieces.nbytes

    def begin(self) -> bool:
        """Start it in this thread if that takes no waiting: the read of a file.

        Raises:
            TransferError: its queue is full, or it is closed. Nothing was begun.
        """
        if self._kind is not AskKind.READ or self._storage.kind != "file":
            return False
        buffer = self._service.mapped_buffer(self._peer, self._key)
        if buffer is None:
            return False
        self._read(buffer, wait=False)
        return True

    def perform(self, index: int, lane: int) -> None:
        """Move the pieces, or have the storage do so."""
        if self._storage.kind == "file":
            buffer = self._service.map_buffer(self._peer, self._key, self.deadline)
            if buffer is not None:
                move = self._read if self._kind is AskKind.READ else self._write
                move(buffer)
                self._handed_over = True
                return
        self._by_bounce(lane)

    def drop(self) -> None:
        """End it without an answer of its own."""
        with self._lock:
            self._ended = True
        self._service.end_use(self._token)

    def performed(self, error: TransferError | None) -> None:
        """The `done` of the queue."""
        if error is not None or not self._handed_over:
            self.end(error)

    def end(self, error: TransferError | None) -> None:
        """Answer, if nobody has."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
        self._service.end_use(self._token)
        self._end(error)

    def _read(self, buffer: Bytes, *, wait: bool = True) -> None:
        base, pieces = self._offer.offset, self._pieces
        from_window = Pieces(pieces.source_offsets + base, pieces.target_offsets, pieces.lengths)
        self._storage.fetch(buffer, from_window, self.deadline, self.end, wait=wait)

    def _write(self, buffer: Bytes) -> None:
        self._check_live()
        base, pieces = self._offer.offset, self._pieces
        to_window = Pieces(pieces.source_offsets, pieces.target_offsets + base, pieces.lengths)
        self._storage.store(buffer, to_window, self.deadline, self.end)

    def _by_bounce(self, lane: int) -> None:
        theirs = PeerEnd(self._service.moves, self._peer, self._key, None)
        source, target, lengths = (
            self._pieces.source_offsets,
            self._pieces.target_offsets,
            self._pieces.lengths,
        )
        if self._pieces.nbytes > BUFFER_BYTES:
            reason = (
                f"{self._pieces.nbytes} bytes at once, and the requester's memory is not mapped"
            )
            raise StorageFailed(self._storage.kind, self._kind.name.lower(), reason)
        with self._service.bounces.borrow(lane) as bounce:
            if self._kind is AskKind.READ:
                own = StorageEnd(self._storage, self._offer.offset)
                own.fill(bounce, source, lengths, self.deadline)
                theirs.drain(bounce, target, lengths, self.deadline)
            else:
                theirs.fill(bounce, source, lengths, self.deadline)
                self._store(bounce.region.array, target, lengths)

    def _store(self, source: Bytes, offsets: Ints, lengths: Ints) -> None:
        """Store packed pieces, and wait; the key is in use for as long as the storage is at it."""
        waiter = Waiter(self._storage.kind, "write", self.deadline)

        def done(error: TransferError | None) -> None:
            self._service.end_use(self._token)
            waiter.end(error)

        self._service.begin_use(self._token)
        try:
            self._check_live()
            to_window = Pieces(packed(lengths), offsets + self._offer.offset, lengths)
            self._storage.store(source, to_window, self.deadline, done)
        except TransferError:
            self._service.end_use(self._token)  # nothing was begun
            raise
        waiter.wait()

    def _check_live(self) -> None:
        if not self._offer.live:
            raise RegionUnknown(self._peer, "withdrawn meanwhile")
