"""The holder's side of `elastic.peer_experts`: its slabs are offered to peers that ask."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterable

import xxhash

from elastic.errors import RecordInvalid
from elastic.expert_messages import PREFIX, Ask, Done, Have, Piece, decode, encode
from elastic.expert_source import Bank, ExpertId, place_of
from transfer import Access, Region, RegionKey, TransferEngine, TransferError

logger = logging.getLogger(__name__)

REQUESTS_MAX = 256
OFFER_LIFETIME_S = 60.0


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
            message = decode(payload)
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
        self._engine.notify(self._engine.peer(peer), encode(have))

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
