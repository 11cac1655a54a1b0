"""Expert weights from peers: who has it is asked by notify, the bytes are read one-sided.

    reader                                   holder
      Ask(request, experts)         ──▶        looks into its bank
      Have(request, keys, pieces)   ◀──        offers the slabs to the reader, read only
      read slab[offset : +bytes]    ◀══        (no code runs at the holder)
      checksum of what was read
      Done(request)                 ──▶        withdraws the keys

A holder may need the memory of an expert that it gave up while somebody reads it. The reader
would get a mixture, so every piece carries the checksum of the expert and is compared with it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np
import xxhash

from elastic.errors import RecordInvalid
from elastic.expert_source import Bank, ExpertId, place_of
from transfer import (
    Access,
    Peer,
    Priority,
    Region,
    RegionKey,
    Transfer,
    TransferEngine,
    TransferError,
)

logger = logging.getLogger(__name__)

PREFIX = b"elastic.expert:"
REQUESTS_MAX = 256
OFFER_LIFETIME_S = 60.0


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """One expert in one of the offered slabs."""

    layer: int
    logical: int
    key_index: int
    offset: int
    nbytes: int
    checksum: int


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Which of these (layer, logical) pairs do you have?"""

    request: int
    experts: tuple[ExpertId, ...]


class Have(msgspec.Struct, frozen=True, tag="have"):
    """These, in slabs that you may read with these keys until you say `Done`."""

    request: int
    keys: tuple[bytes, ...]
    pieces: tuple[Piece, ...]


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The keys of that request are not needed any more."""

    request: int


_Message = Ask | Have | Done
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[_Message] = msgspec.msgpack.Decoder(_Message)


def _encode(message: _Message) -> bytes:
    return PREFIX + _encoder.encode(message)


def _decode(payload: bytes) -> _Message:
    try:
        return _decoder.decode(memoryview(payload)[len(PREFIX) :])
    except msgspec.MsgspecError as error:
        raise RecordInvalid(what="expert message", problem=str(error)) from None


class Slabs:
    """The bank's slabs as regions of the engine, registered when first needed. Thread-safe."""

    def __init__(self, engine: TransferEngine, bank: Bank) -> None:
        self._engine = engine
        self._bank = bank
        self._regions: dict[int, Region] = {}
        self._lock = threading.Lock()

    def region(self, index: int) -> Region:
        """Return the region of `bank.memories()[index]`."""
        with self._lock:
            region = self._regions.get(index)
            if region is None:
                memory = self._bank.memories()[index]
                region = self._regions[index] = self._engine.register(memory.tensor)
            return region

    def close(self) -> None:
        """Release all regions."""
        with self._lock:
            for region in self._regions.values():
                self._engine.release(region)
            self._regions.clear()


