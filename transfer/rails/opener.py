"""Opens links over rails: which addresses are paired, and what is dialled over them.

Our rails and a peer's are lists of addresses, or of RDMA devices. They are paired by network, see
`pairing`, and where one list is longer some of the other are in several pairs: every end of both
is in use.
Runs on the engine's thread.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from configs.schema import TransferConfig
from transfer.backends.tcp import TcpRail
from transfer.connections.handshake import Facts, Purpose
from transfer.connections.negotiation import Greeted, Outcome
from transfer.connections.rendezvous import Rendezvous
from transfer.connections.resumption import Way
from transfer.event_loop import EventLoop
from transfer.explanation import Surroundings
from transfer.host import share_machine
from transfer.peer import PeerLink, PeerTable
from transfer.priority import shares_of
from transfer.rails.deputy import Deputy, Replaceable, Replacement
from transfer.rails.interface_addresses import interface_addresses
from transfer.rails.own_rails import OwnRails
from transfer.rails.pairing import pair_addresses, share_network
from transfer.rails.peer_preferences import RailPreferences
from transfer.rails.preference import RailKind
from transfer.rails.rail import RailLink, RailName, SliceSink
from transfer.rails.requests import Requests
from transfer.rdma import Rdma
from transfer.statistics import Tally

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=Requests)


class _Trial:
    """Sees how the first attempts to open a peer's rails end."""

    def __init__(self, num_rails: int, tell: Callable[[bool], None] | None) -> None:
        self._num_left = num_rails
        self._tell = tell

    def watch(self, done: Callable[[RailLink | None], None]) -> Callable[[RailLink | None], None]:
        """Look at what comes back on its way to `done`."""
        if self._tell is None:
            return done

        def ended(link: RailLink | None) -> None:
            done(link)
            self._num_left -= 1
            tell = self._tell
            if tell is not None and (link is not None or not self._num_left):
                self._tell = None
                tell(link is not None)

        return ended


