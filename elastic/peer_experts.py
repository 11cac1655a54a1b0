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
import time
from collections.abc import Callable, Sequence

import numpy as np
import xxhash

from elastic.errors import RecordInvalid
from elastic.expert_messages import PREFIX, Ask, Done, Have, Piece, decode, encode
from elastic.expert_server import Slabs
from elastic.expert_source import Bank, ExpertId, place_of
from transfer import (
    Peer,
    Priority,
    RegionKey,
    Transfer,
    TransferEngine,
    TransferError,
)

logger = logging.getLogger(__name__)


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
            self._engine.notify(self._engine.peer(name), encode(message))
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
            message = decode(payload)
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