class ExpertServer:
    """Answers peers that ask for experts, on a thread of its own. Construct it before `open()`.

    Args:
        engine: The process's engine; not opened yet, because handlers are registered here.
        bank: What is offered. It is only read.
        slabs: Its regions, shared with the `PeerExpertSource` of the process.
    """

    def __init__(self, engine: TransferEngine, bank: Bank, slabs: Slabs) -> None:
        self._engine = engine
        self._bank = bank
        self._slabs = slabs
        self._inbox: queue.Queue[tuple[str, Ask | Done] | None] = queue.Queue(REQUESTS_MAX)
        self._given: dict[tuple[str, int], tuple[float, tuple[RegionKey, ...]]] = {}
        self._checksums: dict[ExpertId, int] = {}
        self._thread: threading.Thread | None = None
        engine.on_notify(self._on_notify)

    def open(self) -> None:
        """Start answering."""
        self._thread = threading.Thread(target=self._run, name="expert-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering and withdraw what is still offered."""
        if self._thread is not None:
            self._inbox.put(None, timeout=5.0)
            self._thread.join(timeout=5.0)
        self._withdraw(tuple(self._given))

    def _on_notify(self, peer: str, payload: bytes) -> None:
        if not payload.startswith(PREFIX):
            return
        try:
            message = _decode(payload)
            if isinstance(message, Ask | Done):
                self._inbox.put_nowait((peer, message))
        except RecordInvalid as error:
            logger.warning("from peer %s: %s", peer, error)
        except queue.Full:
            # The asker waits for a while and then takes the next source.
            logger.warning("request of peer %s dropped: %d wait already", peer, REQUESTS_MAX)

    def _run(self) -> None:
        while (item := self._inbox.get()) is not None:
            peer, message = item
            try:
                if isinstance(message, Done):
                    self._withdraw([(peer, message.request)])
                else:
                    self._answer(peer, message)
                old = time.monotonic() - OFFER_LIFETIME_S
                self._withdraw([at for at, (since, _) in self._given.items() if since < old])
            except TransferError as error:  # that peer is gone; the next one is not
                logger.info("answer to peer %s failed: %s", peer, error)

    def _answer(self, peer: str, ask: Ask) -> None:
        slab_indexes: list[int] = []
        pieces: list[Piece] = []
        for layer, logical in ask.experts:
            found = self._look((layer, logical))
            if found is None:
                continue
            slab, offset, nbytes, checksum = found
            if slab not in slab_indexes:
                slab_indexes.append(slab)
            key_index = slab_indexes.index(slab)
            pieces.append(Piece(layer, logical, key_index, offset, nbytes, checksum))
        regions = [self._slabs.region(index) for index in slab_indexes]
        keys = tuple(self._engine.offer(region, to=peer, access=Access.READ) for region in regions)
        self._given[peer, ask.request] = (time.monotonic(), keys)
        have = Have(ask.request, tuple(key.encode() for key in keys), tuple(pieces))
        self._engine.notify(self._engine.peer(peer), _encode(have))

    def _look(self, expert: ExpertId) -> tuple[int, int, int, int] | None:
        """Return where the expert is, and its checksum; None if it is not, or is just moving."""
        if not self._bank.has(*expert):
            return None
        try:
            place = self._bank.location(*expert)
            checksum = self._checksums.get(expert)
            if checksum is None:
                checksum = xxhash.xxh3_64_intdigest(place_of(self._bank, expert).numpy().data)
            # The rank loop may have taken the place meanwhile; then the sum is of something else.
            if not self._bank.has(*expert) or self._bank.location(*expert) != place:
                return None
        except LookupError:
            return None
        # The weights of an expert never change, so its checksum may be kept.
        self._checksums[expert] = checksum
        return (*place, checksum)

    def _withdraw(self, requests: Iterable[tuple[str, int]]) -> None:
        for request in requests:
            _, keys = self._given.pop(request, (0.0, ()))
            for key in keys:
                self._engine.withdraw(key)


class PeerExpertSource:
    """An `ExpertSource` that reads from peers' banks. Construct it before the engine's `open()`.

    Args:
        engine: The process's engine; not opened yet.
        bank: Where experts go.
        slabs: The bank's regions.
        peers: Names to ask, best first; asked for at every fetch.
        reply_timeout_s: How long a peer may take to answer.
        read_timeout_s: Deadline of the reads from one peer.
    """

    name = "peer"

    def __init__(
        self,
        engine: TransferEngine,
        bank: Bank,
        slabs: Slabs,
        *,
        peers: Callable[[], Sequence[str]],
        reply_timeout_s: float = 1.0,
        read_timeout_s: float = 30.0,
    ) -> None:
        self._engine = engine
        self._bank = bank
        self._slabs = slabs
        self._peers = peers
        self._reply_timeout_s = reply_timeout_s
        self._read_timeout_s = read_timeout_s
        self._request = 0
        self._replies: queue.SimpleQueue[tuple[str, Have | None]] = queue.SimpleQueue()
        engine.on_notify(self._on_notify)
        engine.on_peer_lost(self._on_peer_lost)

    def fetch(self, wanted: Sequence[ExpertId]) -> list[ExpertId]:
        """Ask the peers, then read each expert from one of those that have it.

        What a peer fails to deliver whole is not returned, so the next source is asked for it.
        """
        self._request += 1
        asked = self._ask(Ask(self._request, tuple(wanted)))
        replies = self._collect(asked, set(wanted))
        filled: list[ExpertId] = []
        for name, pieces in _share(replies, set(wanted)).items():
            filled += self._read(name, replies[name], pieces)
        for name in asked:
            self._tell(name, Done(self._request))
        return filled

    def _ask(self, ask: Ask) -> list[str]:
        return [name for name in self._peers() if self._tell(name, ask)]

    def _tell(self, name: str, message: Ask | Done) -> bool:
        try:
            self._engine.notify(self._engine.peer(name), _encode(message))
        except TransferError as error:
            logger.debug("peer %s can't be asked: %s", name, error)
            return False
        return True

    def _collect(self, asked: Sequence[str], wanted: set[ExpertId]) -> dict[str, Have]:
        """Wait for answers until all is found, all have answered, or it takes too long."""
        replies: dict[str, Have] = {}
        waiting, missing = set(asked), set(wanted)
        deadline = time.monotonic() + self._reply_timeout_s
        while waiting and missing:
            try:
                left_s = max(0.0, deadline - time.monotonic())
                name, have = self._replies.get(timeout=left_s)
            except queue.Empty:
                logger.info("peers %s did not say which experts they have", sorted(waiting))
                break
            if have is not None and have.request != self._request:
                continue  # of an earlier fetch that did not wait for it
            waiting.discard(name)
            if have is not None:
                replies[name] = have
                missing -= {(piece.layer, piece.logical) for piece in have.pieces}
        return replies

    def _read(self, name: str, have: Have, pieces: Sequence[Piece]) -> list[ExpertId]:
        try:
            peer = self._engine.peer(name)
            keys = [RegionKey.decode(key) for key in have.keys]
            good = [piece for piece in pieces if self._fits(piece, len(keys))]
            self._read_slabs(peer, keys, good)
        except TransferError as error:
            logger.warning("reading experts from peer %s failed: %s", name, error)
            return []
        return [(piece.layer, piece.logical) for piece in good if self._is_whole(name, piece)]

    def _read_slabs(self, peer: Peer, keys: Sequence[RegionKey], pieces: Sequence[Piece]) -> None:
        """Read the pieces into their places; none is still being written at the return.

        Raises:
            TransferError: Of the first read that failed.
        """
        batches: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        for piece in pieces:
            slab, offset, nbytes = self._bank.location(piece.layer, piece.logical)
            batches.setdefault((slab, piece.key_index), []).append((offset, piece.offset, nbytes))
        transfers: list[Transfer] = []
        failures: list[TransferError] = []
        for (slab, key_index), moves in batches.items():
            target_offsets, source_offsets, lengths = np.array(moves, dtype=np.int64).T.copy()
            try:
                transfer = self._engine.read(
                    peer,
                    self._slabs.region(slab),
                    keys[key_index],
                    target_offsets,
                    source_offsets,
                    lengths,
                    priority=Priority.WEIGHTS,
                    timeout_s=self._read_timeout_s,
                )
            except TransferError as error:
                failures.append(error)
                break
            transfers.append(transfer)
        # All of them, also when one has failed: the next source fills the very same places.
        for transfer in transfers:
            try:
                transfer.wait()
            except TransferError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def _fits(self, piece: Piece, num_keys: int) -> bool:
        nbytes = self._bank.location(piece.layer, piece.logical)[2]
        return piece.nbytes == nbytes and 0 <= piece.key_index < num_keys

    def _is_whole(self, name: str, piece: Piece) -> bool:
        place = place_of(self._bank, (piece.layer, piece.logical))
        whole = xxhash.xxh3_64_intdigest(place.numpy().data) == piece.checksum
        if not whole:
            logger.warning(
                "expert %d of layer %d from peer %s is not what it said: checksum differs",
                piece.logical,
                piece.layer,
                name,
            )
        return whole

    def _on_notify(self, peer: str, payload: bytes) -> None:
        if not payload.startswith(PREFIX):
            return
        try:
            message = _decode(payload)
        except RecordInvalid:
            return  # the server of this process has logged it
        if isinstance(message, Have):
            self._replies.put((peer, message))

    def _on_peer_lost(self, peer: str, evidence: str) -> None:
        del evidence
        self._replies.put((peer, None))


def _share(replies: dict[str, Have], wanted: set[ExpertId]) -> dict[str, list[Piece]]:
    """Choose one holder of each wanted expert, so that all give about the same bytes."""
    holders: dict[ExpertId, list[tuple[str, Piece]]] = {}
    for name, have in replies.items():
        for piece in have.pieces:
            if (piece.layer, piece.logical) in wanted:
                holders.setdefault((piece.layer, piece.logical), []).append((name, piece))
    load = dict.fromkeys(replies, 0)
    shares: dict[str, list[Piece]] = {}
    for options in holders.values():
        name, piece = min(options, key=lambda option: load[option[0]])
        load[name] += piece.nbytes
        shares.setdefault(name, []).append(piece)
    return shares