class RailOpener:
    """Opens the data connections of all peers of an engine.

    Attributes:
        own: our ends of tcp rails; set when the engine is opened.
    """

    def __init__(
        self,
        config: TransferConfig,
        table: PeerTable,
        rdma: Rdma,
        tally: Tally,
        loop: EventLoop,
        rendezvous: Rendezvous,
    ) -> None:
        self.own = OwnRails(addresses=config.rails)
        self._config = config
        self._table = table
        self._rdma = rdma
        self._tally = tally
        self._loop = loop
        self._rendezvous = rendezvous

    def make_requests(
        self, name: str, backend: str, facts: Facts, tried: Callable[[bool], None] | None = None
    ) -> Requests:
        """Make the requests to a peer, over the rails that lead to it.

        Args:
            name: of the peer.
            backend: what its rails are.
            facts: what it tells about itself.
            tried: told once, when the first rail has been opened, or none of them could be.
        """
        kind = Replaceable if backend == "verbs" else Requests
        return self._make(kind, name, backend, facts, tried)

    def make_deputy(self, peer: PeerLink) -> Deputy | None:
        """Let tcp stand in for RDMA; None where the peer or we do not talk it."""
        if not isinstance(peer.requests, Replaceable):
            return None
        if not (self._rendezvous.facts.tcp and peer.facts.tcp):
            return None
        return Deputy(
            peer.requests, lambda: self._make(Replacement, peer.name, "tcp", peer.facts, None)
        )

    def _make(
        self,
        kind: type[R],
        name: str,
        backend: str,
        facts: Facts,
        tried: Callable[[bool], None] | None,
    ) -> R:
        rails = self.rails(backend, facts)
        verbs = backend == "verbs"
        trial = _Trial(len(rails), tried)

        def open_rail(idx: int, done: Callable[[RailLink | None], None]) -> None:
            self.open(name, rails[idx], requests, trial.watch(done))

        ends = RailKind.RDMA if verbs else RailKind.INTERFACE
        requests = kind(
            name,
            self._loop,
            self._tally,
            num_rails=len(rails),
            prefer=RailPreferences([rail.local for rail in rails], kind=ends).order_for,
            shares=shares_of(self._config),
            open_rail=open_rail,
            orders_immediates=not verbs,
            # Over a unix socket goes only what cannot be mapped.
            short_way=self._table.short_way if backend == "tcp" and kind is Requests else None,
        )
        return requests

    def rails(self, backend: str, facts: Facts) -> list[RailName]:
        """Return the rails that lead to a peer: by a unix socket on the same host."""
        if backend == "verbs":
            return self._rdma.rails(facts)
        if backend != "tcp":
            return [RailName("unix", "", f"@{facts.local_socket}")]
        ours = self.own.addresses or (self._config.host,)
        theirs = facts.rails or (facts.address,)
        if len(ours) == len(theirs) == 1:
            return [RailName("tcp", ours[0], theirs[0])]
        hosts = [address.rpartition(":")[0] for address in theirs]
        pairs = pair_addresses(ours, hosts, interface_addresses())
        return [RailName("tcp", ours[i], theirs[k]) for i, k in pairs]

    def ways(self, peer: PeerLink) -> list[Way]:
        """Return all addresses at which a peer may be called: as its rails, and as routing goes."""
        named = [Way(None, peer.facts.address)]
        if not self.own.addresses:
            return named + [Way(None, address) for address in peer.facts.rails]
        rails = self.rails("tcp", peer.facts)
        return [Way(rail.local, rail.remote) for rail in rails] + named

    def surroundings(self, peer: PeerLink) -> Surroundings:
        """Return what could be used on the way to a peer, and what could not. Any thread."""
        rails = self.rails(peer.backend, peer.facts)
        interfaces = interface_addresses()
        return Surroundings(
            own=self._rendezvous.facts,
            no_verbs=self._rdma.missing,
            rails=tuple((str(rail), _against(rail, interfaces)) for rail in rails),
            unused=(*self._rdma.unused, *self.own.unused),
        )

    def open(
        self,
        name: str,
        rail: RailName,
        sink: SliceSink,
        done: Callable[[RailLink | None], None],
    ) -> None:
        """Make a link over a rail; the callback gets it, or None."""
        peer = self._table.get(name)
        if peer is None or peer.evidence is not None:
            done(None)
            return
        if rail.backend == "verbs":
            assert peer.rdma is not None, "these rails lead to no other peers"
            peer.rdma.open_rail(rail, sink, done)
            return

        def dialed(sock: socket.socket | None) -> None:
            if sock is None:
                done(None)
                return
            done(TcpRail(
                rail, sock, self._loop, sink, self._tally,
                num_bulk=self._config.tcp_connections,
                dial=partial(self._dial, peer, rail),
            ))  # fmt: skip

        self._dial(peer, rail, dialed)

    def _dial(
        self, peer: PeerLink, rail: RailName, done: Callable[[socket.socket | None], None]
    ) -> None:
        if self._table.get(peer.name) is not peer or peer.evidence is not None:
            done(None)
            return

        def dialed(outcome: Outcome) -> None:
            if isinstance(outcome, Greeted):
                done(outcome.sock)
            else:
                logger.debug("no data connection to %s: %s", peer.name, outcome.reason)
                done(None)

        # With a single address the routing decides where we call from.
        source = rail.local if self.own.addresses and rail.backend == "tcp" else None
        self._rendezvous.dial(
            rail.remote,
            Purpose.DATA,
            name=peer.name,
            source=source,
            within_machine=share_machine(self._rendezvous.facts.host, peer.facts.host),
            on_outcome=dialed,
        )


def _against(rail: RailName, interfaces: Mapping[str, Sequence[str]]) -> str:
    remote = rail.remote.rpartition(":")[0]
    if rail.backend != "tcp" or rail.local == remote:
        return ""
    return "" if share_network(rail.local, remote, interfaces) else "its ends share no network"
