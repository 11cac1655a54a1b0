"""`TransferEngine`: the whole package behind one object per process."""

from __future__ import annotations

import os
import time
import weakref
from types import TracebackType
from typing import Self

import msgspec

from configs.schema import TransferBackend, TransferConfig
from transfer.arguments import check_handler, check_name, check_type
from transfer.arrivals import Arrivals
from transfer.backends.process_memory import PeerProcess
from transfer.connections.calling import Caller
from transfer.connections.links import Links
from transfer.connections.rendezvous import Rendezvous
from transfer.connections.tls import Credentials
from transfer.errors import DeviceUnavailable, EngineClosed, PeerLost, PeerUnknown, TransferTimeout
from transfer.event_loop import EventLoop
from transfer.explanation import Explanation, explain_link, explain_self
from transfer.forked import REASON, disown
from transfer.handlers import LostHandler, NotifyHandler
from transfer.memory.region import OfferTable, Region, RegionKey
from transfer.movement import Movement
from transfer.offering import Offering
from transfer.operations import Mover, deadline_after
from transfer.peer import LinkState, Peer, PeerLink, PeerTable, name_of
from transfer.rails.own_rails import own_rails
from transfer.rails.peer_preferences import this_machine
from transfer.statistics import Tally, TransferStatistics
from transfer.storage.staging import Staging
from transfer.wire import ControlKind, encode_control

_engines: weakref.WeakSet[TransferEngine] = weakref.WeakSet()


