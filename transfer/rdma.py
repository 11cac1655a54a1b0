"""RDMA of an engine, where the machine has it: the only door to `transfer.backends.verbs`.

The backend needs pyverbs, which the host provides or not, so it is imported when an engine opens.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from configs.schema import TransferBackend, TransferConfig
from transfer.backends import verbs
from transfer.connections.handshake import Facts
from transfer.errors import DeviceUnavailable, ProtocolViolation, RegistrationFailed
from transfer.event_loop import EventLoop
from transfer.immediates import ImmediateBoard
from transfer.memory.region import OfferTable, Region, RegionKey
from transfer.rails.own_rails import device_choice, why_not
from transfer.rails.pairing import pair_ends, rdma_end
from transfer.rails.preference import RailEnd
from transfer.rails.rail import RailLink, RailName, SliceSink

if TYPE_CHECKING:
    from transfer.backends.verbs.backend import VerbsBackend
    from transfer.backends.verbs.exchange import PeerExchange

logger = logging.getLogger(__name__)

WANTED: Final = (TransferBackend.AUTO, TransferBackend.VERBS)


class RdmaPeer:
    """Everything about RDMA with one peer. On the engine's thread unless said otherwise."""

    def __init__(self, exchange: PeerExchange) -> None:
        self._exchange = exchange
        self.on_message = exchange.on_message
        self.drain = exchange.drain
        self.expire = exchange.expire
        self.withdraw = exchange.withdraw
        self.tell_tried = exchange.tell_tried
        # Device memory that the cards do not reach, here and there.
        self._unreached: weakref.WeakSet[Region] = weakref.WeakSet()
        self._refused: set[bytes] = set()

    def drop_key(self, token: bytes) -> None:
        """Forget a key that the peer has withdrawn."""
        self._exchange.drop_key(token)
        self._refused.discard(token)

    def open_rail(
        self, rail: RailName, sink: SliceSink, done: Callable[[RailLink | None], None]
    ) -> None:
        """Make a link over a rail; the callback gets it, or None."""
        self._exchange.open_rail(rail, sink, done)

    def reaches(self, region: Region, key: RegionKey, deadline: float) -> bool:
        """Whether the cards move bytes of device memory themselves; waits. Any thread.

        Waits for what the caller has queued on the device too, if so.
        """
        from transfer.backends.verbs.device_memory import await_queued_work

        for kind in (region.kind, key.kind):
            if kind != "host" and not kind.startswith("cuda:"):
                return False
        if region in self._unreached or key.token in self._refused:
            return False
        try:
            self.register(region)
        except RegistrationFailed as error:
            logger.info("%s memory goes through buffers: %s", region.kind, error.reason)
            self._unreached.add(region)
            return False
        if not self._exchange.learn(key.token, deadline):
            self._refused.add(key.token)
            return False
        await_queued_work(region)
        return True

    def register(self, region: Region) -> None:
        """Register a region with the cards, if it is not. Any thread.

        Raises:
            RegistrationFailed: it cannot be.
        """
        from transfer.backends.verbs.binding import PyverbsError, error_text

        try:
            self._exchange.register(region)
        except PyverbsError as error:
            raise RegistrationFailed(region.nbytes, error_text(error)) from error


class Rdma:
    """The RDMA devices of one engine.

    Attributes:
        ends: those that are open, as ends of rails; () = none.
        unused: names of the others, each with the reason.
        missing: why there are none; "" if there are.
    """

    def __init__(self, offers: OfferTable, loop: EventLoop, board: ImmediateBoard) -> None:
        self._offers = offers
        self._loop = loop
        self._board = board
        self._backend: VerbsBackend | None = None
        self.ends: tuple[RailEnd, ...] = ()
        self.unused: tuple[tuple[str, str], ...] = ()
        self.missing = "this engine's configuration excludes it"

    def open(self, config: TransferConfig) -> None:
        """Open the devices, if they are wanted. Before the loop starts.

        Raises:
            DeviceUnavailable: RDMA alone is wanted, or a device by name, and it is not there.
        """
        if config.backend not in WANTED:
            return
        if config.tls.enabled:
            self.missing = "TLS is on, and cannot encrypt what RDMA devices move"
            return
        required = config.backend is TransferBackend.VERBS or bool(config.devices)
        self.missing = verbs.unavailable() or self._open(config)
        if self.missing and required:
            raise DeviceUnavailable("rdma", self.missing)

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the devices that are open, in the order of rails; () = none."""
        return tuple(end.name for end in self.ends)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Their addresses, in the same order."""
        return tuple(end.addresses[0] for end in self.ends)

    def _open(self, config: TransferConfig) -> str:
        from transfer.backends.verbs.backend import VerbsBackend
        from transfer.backends.verbs.binding import PyverbsError, error_text

        backend = VerbsBackend(self._offers, self._loop)
        choice = device_choice(config)
        try:
            self.ends = backend.open(config.devices, partial(why_not, choice))
        except (LookupError, OSError) as error:
            return str(error)
        except PyverbsError as error:
            return error_text(error)
        self.unused = tuple(backend.unused)
        if not self.ends:
            found = ", ".join(f"{name} ({reason})" for name, reason in self.unused)
            return f"no RDMA device is up and chosen, of: {found}" if found else "no RDMA device"
        self._backend = backend
        return ""

    def start(self) -> None:
        """Watch the devices. On the engine's thread."""
        if self._backend is not None:
            self._backend.start()

    def connect(
        self,
        name: str,
        theirs: tuple[str, ...],
        *,
        send: Callable[[bytes], None],
        lose: Callable[[str], None],
        on_tried: Callable[[], None],
    ) -> RdmaPeer | None:
        """Make a peer; None where either side has no devices. On the engine's thread.

        Args:
            name: of the peer.
            theirs: the names of its devices.
            send: puts a message on its control connection. Any thread, never waits.
            lose: ends the peer, with the evidence.
            on_tried: told once that it knows how it will reach us.
        """
        if self._backend is None or not theirs:
            return None

        def count(immediates: list[int]) -> None:
            try:
                self._board.count(name, immediates)
            except ProtocolViolation as error:
                problem = error.problem
                self._loop.call(lambda: lose(problem))

        return RdmaPeer(
            self._backend.connect(name, theirs, send=send, count=count, on_tried=on_tried)
        )

    def disconnect(self, peer: RdmaPeer) -> None:
        """Destroy all queue pairs and keys of a peer: it reaches nothing any more."""
        assert self._backend is not None
        self._backend.disconnect(peer._exchange)

    def rails(self, facts: Facts) -> list[RailName]:
        """Return the rails to a peer: by network, then by name, all devices of both in use."""
        addresses = (*facts.verbs_addresses, *[""] * len(facts.verbs))
        theirs = [rdma_end(*pair) for pair in zip(facts.verbs, addresses, strict=False)]
        pairs = pair_ends(self.ends, theirs)
        return [RailName("verbs", self.ends[i].name, theirs[k].name) for i, k in pairs]

    def release(self, region: Region) -> None:
        """Deregister a region. Any thread."""
        if self._backend is not None:
            self._backend.release(region)

    def close(self) -> None:
        """Close the devices. On the engine's thread."""
        if self._backend is not None:
            self._backend.close()

    def discard(self) -> None:
        """Close the devices of an engine that did not come to open."""
        if self._backend is not None:
            self._backend.discard()

    def abandon(self) -> None:
        """Close the descriptors only: the way out after a fork."""
        if self._backend is not None:
            self._backend.abandon()
