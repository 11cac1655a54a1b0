"""A node's standing with the master: registers what it lends, and says that it lives.

    node                                  master
      │ Register(segment 0, held) ──────────▶ │
      │ Register(segment 1, held) ──────────▶ │
      │ Heartbeat ──────────────────────────▶ │   every `heartbeat_s`
      │ ◀────────────────────── Known(False)  │   it forgot, or it is a new one: register again

One thread does all of it; the bytes of the segments come and go meanwhile.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

from kvstore.errors import Fenced, KVStoreError
from kvstore.wire import messages as m
from kvstore.wire.master_link import MasterLink

if TYPE_CHECKING:
    from configs.schema import KVStoreConfig
    from transfer import TransferEngine

logger = logging.getLogger(__name__)

RETRY_S: Final = 0.1


class LentSegment(Protocol):
    """What registration has to know of a segment. All of it is asked for on its own thread."""

    @property
    def number(self) -> int:
        """Its number in the node."""

    @property
    def medium(self) -> m.Medium:
        """What its bytes lie in."""

    @property
    def nbytes(self) -> int:
        """Its size."""

    @property
    def untouched(self) -> bool:
        """Whether nobody was ever given access to it."""

    def held(self) -> m.HeldBlocks:
        """Return what lies in it, as far as it is known and right."""


class Registration:
    """Keeps a node registered. Thread-safe.

    Args:
        engine: The node's; its name is the node's incarnation, and open when `open` is called.
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
        self._link = MasterLink(
            master_address,
            secret=secret,
            identity=f"{engine.name}.node",
            timeout_s=config.request_timeout_s,
        )
        self._segments: Sequence[LentSegment] = ()
        self._closing = False
        self._awake = threading.Event()
        self._registered = threading.Event()
        self._thread = threading.Thread(target=self._run, name="store-node", daemon=True)

    @property
    def link(self) -> MasterLink:
        """The way to the master, for what else the node has to say."""
        return self._link

    def open(self, segments: Sequence[LentSegment]) -> None:
        """Start to register these segments, in the background; see `wait`."""
        self._segments = segments
        self._thread.start()

    def close(self) -> None:
        """Stop, and tell the master that the node leaves. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self._awake.set()
        if self._thread.is_alive():
            self._thread.join()
        try:
            if self._registered.is_set():
                self._link.ask(m.Leave(self._engine.name), m.Done)
        except KVStoreError as error:
            logger.info("store node %s left without saying so: %s", self._engine.name, error)
        self._link.close()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the master knows this node; False at the deadline."""
        return self._registered.wait(timeout_s)

    def use_master(self, address: str) -> None:
        """Register with another master from now on."""
        self._registered.clear()
        self._link.redirect(address)
        self._awake.set()

    def _run(self) -> None:
        while not self._closing and self._beat():
            # Unregistered, it tries again soon: the master may be just starting.
            registered = self._registered.is_set()
            pause_s = self._config.heartbeat_s if registered else RETRY_S
            self._awake.wait(pause_s)
            self._awake.clear()

    def _beat(self) -> bool:
        """Tell the master that we live; False if it wants nothing of us ever again."""
        name = self._engine.name
        try:
            registered = self._registered.is_set()
            if registered and not self._link.ask(m.Heartbeat(name), m.Known).known:
                logger.info("the master does not know store node %s (any more)", name)
                self._registered.clear()
                registered = False
            if not registered:
                for segment in self._segments:
                    self._register(segment)
                self._registered.set()
        except Fenced:
            logger.warning("store node %s is fenced", name)
            return False
        except KVStoreError as error:
            logger.debug("heartbeat of store node %s: %s", name, error)
        return True

    def _register(self, segment: LentSegment) -> None:
        held = segment.held()
        request = m.Register(
            node=self._engine.name,
            address=self._engine.address,
            capacity=segment.nbytes,
            untouched=segment.untouched,
            held=held,
            segment=segment.number,
            medium=segment.medium,
        )
        adopted = self._link.ask(request, m.Registered).adopted
        logger.info(
            "store node %s lends %s bytes of %s; %s of %s blocks known again",
            self._engine.name,
            segment.nbytes,
            segment.medium,
            adopted,
            len(held.keys),
        )
