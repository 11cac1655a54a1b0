"""A store node: lends one segment of this process's memory to the pool.

    client                         node                            master
      │ AskSegment ──────────────▶ │                                  │
      │ ◀───────── OfferSegment    │ Register(capacity, held) ──────▶ │
      │ == one-sided write/read ═▶ │ Heartbeat ─────────────────────▶ │
      │ Written ─────────────────▶ │ ◀── Known(False): register again │

Bytes come and go without the node's doing. It answers who wants a key to its memory, tells the
master that it lives, and remembers what was written, so that a new master can be told.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

import msgspec

from kvstore.errors import StoreClosed
from kvstore.node.node_index import NodeIndex
from kvstore.node.registration import Registration
from kvstore.wire import messages as m
from kvstore.wire.peer_messages import (
    TO_NODE,
    AskSegment,
    OfferSegment,
    decode_to_node,
    encode_to_client,
)
from transfer import Access, Memory, TransferError, allocate

if TYPE_CHECKING:
    from configs.schema import KVStoreConfig
    from transfer import Region, RegionKey, TransferEngine

logger = logging.getLogger(__name__)


class StoreNode:
    """One process's part of the pool's memory.

    The owner of the engine chains `on_notify` into its own callback. All methods are thread-safe.

    Args:
        engine: Open, or opened before `open`.
        master_address: From `MasterServer.address`.
        config: The store's knobs.
        secret: The cluster secret.
    """

    def __init__(
        self,
        engine: TransferEngine,
        master_address: str,
        config: KVStoreConfig,
        *,
        secret: bytes,
    ) -> None:
        self._engine = engine
        self._config = config
        self._registration = Registration(engine, master_address, config, secret=secret)
        self._memory: Memory | None = None
        self._region: Region | None = None
        self._index = NodeIndex(config.segment_bytes)
        self._index_lock = threading.Lock()
        self._offers: dict[str, RegionKey] = {}
        self._offer_lock = threading.Lock()
        self._closing = False
        self._untouched = True

    @property
    def name(self) -> str:
        """The node's incarnation, its engine's name."""
        return self._engine.name

    def open(self) -> None:
        """Lend the memory. Registration goes on in the background; see `wait_registered`."""
        self._memory = allocate(self._config.segment_bytes)
        self._region = self._engine.register(self._memory)
        self._registration.open([self])

    def close(self) -> None:
        """Take the memory back from the pool; what only it held is gone. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self._registration.close()
        if self._region is not None and self._memory is not None:
            self._engine.release(self._region)
            self._memory.close()

    def __enter__(self) -> StoreNode:
        self.open()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def wait_registered(self, timeout_s: float) -> bool:
        """Wait until the master knows this node; False at the deadline."""
        return self._registration.wait(timeout_s)

    def use_master(self, address: str) -> None:
        """Register with another master from now on."""
        self._registration.use_master(address)

    def on_notify(self, peer: str, payload: bytes) -> bool:
        """Take a note if it is for a store node.

        Short enough for the engine's thread.

        Returns:
            True if the note was for us; the engine's owner then looks no further.
        """
        if not payload.startswith(TO_NODE):
            return False
        try:
            note = decode_to_node(payload)
        except msgspec.MsgspecError as error:
            logger.warning("malformed note from %s: %s", peer, error)
            return True
        if isinstance(note, AskSegment):
            self._answer(peer, note.ask_id)
        else:
            with self._index_lock:
                self._index.record(note.held)
        return True

    def offer_to(self, name: str) -> RegionKey:
        """Return a fresh key to the segment for one client; its earlier one is withdrawn."""
        if self._region is None:
            raise StoreClosed(what="StoreNode", problem="not open")
        with self._offer_lock:
            self._untouched = False
            earlier = self._offers.pop(name, None)
            if earlier is not None:
                self._engine.withdraw(earlier)
            key = self._engine.offer(self._region, to=name, access=Access.READ | Access.WRITE)
            self._offers[name] = key
            return key

    # -- what registration asks for -------------------------------------------------------------

    @property
    def number(self) -> int:
        """The only segment's number."""
        return 0

    @property
    def medium(self) -> m.Medium:
        """What the segment lies in."""
        return m.Medium.DRAM

    @property
    def nbytes(self) -> int:
        """The segment's size."""
        return self._config.segment_bytes

    @property
    def untouched(self) -> bool:
        """Whether nobody was ever given access to the segment."""
        return self._untouched

    def held(self) -> m.HeldBlocks:
        """Return what lies in the segment, verified."""
        if self._region is None:
            raise StoreClosed(what="StoreNode", problem="not open")
        with self._index_lock:
            return self._index.verified(self._region.tensor.numpy())

    def _answer(self, peer: str, ask_id: int) -> None:
        try:
            key = self.offer_to(peer)
            offer = OfferSegment(ask_id=ask_id, region_key=key.encode())
            self._engine.notify(peer, encode_to_client(offer))
        except (TransferError, StoreClosed) as error:
            logger.info("no segment for %s: %s", peer, error)
