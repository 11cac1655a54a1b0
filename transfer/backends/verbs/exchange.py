"""One peer's rails, domains and keys: both ends, agreed upon over the control connection."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from transfer.backends.verbs import messages
from transfer.backends.verbs.binding import PyverbsError, error_text
from transfer.backends.verbs.device import Device
from transfer.backends.verbs.domain import PeerDomain
from transfer.backends.verbs.keys import KeyTable
from transfer.backends.verbs.messages import (
    AskKey,
    CloseRail,
    KeyRefused,
    KeyTold,
    Message,
    OpenRail,
    RailDown,
    RailOpened,
    RailRefused,
    RailsTried,
    Settle,
    Settled,
)
from transfer.backends.verbs.reachability import check_reachable
from transfer.backends.verbs.requester import VerbsRail
from transfer.backends.verbs.responder import CREDITS, Inbox, ServedRail
from transfer.errors import ProtocolViolation
from transfer.event_loop import EventLoop
from transfer.memory.region import Offer, OfferTable, Region
from transfer.rails.rail import RailLink, RailName, SliceSink
from transfer.wire import Status

logger = logging.getLogger(__name__)

OPEN_TIMEOUT_S: Final = 2.0
# Rails that one peer may have open at us, those on their way out included.
SERVED_MAX: Final = 64

Opened = Callable[[RailLink | None], None]


@dataclass(slots=True, kw_only=True)
class _Opening:
    rail: VerbsRail
    deadline: float
    done: Opened | None


class PeerExchange:
    """Everything about RDMA with one peer. On the engine's thread unless said otherwise.

    Args:
        name: of the peer.
        devices: ours, in the order of rails.
        theirs: names of the peer's devices.
        send: puts a message on the control connection. Any thread, never waits.
        count: takes the peer's immediates.
        on_tried: told once that the peer knows how it will reach us.
    """

    def __init__(
        self,
        name: str,
        devices: list[Device],
        theirs: tuple[str, ...],
        offers: OfferTable,
        loop: EventLoop,
        *,
        send: Callable[[bytes], None],
        count: Callable[[list[int]], None],
        on_tried: Callable[[], None],
    ) -> None:
        self.name = name
        self._devices = devices
        self._theirs = theirs
        self._offers = offers
        self._loop = loop
        self._send_bytes = send
        self._count = count
        self._on_tried: Callable[[], None] | None = on_tried
        self._domains: dict[Device, PeerDomain] = {}
        self._inboxes: dict[Device, Inbox] = {}
        self._served: dict[int, ServedRail] = {}
        self._rails: dict[int, VerbsRail] = {}
        self._opening: dict[int, _Opening] = {}
        self._keys = KeyTable(lambda token: self._send(AskKey(token)))
        self._next_number = 1
        self._is_open = True

    def open_rail(self, rail: RailName, sink: SliceSink, done: Opened) -> None:
        """Make a link over a rail: our device with the peer's; call back with it."""
        device = next(device for device in self._devices if device.name == rail.local)
        theirs = self._theirs.index(rail.remote)
        try:
            link = VerbsRail(
                rail, theirs, self._domain(device), self._loop, sink, self._keys,
                settle=self._settle, reopen=self._begin, forget=self._forget,
            )  # fmt: skip
        except PyverbsError as error:
            logger.warning("no rail %s to %s: %s", rail, self.name, error_text(error))
            done(None)
            return
        self._begin(link, done)

    def tell_tried(self) -> None:
        """Tell the peer that we know how we will reach it."""
        self._send(RailsTried())

    def register(self, region: Region) -> None:
        """Register a region with all devices. Any thread.

        Raises:
            PyverbsError: it cannot be.
        """
        for device in self._devices:
            self._domain(device).local(region)

    def learn(self, token: bytes, deadline: float) -> bool:
        """Whether the owner tells how to reach an offer; asks, and waits. Any thread.

        On the engine's thread only what is known already counts.
        """
        if self._keys.find(token) is not None:
            return True
        return not self._loop.is_current and self._keys.learn(token, deadline)

    def release(self, region: Region) -> None:
        """Deregister a region. Any thread."""
        for domain in list(self._domains.values()):
            domain.release(region)

    def withdraw(self, token: bytes) -> None:
        """Make a key of ours void at the cards. Any thread."""
        for domain in list(self._domains.values()):
            domain.withdraw(token)

    def drop_key(self, token: bytes) -> None:
        """Forget a key that the peer has withdrawn."""
        self._keys.drop(token)

    def drain(self) -> None:
        """Count what the peer has completed so far."""
        for inbox in self._inboxes.values():
            inbox.drain()

    def expire(self, now: float) -> None:
        """Give up rails that the peer does not answer for. At every tick."""
        for number, opening in list(self._opening.items()):
            if opening.deadline <= now:
                del self._opening[number]
                self._not_opened(opening, "no answer in time")

    def fail_device(self, device: Device, evidence: str) -> None:
        """A port of ours is down: so are all rails over it, in both directions."""
        for rail in list(self._rails.values()):
            if rail.device is device:
                rail.suspect(f"{device.name}: {evidence}")
        for served in self._served.values():
            if served.inbox.device is device:
                self._send(RailDown(served.number, f"{device.name}: {evidence}"[:200]))

    def close(self) -> None:
        """Destroy everything; idempotent. The peer reaches nothing any more."""
        if not self._is_open:
            return
        self._is_open = False
        openings = list(self._opening.values())
        self._opening.clear()
        for rail in [*self._rails.values(), *(opening.rail for opening in openings)]:
            rail.close()
        self._rails.clear()
        for served in self._served.values():
            served.close()
        self._served.clear()
        for inbox in self._inboxes.values():
            inbox.close()
        # After the rails, which free their queues on this thread too.
        self._loop.call(self._close_domains)

    def abandon(self) -> None:
        """Close the descriptors only: in a forked child."""
        for rail in self._rails.values():
            rail.abandon()
        for inbox in self._inboxes.values():
            inbox.abandon()

    def on_message(self, content: bytes) -> None:
        """Take a message from the control connection.

        Raises:
            ProtocolViolation: no correct peer sends this.
        """
        message = messages.parse(content)
        match message:
            case OpenRail():
                self._serve(message)
            case Settle():
                self._settle_served(message)
            case CloseRail():
                served = self._served.pop(message.rail, None)
                if served is not None:
                    served.close()
            case AskKey():
                self._tell_key(message.token)
            case RailOpened():
                self._on_opened(message)
            case RailRefused():
                opening = self._opening.pop(message.rail, None)
                if opening is not None:
                    self._not_opened(opening, f"refused by the peer: {message.reason[:200]}")
            case Settled():
                self._on_settled(message)
            case RailDown():
                rail = self._rails.get(message.rail)
                if rail is not None:
                    rail.suspect(f"the peer's {message.evidence[:200]}")
            case RailsTried():
                on_tried, self._on_tried = self._on_tried, None
                if on_tried is not None:
                    on_tried()
            case KeyTold():
                self._on_key(message.token, message.places, Status.OK)
            case KeyRefused():
                self._on_key(message.token, None, message.status)

    def _send(self, message: Message) -> None:
        if self._is_open:
            self._send_bytes(messages.encode(message))

    def _domain(self, device: Device) -> PeerDomain:
        found = self._domains.get(device)
        if found is None:
            found = self._domains.setdefault(device, PeerDomain(device))
        return found

    def _begin(self, rail: VerbsRail, done: Opened | None = None) -> None:
        """Ask the owner for queue pairs to connect with."""
        number, self._next_number = self._next_number, self._next_number + 1
        if rail.is_closed:
            return
        opening = _Opening(rail=rail, deadline=time.monotonic() + OPEN_TIMEOUT_S, done=done)
        self._rails.pop(rail.number, None)
        if not self._is_open or not rail.device.is_up:
            self._not_opened(opening, f"{rail.device.name} is down")
            return
        try:
            end = rail.prepare(number)
        except PyverbsError as error:
            self._not_opened(opening, error_text(error))
            return
        self._opening[number] = opening
        self._send(OpenRail(number, rail.device_idx, end))

    def _on_opened(self, message: RailOpened) -> None:
        opening = self._opening.pop(message.rail, None)
        if opening is None:
            self._send(CloseRail(message.rail))  # too late
            return
        rail = opening.rail
        self._rails[message.rail] = rail
        try:
            check_reachable(rail.device, message.end)
            rail.connect(message.end, message.credits)
        except (PyverbsError, ConnectionError) as error:
            self._not_opened(opening, str(error).splitlines()[0])
            return
        if opening.done is not None:
            opening.done(rail)

    def _not_opened(self, opening: _Opening, evidence: str) -> None:
        logger.info("no rail %s to %s: %s", opening.rail.rail, self.name, evidence)
        if opening.done is None:
            opening.rail.not_opened(evidence)
        else:
            opening.rail.close()
            opening.done(None)

    def _forget(self, rail: VerbsRail) -> None:
        self._opening.pop(rail.number, None)
        self._rails.pop(rail.number, None)
        self._send(CloseRail(rail.number))

    def _settle(self, rail: VerbsRail, token: bytes) -> None:
        self._send(Settle(rail.number, token))

    def _on_settled(self, message: Settled) -> None:
        rail = self._rails.get(message.rail)
        if rail is not None:
            rail.on_settled(message.arrived, message.status)

    def _on_key(
        self, token: bytes, places: tuple[tuple[int, int], ...] | None, status: Status
    ) -> None:
        if places is not None and len(places) != len(self._theirs):
            raise ProtocolViolation(f"a key for {len(places)} devices, not {len(self._theirs)}")
        if not self._keys.told(token, places):
            raise ProtocolViolation("a key was told that nobody has asked for")
        for rail in list(self._rails.values()):
            rail.on_key(token, places, status)

    def _serve(self, message: OpenRail) -> None:
        if len(self._served) >= SERVED_MAX or message.rail in self._served:
            raise ProtocolViolation(f"rail {message.rail} beside {len(self._served)} others")
        if not 0 <= message.device < len(self._devices):
            self._send(RailRefused(message.rail, f"no device {message.device}"))
            return
        device = self._devices[message.device]
        try:
            if not device.is_up:
                raise ConnectionError(f"{device.name} is down")
            check_reachable(device, message.end)
            served = ServedRail(message.rail, self._inbox(device))
            end = served.open(message.end)
        except (PyverbsError, ConnectionError) as error:
            self._send(RailRefused(message.rail, str(error).splitlines()[0][:200]))
            return
        self._served[message.rail] = served
        self._send(RailOpened(message.rail, end, CREDITS))

    def _inbox(self, device: Device) -> Inbox:
        found = self._inboxes.get(device)
        if found is None:
            found = self._inboxes[device] = Inbox(self._domain(device), self._loop, self._count)
        return found

    def _settle_served(self, message: Settle) -> None:
        served = self._served.pop(message.rail, None)
        if served is None:
            return
        arrived = served.settle()
        status = Status.OK
        if message.token and self._find(message.token) is None:
            status = Status.UNKNOWN
        elif message.token:
            status = Status.OUT_OF_BOUNDS
        self._send(Settled(message.rail, arrived, status))

    def _tell_key(self, token: bytes) -> None:
        # Under the lock that withdrawing takes: the answer leaves before any WITHDRAWN.
        with self._offers.landing:
            offer = self._find(token)
            if offer is None:
                self._send(KeyRefused(token, Status.UNKNOWN))
                return
            try:
                places = tuple(self._domain(d).remote(token, offer) for d in self._devices)
            except PyverbsError as error:
                logger.warning("an offer to %s cannot be registered: %s",
                               self.name, error_text(error))  # fmt: skip
                self._send(KeyRefused(token, Status.NO_RIGHT))
                return
            self._send(KeyTold(token, places))

    def _find(self, token: bytes) -> Offer | None:
        return self._offers.find(token, to=self.name)

    def _close_domains(self) -> None:
        for domain in self._domains.values():
            domain.close()
