"""The life of links: made of greeted connections, ended with evidence.

Runs on the engine's thread unless said otherwise.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from configs.schema import TransferConfig
from transfer.backends.process_memory import Locations
from transfer.backends.service import Service
from transfer.backends.shared_memory import Windows
from transfer.connections.control_connection import ControlConnection
from transfer.connections.control_frames import ControlFrames
from transfer.connections.handshake import Facts, Purpose
from transfer.connections.negotiation import Greeted, Outcome
from transfer.connections.rendezvous import Rendezvous
from transfer.connections.resumption import Resumptions
from transfer.connections.stream import Stream
from transfer.errors import (
    HandshakeRefused,
    PeerLost,
    TransferError,
)
from transfer.event_loop import EventLoop
from transfer.handlers import Handlers
from transfer.immediates import ImmediateBoard
from transfer.memory.region import OfferTable
from transfer.memory.told_addresses import ToldAddresses
from transfer.peer import LinkState, PeerLink, PeerTable
from transfer.rails.opener import RailOpener
from transfer.rails.place import fetch_place
from transfer.rdma import Rdma
from transfer.signals import SignalChannel
from transfer.statistics import RailStatistics, Tally
from transfer.wire import ControlKind, encode_control

if TYPE_CHECKING:
    from transfer.storage.staging import Staging

logger = logging.getLogger(__name__)

SERVING_MAX: Final = 64


class Links:
    """Makes and ends the links of an engine.

    Attributes:
        opener: opens rails; set by `bind`.
    """

    def __init__(
        self,
        config: TransferConfig,
        table: PeerTable,
        offers: OfferTable,
        tally: Tally,
        loop: EventLoop,
    ) -> None:
        self._config = config
        self._table = table
        self._offers = offers
        self._tally = tally
        self._loop = loop
        self.board = ImmediateBoard(lost=table.lost, on_signal_lost=self._on_signal_lost)
        self.service = Service(
            loop.name, offers, self.board, tally, loop.fail, encrypted=config.tls.enabled
        )
        self.told = ToldAddresses(offers, enabled=config.process_memory)
        self.rdma = Rdma(offers, loop, self.board)
        self.handlers = Handlers(loop, tally)
        self._frames = ControlFrames(
            offers,
            tally,
            fenced=table.fenced,
            handlers=self.handlers,
            told=self.told,
            lose=self.lose,
        )

    @property
    def staging(self) -> Staging:
        """Answers peers that ask for storages; set by the engine."""
        return self._frames.staging

    @staging.setter
    def staging(self, staging: Staging) -> None:
        self._frames.staging = staging

    def bind(self, rendezvous: Rendezvous) -> None:
        """Tell where connections come from."""
        self._rendezvous = rendezvous
        self.opener = RailOpener(
            self._config, self._table, self.rdma, self._tally, self._loop, rendezvous
        )
        self._resumptions = Resumptions(
            self._loop,
            rendezvous,
            self._tally,
            timeout_s=self._config.resume_timeout_s,
            ways=self.opener.ways,
            lose=self.lose,
        )

    def admit(self, purpose: Purpose, name: str) -> str | None:
        """Say why a caller is not wanted; None if it is."""
        if (reason := self._table.fenced(name)) is not None:
            return reason
        if purpose is Purpose.CONTROL:
            return None
        link = self._table.get(name)
        if link is None or link.evidence is not None:
            return "no control connection"
        if purpose is Purpose.SIGNAL and link.signal is not None:
            return "a signal connection stands already"
        num_served = len(self.service.connections(link.served_id))
        if purpose is Purpose.DATA and num_served >= SERVING_MAX:
            return f"more than {SERVING_MAX} data connections"
        return None

    def standing(self, name: str) -> bool:
        """Whether a control connection with this name stands."""
        link = self._table.get(name)
        return link is not None and link.evidence is None

    def install(self, greeted: Greeted) -> None:
        """Take over a connection that a peer has made."""
        if greeted.purpose is Purpose.CONTROL:
            link = self._make_link(greeted)
            if link is not None and link.backend == "tcp" and link.rdma is None:
                link.become_ready()
            return
        link = self._table.get(greeted.name)
        if link is None or link.evidence is not None:
            Stream.discard(greeted.sock)
        elif greeted.purpose is Purpose.RESUME:
            self._resumptions.on_call(link, greeted)
        elif greeted.purpose is Purpose.SIGNAL:
            self._attach_signal(link, greeted.sock)
        else:
            # Once its last word of the handshake is out: the socket is given away for good.
            self._loop.call(lambda: self.service.attach(link.served_id, greeted.sock))

    def dial(self, address: str, on_outcome: Callable[[Outcome], None]) -> None:
        """Make a control connection, and what belongs to it."""

        def dialed(outcome: Outcome) -> None:
            if isinstance(outcome, Greeted):
                link = self._make_link(outcome, dialed=True)
                if link is None:
                    outcome = HandshakeRefused(address, "no backend in common", outcome.name)
                elif link.backend == "tcp" and link.rdma is None:
                    link.become_ready()
                elif link.backend == "shared_memory":
                    self._dial_signal(link)
            on_outcome(outcome)

        self._rendezvous.dial(address, Purpose.CONTROL, name=None, on_outcome=dialed)

    def lose(self, link: PeerLink, evidence: str, *, fenced: bool = False) -> None:
        """End a link; idempotent. What the peer completed before its end still counts."""
        if link.state is LinkState.LOST or (link.ending and not fenced):
            return
        if not fenced:
            link.ending = True
            self._read_to_the_end(link)
        was_ready = link.state is LinkState.READY
        if not link.become_lost(evidence):
            return
        evidence = link.evidence or evidence
        logger.info("peer %s lost: %s", link.name, evidence)
        self._table.remove(link)
        self.board.notify()
        if not link.farewell:
            # Or it would try to go on with us.
            link.control.send(encode_control(ControlKind.GOODBYE, f"given up: {evidence}".encode()))
        self._close(link, PeerLost(link.name, evidence))
        if was_ready and not fenced:
            self.handlers.tell_lost(link.name, evidence)

    def fence(self, name: str, reason: str) -> None:
        """End the link of a fenced name and forget its counts."""
        link = self._table.get(name)
        if link is not None:
            self.lose(link, f"fenced: {reason}", fenced=True)
        self.board.drop(name)
        self.board.notify()

    def close(self, reason: str, error: TransferError) -> None:
        """Say goodbye to everybody and close all connections."""
        for link in self._table.links():
            link.locations.close()
            link.control.send(encode_control(ControlKind.GOODBYE, reason.encode()))
            link.become_lost(f"closed here: {reason}")
            self._table.remove(link)
            self._close(link, error)

    def expire(self, now: float) -> bool:
        """Fail what is late; return whether anything is under way. At every tick."""
        for link in self._table.links():
            self._resumptions.tick(link, now)
            link.expire(now)
        self.told.expire()
        return self._resumptions.is_busy or self._table.is_busy

    def tell_withdrawn(self, link: PeerLink, token: bytes) -> None:
        """Make a key void at our cards, and tell the peer. Any thread; never waits."""
        if link.rdma is not None:
            link.rdma.withdraw(token)
        # Who does not read it would go on using keys that are void.
        self._tell(link, ControlKind.WITHDRAWN, token)

    def _backend(self, facts: Facts) -> str | None:
        own = self._rendezvous.facts
        if own.shared_memory and facts.shared_memory and own.host == facts.host:
            return "shared_memory"
        if own.verbs and facts.verbs:
            return "verbs"
        return "tcp" if own.tcp and facts.tcp else None

    def _make_link(self, greeted: Greeted, *, dialed: bool = False) -> PeerLink | None:
        backend = self._backend(greeted.facts)
        if backend is None or self._table.fenced(greeted.name) or self.standing(greeted.name):
            Stream.discard(greeted.sock)
            return None
        stale = self._table.get(greeted.name)
        if stale is not None:
            self.lose(stale, stale.evidence or "replaced")
        name = greeted.name
        requests = self.opener.make_requests(
            name, backend, greeted.facts, lambda opened: self._on_rails(link, opened)
        )
        control = ControlConnection(
            greeted,
            self._loop,
            self._tally,
            frame_bytes_max=self._config.notify_bytes_max,
            on_frame=lambda kind, content: self._frames.take(link, kind, content),
            on_broken=lambda evidence: self._resumptions.on_broken(
                link, f"control connection {evidence}"
            ),
            on_nonsense=lambda problem: self._frames.end_nonsense(link, problem),
            on_resumed=lambda: self._resumptions.on_resumed(link),
        )
        link = PeerLink(
            name,
            greeted.facts,
            backend,
            control=control,
            served_id=self.service.open_peer(name, local=backend == "shared_memory"),
            dialed=dialed,
            session=greeted.session,
            requests=requests,
            windows=Windows(name, fetch=partial(fetch_place, requests)),
            locations=Locations(
                name,
                ask=lambda token: control.send(encode_control(ControlKind.LOCATE, token)),
                retire=lambda token: control.send(encode_control(ControlKind.RETIRED, token)),
                find_process=lambda: link.find_process(),
                may_wait=lambda: not self._loop.is_current,
                enabled=self._config.process_memory,
            ),
        )
        link.on_ready = partial(self._frames.take_early, link)
        if backend == "verbs":
            link.rdma = self.rdma.connect(
                name,
                greeted.facts.verbs,
                send=partial(self._tell, link, ControlKind.VERBS),
                lose=lambda evidence: self.lose(link, evidence),
                on_tried=lambda: link.decide(),
            )
            link.deputy = self.opener.make_deputy(link)
        self.board.drop(name)
        self._table.add(link)
        control.open()
        if backend == "verbs":
            # Once the last word of the handshake is out.
            self._loop.call(requests.open_rails)
        return link

    def _on_rails(self, link: PeerLink, opened: bool) -> None:
        """RDMA works, or does not though both sides have cards: then our requests take tcp."""
        if link.state is not LinkState.CONNECTING or link.rdma is None:
            return
        if not opened:
            if not (self._rendezvous.facts.tcp and link.facts.tcp):
                self.lose(link, "no rail between its RDMA devices and ours could be opened")
                return
            link.requests.close(PeerLost(link.name, "no rail"))
            link.backend, link.deputy = "tcp", None
            link.requests = self.opener.make_requests(link.name, "tcp", link.facts)
        if link.dialed:
            link.rdma.tell_tried()
        link.decide()

    def _dial_signal(self, link: PeerLink) -> None:
        def dialed(outcome: Outcome) -> None:
            if isinstance(outcome, HandshakeRefused):
                self.lose(link, f"no signal connection: {outcome.reason}")
            elif link.state is LinkState.CONNECTING:
                self._attach_signal(link, outcome.sock)
            else:
                Stream.discard(outcome.sock)

        target = f"@{link.facts.local_socket}"
        self._rendezvous.dial(target, Purpose.SIGNAL, name=link.name, on_outcome=dialed)

    def rails(self) -> list[RailStatistics]:
        """Return what is known about all rails. Any thread."""
        return [rail for link in self._table.links() for rail in link.rails()]

    def _attach_signal(self, link: PeerLink, sock: socket.socket) -> None:
        link.signal = SignalChannel(sock, link.name)
        self.board.poll.add(link.signal)
        link.become_ready()

    def _tell(self, link: PeerLink, kind: ControlKind, content: bytes) -> None:
        """Send what must arrive. Any thread; never waits: who reads nothing is lost."""
        if link.control.flooded:
            evidence = "it does not read its control connection"
            self._loop.call(lambda: self.lose(link, evidence))
        else:
            link.control.send(encode_control(kind, content))

    def _read_to_the_end(self, link: PeerLink) -> None:
        self.service.deliver()
        if link.rdma is not None:
            link.rdma.drain()
        if link.signal is not None:
            self.board.drain_channel(link.signal)
        link.control.read_to_the_end()

    def _on_signal_lost(self, channel: SignalChannel, evidence: str) -> None:
        """Any thread: the thread that waits is the first to know."""
        link = self._table.get(channel.peer)
        if link is not None and link.signal is channel:
            link.evidence = link.evidence or f"signal connection broke: {evidence}"
            self._loop.call(lambda: self.lose(link, evidence))

    def _close(self, link: PeerLink, error: TransferError) -> None:
        self.staging.forget(link.name, error)
        self._resumptions.forget(link)
        link.locations.close()
        link.control.close()
        link.requests.close(error)
        if link.deputy is not None:
            link.deputy.close(error)
        if link.rdma is not None:
            self.rdma.disconnect(link.rdma)
        link.windows.clear()
        self.service.close_peer(link.served_id)
        if link.signal is not None:
            self.board.poll.remove(link.signal)
            link.signal.close()
