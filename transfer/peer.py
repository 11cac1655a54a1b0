"""A peer as the user sees it, and the link behind it."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from transfer.arguments import check_type
from transfer.backends.process_memory import Locations, PeerProcess
from transfer.backends.shared_memory import Windows
from transfer.connections.control_connection import ControlConnection
from transfer.connections.early_frames import EarlyFrames
from transfer.connections.handshake import Facts
from transfer.errors import PeerLost, PeerUnknown
from transfer.memory.region import Region
from transfer.rails.deputy import Deputy
from transfer.rails.express import make_short_way
from transfer.rails.requests import Requests
from transfer.rdma import RdmaPeer
from transfer.signals import SignalChannel
from transfer.statistics import RailStatistics

# Incarnations that were lost without being fenced, remembered for their evidence.
DEPARTED_MAX = 4096


class LinkState(Enum):
    """Life of a link: its control connection stands, its peer can be used, it is over."""

    CONNECTING = auto()
    READY = auto()
    LOST = auto()


class PeerLink:
    """All connections with one peer. Changed on the engine's thread only, except `evidence`.

    Attributes:
        evidence: why it was lost, None while it is well. Set once, from any thread.
        farewell: what the peer said when it closed, "" if it said nothing.
        ending: its last words are being read.
        settled: set when the link is ready, or lost before it was.
        early: frames that came before the link was ready here; see `EarlyFrames`.
        on_ready: called when it is, on the engine's thread.
        dialed: whether we called the peer, and not it us.
        session: shows that further connections belong to this one; a secret of both ends.
        rdma: queue pairs and keys; None unless both sides have devices.
        deputy: has tcp stand in for RDMA; None where it may not, or need not.
        num_undecided: sides that have not found out whether RDMA works.
        served_id: names this life of the peer at the service of our memory.
    """

    def __init__(
        self,
        name: str,
        facts: Facts,
        backend: str,
        *,
        dialed: bool,
        session: bytes,
        control: ControlConnection,
        served_id: int,
        requests: Requests,
        windows: Windows,
        locations: Locations,
    ) -> None:
        self.name = name
        self.facts = facts
        self.backend = backend
        self.dialed = dialed
        self.session = session
        self.control = control
        self.served_id = served_id
        self.requests = requests
        self.windows = windows
        self.locations = locations
        self.rdma: RdmaPeer | None = None
        self.deputy: Deputy | None = None
        self.num_undecided = 2
        self._process: PeerProcess | None = None
        self._finding = threading.Lock()
        self.signal: SignalChannel | None = None
        self.state = LinkState.CONNECTING
        self.evidence: str | None = None
        self.farewell = ""
        self.ending = False
        self.settled = threading.Event()
        self.early = EarlyFrames()
        self.on_ready: Callable[[], None] = _ignore

    @property
    def alive(self) -> bool:
        """Whether it is ready, and nothing speaks against it."""
        return self.state is LinkState.READY and self.evidence is None

    def rails(self, region: Region | None = None) -> list[RailStatistics]:
        """Return what is known about its rails, the best for a region first. Any thread."""
        return [rail for requests in self._carriers for rail in requests.rails(region)]

    @property
    def num_failures(self) -> int:
        """How often its rails have failed."""
        return sum(requests.num_failures for requests in self._carriers)

    @property
    def num_slices_done(self) -> int:
        """How many slices its rails have brought to their end."""
        return sum(requests.num_slices_done for requests in self._carriers)

    @property
    def _carriers(self) -> list[Requests]:
        deputy = self.deputy.requests if self.deputy is not None else None
        return [self.requests] if deputy is None else [self.requests, deputy]

    @property
    def is_busy(self) -> bool:
        """Whether anything is under way, or not as it should be. RDMA is looked after always."""
        settled = self.state is LinkState.READY and self.evidence is None and self.rdma is None
        return not settled or self.control.is_busy or any(r.is_busy for r in self._carriers)

    def expire(self, now: float) -> None:
        """Fail what is late, over whatever rails. At every tick."""
        self.requests.expire(now)
        if self.deputy is not None:
            self.deputy.tick(now)
        if self.rdma is not None:
            self.rdma.expire(now)

    def find_process(self) -> PeerProcess:
        """Return the process at the other end of the signal socket. Any thread.

        Raises:
            OSError: there is none that this process may see.
            ProcessLookupError: the link is over.
        """
        with self._finding:
            if self.state is LinkState.LOST:
                raise ProcessLookupError(errno.ESRCH, "the link is over")
            if self.signal is None:
                raise OSError(errno.ENOTCONN, "no signal socket")
            if self._process is None:
                self._process = PeerProcess(self.signal.sock)
            return self._process

    def abandon(self) -> None:
        """Close the descriptors only: the way out after a fork."""
        self.evidence = "its connection belongs to the parent process"
        self.control.abandon()
        self.requests.abandon()
        if self.deputy is not None:
            self.deputy.abandon()
        if self.signal is not None:
            self.signal.sock.close()

    def decide(self) -> None:
        """One side knows whether its requests can go over RDMA.

        Who was called is ready first and says so then: when `connect` returns, both know each
        other.
        """
        self.num_undecided -= 1
        if not self.num_undecided and self.state is LinkState.CONNECTING:
            self.become_ready()
            if not self.dialed and self.rdma is not None:
                self.rdma.tell_tried()

    def become_ready(self) -> None:
        """All connections that the backend needs stand."""
        assert self.state is LinkState.CONNECTING
        self.state = LinkState.READY
        self.settled.set()
        self.on_ready()

    def become_lost(self, evidence: str) -> bool:
        """End the link; False if it had ended before."""
        if self.state is LinkState.LOST:
            return False
        with self._finding:
            self.state = LinkState.LOST
            self._process = None  # a descriptor: what is over may be in memory for long
        self.evidence = self.farewell or self.evidence or evidence
        self.early.take_all()
        self.settled.set()
        return True


@dataclass(frozen=True, slots=True)
class Peer:
    """A process that has proved that it knows the cluster secret. A live view.

    Attributes:
        name: its incarnation.
        address: "host:port" of its listener.
        backend: "shared_memory", "verbs", "tcp", or "local" for this process itself.
    """

    name: str
    address: str
    backend: str
    _alive: Callable[[], bool] = field(repr=False)

    @property
    def alive(self) -> bool:
        """Whether the connection stands."""
        return self._alive()


def name_of(peer: str | Peer) -> str:
    """Return the name of a peer that is given either way."""
    return peer if isinstance(peer, str) else check_type("peer", peer, Peer).name


def _ignore() -> None:
    """Nobody waits for the link to be ready."""


class PeerTable:
    """Links by name, the lost, and the fenced. Reads are thread-safe.

    Attributes:
        short_way: to those of them that take it.
    """

    def __init__(self, own_name: str) -> None:
        self._own_name = own_name
        self.short_way = make_short_way()
        self._links: dict[str, PeerLink] = {}
        self._departed: dict[str, str] = {}
        # Never forgotten: a fenced name may not come back, however late.
        self._fenced: dict[str, str] = {}

    def get(self, name: str) -> PeerLink | None:
        """Return the link, connecting or ready."""
        return self._links.get(name)

    def ready(self, name: str) -> PeerLink:
        """Return the link of a peer that can be used.

        Raises:
            PeerLost: it could be once.
            PeerUnknown: it never could.
        """
        link = self._links.get(name)
        if link is not None and link.state is LinkState.READY and link.evidence is None:
            return link
        evidence = self.lost(name)
        if evidence is not None:
            raise PeerLost(name, evidence)
        raise PeerUnknown(name)

    def session(self, name: str) -> bytes | None:
        """Return the session key of the control connection that stands with a name."""
        link = self._links.get(name)
        return link.session if link is not None and link.evidence is None else None

    def lost(self, name: str) -> str | None:
        """Say why a peer is gone; None if it is well, or this process itself.

        Raises:
            PeerUnknown: it was never connected.
        """
        if name == self._own_name:
            return None
        if (evidence := self._fenced.get(name)) is not None:
            return evidence
        link = self._links.get(name)
        if link is not None:
            return link.evidence
        if (evidence := self._departed.get(name)) is not None:
            return evidence
        raise PeerUnknown(name)

    def fenced(self, name: str) -> str | None:
        """Say why a name may not connect."""
        return self._fenced.get(name)

    def add(self, link: PeerLink) -> None:
        """Keep a new link."""
        self._departed.pop(link.name, None)
        self._links[link.name] = link
        self.short_way.map(link.name, link, link.windows.by_token)

    def remove(self, link: PeerLink) -> None:
        """Remember a link only as lost."""
        if self._links.get(link.name) is link:
            self._departed[link.name] = link.evidence or "lost"
            while len(self._departed) > DEPARTED_MAX:
                del self._departed[next(iter(self._departed))]
            del self._links[link.name]
            self.short_way.unmap(link.name, link)

    def fence(self, name: str, reason: str) -> None:
        """Never accept this name again."""
        self._fenced.setdefault(name, f"fenced: {reason}")

    @property
    def is_busy(self) -> bool:
        """Whether anything is under way with anybody."""
        return any(link.is_busy for link in self.links())

    def when_posted(self, function: Callable[[], None]) -> None:
        """Call `function` once, when something takes the short way."""
        self.short_way.on_post = function

    def links(self) -> list[PeerLink]:
        """Return all links, connecting ones included."""
        return list(self._links.values())
