"""RDMA as the engine sees it: opened devices, and an exchange for each peer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

from transfer.backends.verbs.device import Device, open_devices
from transfer.backends.verbs.exchange import PeerExchange
from transfer.event_loop import READABLE, EventLoop
from transfer.memory.region import OfferTable, Region
from transfer.rails.pairing import rdma_end
from transfer.rails.preference import RailEnd

logger = logging.getLogger(__name__)

# A forked child must not destroy, by collecting them, what belongs to its parent.
_abandoned: list[object] = []


class VerbsBackend:
    """The RDMA devices of one engine.

    Attributes:
        unused: names of those that are not, each with the reason.
    """

    def __init__(self, offers: OfferTable, loop: EventLoop) -> None:
        self._offers = offers
        self._loop = loop
        self._devices: list[Device] = []
        self.unused: list[tuple[str, str]] = []
        self._peers: dict[str, PeerExchange] = {}

    def open(self, wanted: Sequence[str], unfit: Callable[[str], str]) -> tuple[RailEnd, ...]:
        """Open devices, before the loop starts; see `open_devices`.

        Returns:
            Them as ends of rails; () if none is up.

        Raises:
            PyverbsError, LookupError: a device was named that is not there.
        """
        self._devices, self.unused = open_devices(wanted, unfit)
        return tuple(rdma_end(device.name, device.network) for device in self._devices)

    def start(self) -> None:
        """Watch the devices. On the engine's thread."""
        for device in self._devices:
            self._loop.watch(device, partial(self._on_event, device), READABLE)

    def connect(
        self,
        name: str,
        theirs: tuple[str, ...],
        *,
        send: Callable[[bytes], None],
        count: Callable[[list[int]], None],
        on_tried: Callable[[], None],
    ) -> PeerExchange:
        """Make the exchange of a new peer. On the engine's thread.

        Args:
            name: of the peer.
            theirs: names of its devices.
            send: puts a message on its control connection.
            count: takes its immediates, on the engine's thread.
            on_tried: told once that it knows how it will reach us.
        """
        exchange = PeerExchange(
            name, self._devices, theirs, self._offers, self._loop,
            send=send, count=count, on_tried=on_tried,
        )  # fmt: skip
        self._peers[name] = exchange
        return exchange

    def disconnect(self, exchange: PeerExchange) -> None:
        """Destroy a peer's exchange with all its queue pairs and keys."""
        if self._peers.get(exchange.name) is exchange:
            del self._peers[exchange.name]
        exchange.close()

    def release(self, region: Region) -> None:
        """Deregister a region everywhere. Any thread."""
        for exchange in list(self._peers.values()):
            exchange.release(region)

    def close(self) -> None:
        """Close the devices, behind what the peers' exchanges have left to the thread."""
        for device in self._devices:
            self._loop.unwatch(device)
        for exchange in list(self._peers.values()):
            self.disconnect(exchange)
        self._loop.call(self._close_devices)

    def discard(self) -> None:
        """Close the devices, which nobody has used."""
        self._close_devices()

    def abandon(self) -> None:
        """Give up the descriptors: in a forked child."""
        _abandoned.append(self)
        for exchange in self._peers.values():
            exchange.abandon()
        for device in self._devices:
            device.abandon()

    def _on_event(self, device: Device, _events: int) -> None:
        for evidence in device.take_events():
            logger.warning("RDMA device %s: %s", device.name, evidence)
            for exchange in list(self._peers.values()):
                exchange.fail_device(device, evidence)

    def _close_devices(self) -> None:
        for device in self._devices:
            device.close()
        self._devices.clear()