class TransferEngine(Offering, Movement, Arrivals):
    """Moves bytes between registered memory of this process and of its peers.

    All methods are thread-safe. Between `open` and `close` one background thread accepts peers,
    serves what they cannot do one-sidedly, and delivers notifies. A fork does not inherit an
    engine: the child's copies of the descriptors are closed, so peers still see our death.

    Args:
        config: the knobs.
        name: this incarnation, unique per process life; 1 to 64 characters.
        secret: the cluster secret, equal in all processes.
    """

    def __init__(self, config: TransferConfig, *, name: str, secret: bytes) -> None:
        check_type("config", config, TransferConfig)
        check_name(name)
        if not check_type("secret", secret, bytes):
            raise ValueError("the cluster secret is empty")
        self.name = name
        self._config = config
        self._tally = Tally()
        self._table = PeerTable(name)
        self._offers = OfferTable(name)
        self._loop = EventLoop(name[:8], on_tick=self._on_tick, on_calm=self._table.when_posted)
        self._links = Links(config, self._table, self._offers, self._tally, self._loop)
        self._board = self._links.board
        self._rendezvous = Rendezvous(
            self._loop,
            self._tally,
            secret=secret,
            name=name,
            timeout_s=config.handshake_timeout_s,
            standing=self._links.standing,
            admit=self._links.admit,
            install=self._links.install,
            sessions=self._table.session,
        )
        self._links.bind(self._rendezvous)
        self._mover = Mover(
            name,
            self._table,
            self._offers,
            self._board,
            self._tally,
            config.operation_timeout_s,
        )
        self._staging = Staging(name, self._table, self._offers, self._board, self._mover)
        self._staging.stir = self._loop.stir
        self._mover.staging = self._links.staging = self._staging
        self._caller = Caller(self._loop, self._table, self._links)
        self._state = "new"

    def open(self) -> Self:
        """Listen, and start the thread.

        Raises:
            OSError: the host cannot be listened on, or a certificate cannot be used.
            DeviceUnavailable: RDMA, or a device of that name, was asked for and is not there; or
                no network interface is left by the patterns.
            EngineClosed: an engine is opened once.
        """
        if self._state != "new":
            raise EngineClosed(f"an engine is opened once; this one is {self._state}")
        backend = self._config.backend
        rdma = self._links.rdma
        try:
            self._rendezvous.credentials = Credentials.load(self._config.tls)
            rdma.open(self._config)
            own = self._links.opener.own = own_rails(self._config, this_machine)
            facts = self._rendezvous.listen(
                self._config.host,
                rails=own.addresses,
                shared_memory=backend in (TransferBackend.AUTO, TransferBackend.SHARED_MEMORY),
                tcp=backend in (TransferBackend.AUTO, TransferBackend.TCP),
            )
            self._rendezvous.facts = msgspec.structs.replace(
                facts, verbs=rdma.devices, verbs_addresses=rdma.addresses
            )
            self._board.open()
            self._links.service.open()
            self._loop.start()
            self._loop.watch_when_calm(self._board.poll, lambda _: self._board.drain())
        except (OSError, DeviceUnavailable):
            self._state = "closed"
            rdma.discard()
            self._links.service.close()
            self._rendezvous.abandon()
            self._board.abandon()
            raise
        self._state = "open"
        self._loop.call(self._rendezvous.start)
        self._loop.call(rdma.start)
        _engines.add(self)
        return self

    def close(self) -> None:
        """Tell the peers, fail what is under way, free every thread, socket and mapping."""
        if self._state != "open":
            return
        if self._loop.is_current:
            raise RuntimeError("close() on the engine's own thread would wait for itself")
        self._state = "closed"
        error = EngineClosed("the transfer engine was closed")
        # Who knows addresses of ours must not come back to them when the memory is somebody else's.
        self._withdraw_addresses()
        self._links.told.outlive()
        # Called at the loop's end; by its stop, if a failure has ended it before.
        self._loop.call(lambda: self._links.close("the engine was closed", error))
        self._loop.call(self._rendezvous.close)
        self._loop.call(self._links.rdma.close)
        self._loop.stop()
        self._links.service.close()
        self._staging.close()
        self._board.close()
        self._offers.withdraw_all()
        _engines.discard(self)

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def address(self) -> str:
        """Where peers connect, "host:port".

        Raises:
            EngineClosed: it was never open.
        """
        if self._state == "new":
            raise EngineClosed("an engine has an address once it is open; this one is not yet")
        return self._rendezvous.facts.address

    def connect(self, address: str, *, timeout_s: float | None = None) -> Peer:
        """Connect to an engine, both sides proving the secret; idempotent.

        Both sides know each other when it returns. Both may call at once.

        Raises:
            AddressInvalid: nobody can be there; expected is "host:port".
            PeerUnreachable: nobody there, or not in time.
            HandshakeRefused: wrong secret, a fenced name, no backend in common.
        """
        self._loop.check()
        if self._loop.is_current:
            raise RuntimeError("connect() on the engine's own thread would wait for itself")
        deadline = deadline_after(timeout_s, self._config.handshake_timeout_s)
        if address == self.address:
            return self.peer(self.name)
        return self._public(self._caller.connect(address, deadline))

    def disconnect(self, name: str, *, reason: str) -> None:
        """Fence a name: it is cut off, owns no key any more, and can never connect again.

        After the return none of its bytes lands over a socket. What was offered to it through
        shared memory must not be reused until its process is dead. `on_peer_lost` is not called.

        Raises:
            ValueError: our own name.
        """
        if check_name(name) == self.name:
            raise ValueError("an engine does not fence itself")
        self._table.fence(name, check_type("reason", reason, str))
        try:
            self._loop.ask(lambda: self._links.fence(name, reason))
        finally:
            # Last: what it still asks for finds a closed connection, not an unknown key.
            self._offers.withdraw_peer(name)

    def peer(self, name: str) -> Peer:
        """Return a peer that is connected, or this process itself.

        Raises:
            PeerUnknown: no such peer, or it is gone.
        """
        if name == self.name:
            return Peer(name, self.address, "local", lambda: self._state == "open")
        if (link := self._table.get(name)) is None or link.state is not LinkState.READY:
            raise PeerUnknown(name)
        return self._public(link)

    def process_of(self, name: str) -> PeerProcess | None:
        """Return the process of a same-host peer; None of one that reaches our memory by tcp alone.

        Once it has `exited` and its link is closed, nothing of what it writes can land any more.

        Raises:
            OSError: nobody here can tell when it ends: it writes by RDMA, or is not visible.
            PeerLost, PeerUnknown: nobody there, or no more.
        """
        link = self._table.ready(name)
        if link.backend == "tcp" and link.rdma is None:
            return None
        try:
            return link.find_process()
        except ProcessLookupError as error:
            raise PeerLost(name, "its process has ended") from error

    def peers(self) -> tuple[Peer, ...]:
        """Return the connected peers, in no order."""
        return tuple(self._public(link) for link in self._table.links() if link.alive)

    def notify(self, peer: str | Peer, payload: bytes) -> None:
        """Send a small message to the peer's `on_notify` handlers.

        Reliable and in order per peer while the connection lives; not ordered against writes.

        Raises:
            ValueError: larger than `notify_bytes_max`.
            TransferTimeout: the peer does not take what was sent before.
            PeerLost, PeerUnknown: nobody there.
        """
        name = name_of(peer)
        if not isinstance(payload, bytes | bytearray | memoryview):
            raise TypeError(f"payload must be bytes, got {type(payload).__name__}")
        if len(payload) > self._config.notify_bytes_max:
            raise ValueError(f"{len(payload)} bytes exceed {self._config.notify_bytes_max}")
        if name == self.name:
            self._links.handlers.deliver_soon(name, bytes(payload))
            return
        link = self._table.ready(name)
        started = time.monotonic()
        # The engine's own thread must not wait for room that only it can make.
        limit = 0.0 if self._loop.is_current else self._config.operation_timeout_s
        frame = encode_control(ControlKind.NOTIFY, bytes(payload))
        if not link.control.send(frame, deadline=started + limit):
            self._table.ready(name)
            elapsed_s = time.monotonic() - started
            raise TransferTimeout(name, "notify", backend=link.backend, elapsed_s=elapsed_s)

    def on_notify(self, handler: NotifyHandler) -> None:
        """Call `handler(peer, payload)` for each notify, on the engine's thread. Before `open`.

        Every handler sees every notify, and takes what is meant for it; what it returns is ignored.
        """
        self._links.handlers.notify.append(check_handler(handler))

    def on_peer_lost(self, handler: LostHandler) -> None:
        """Call `handler(peer, evidence)` once per lost peer, on the engine's thread."""
        self._links.handlers.lost.append(check_handler(handler))

    def explain(self, peer: str | Peer, memory: Region | RegionKey | None = None) -> Explanation:
        """Say which backend and rails carry bytes to a peer, and why others are not used.

        Args:
            peer: who.
            memory: our region, or the peer's key, that is to be moved.

        Raises:
            PeerLost, PeerUnknown: nobody there.
        """
        name = name_of(peer)
        if memory is not None and not isinstance(memory, RegionKey):
            check_type("memory", memory, Region)
        if name == self.name:
            return explain_self(name)
        link = self._table.ready(name)
        return explain_link(self._links.opener.surroundings(link), link, memory)

    def statistics(self) -> TransferStatistics:
        """Return what was done so far."""
        self._links.service.collect()
        self._tally.took_short_way(self._table.short_way.take_counts())
        self._tally.copied_at_once(self._table.short_way.take_copied())
        return self._tally.snapshot(
            rails=self._links.rails(),
            immediates_received=self._board.num_received,
            peers=sum(link.alive for link in self._table.links()),
            offers=len(self._offers),
        )

    def _on_tick(self, now: float) -> bool:
        self._rendezvous.expire(now)
        self._staging.expire(now)
        # Nobody may be waiting for immediates for long: keep the peers' sockets from filling.
        self._board.drain()
        return self._links.expire(now) or self._rendezvous.is_busy or self._staging.is_busy

    def _public(self, link: PeerLink) -> Peer:
        return Peer(link.name, link.facts.address, link.backend, lambda: link.alive)

    def _abandon(self) -> None:
        """In a forked child: close our copies of the descriptors, touching no lock."""
        self._state = "forked"
        self._loop.failure = EngineClosed(REASON)
        self._rendezvous.abandon()
        for link in self._table.links():
            link.abandon()
        self._board.abandon()
        self._links.service.abandon()
        self._staging.abandon()
        self._loop.abandon()
        disown(self._mover, keep=frozenset({"_name", "_timeout_s"}))
        disown(self, keep=frozenset({"name", "_config", "_state"}))


def _abandon_all() -> None:
    for engine in list(_engines):
        engine._abandon()
    _engines.clear()


os.register_at_fork(after_in_child=_abandon_all)
