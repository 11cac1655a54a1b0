"""Listening, calling and being called: every connection begins here, with a handshake.

Runs on the engine's thread. When two engines call each other at once, exactly one of the two
control connections comes about:

  * who is about to prove itself to a peer it has already accepted, or is connected to, hangs up;
  * who is asked by a peer to which it has already proved itself refuses if its own name is the
    smaller one (its own call goes on), and accepts otherwise (the peer refuses that call).

Whoever is refused as a duplicate waits for the other connection.
"""

from __future__ import annotations

import errno
import logging
import secrets
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from transfer.connections.congestion import UNPACED, congestion_of, is_paced, set_congestion
from transfer.connections.handshake import (
    AcceptorHandshake,
    DialerHandshake,
    Facts,
    Handshake,
    Purpose,
    Sessions,
    shown,
)
from transfer.connections.negotiation import Greeted, Negotiation, Outcome
from transfer.connections.stream import Stream
from transfer.connections.tls import Credentials
from transfer.connections.tls_socket import TlsSocket
from transfer.errors import HandshakeRefused, PeerUnreachable
from transfer.event_loop import READABLE, WRITABLE, EventLoop
from transfer.host import address_of, host_identity, share_machine
from transfer.statistics import Tally

logger = logging.getLogger(__name__)

NEGOTIATIONS_MAX: Final = 256
BACKLOG: Final = 256
DUPLICATE: Final = "duplicate"
OUT_OF_RESOURCES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Rendezvous:
    """The listeners and all handshakes in progress.

    Args:
        standing: whether a control connection with a name stands.
        admit: why a caller is not wanted, None if it is: (purpose, name).
        install: takes over an accepted connection, before its dialer hears of it.
        sessions: the session key of the control connection that stands with a name.

    Attributes:
        credentials: for TLS between hosts; None: it is off.
    """

    def __init__(
        self,
        loop: EventLoop,
        tally: Tally,
        *,
        secret: bytes,
        name: str,
        timeout_s: float,
        standing: Callable[[str], bool],
        admit: Callable[[Purpose, str], str | None],
        install: Callable[[Greeted], None],
        sessions: Sessions,
    ) -> None:
        self._loop = loop
        self._tally = tally
        self._secret = secret
        self._name = name
        self._timeout_s = timeout_s
        self._standing = standing
        self._admit = admit
        self._install = install
        self._sessions = sessions
        self.credentials: Credentials | None = None
        self._negotiations: set[Negotiation] = set()
        # Also those that were given away, as long as they are nobody else's yet.
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._listeners: list[socket.socket] = []
        # Not watched until the next tick: out of descriptors.
        self._resting: list[socket.socket] = []
        # What the system has, where callers of this machine are spared it.
        self._spared = b""

    def listen(
        self, host: str, *, rails: Sequence[str] = (), shared_memory: bool, tcp: bool
    ) -> Facts:
        """Open the listeners, one per distinct address; before the loop starts."""
        told = {local: self._listen_on(local) for local in dict.fromkeys((host, *rails))}
        # An abstract name: it lives in the kernel, and goes with the process.
        local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listeners.append(local)
        local_name = f"moe-runtime-{secrets.token_hex(16)}"
        local.bind("\0" + local_name)
        for sock in self._listeners:
            sock.setblocking(False)
            sock.listen(BACKLOG)
        self.facts = Facts(
            address=told[host],
            host=host_identity(),
            local_socket=local_name,
            shared_memory=shared_memory,
            tcp=tcp,
            rails=tuple(told[local] for local in rails),
        )
        return self.facts

    def _listen_on(self, host: str) -> str:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        self._listeners.append(listener)
        try:
            listener.bind((host, 0))
        except OSError as error:
            reason = error.strerror or str(error)
            raise OSError(error.errno, f"cannot listen on {host}: {reason}") from error
        system = congestion_of(listener)
        if is_paced(system):
            self._spared = system
            set_congestion(listener, UNPACED)
        # Numeric: whoever is told it must not have to ask a resolver.
        return "{}:{}".format(*listener.getsockname()[:2])

    def start(self) -> None:
        """Begin to accept."""
        for sock in self._listeners:
            self._loop.watch(sock, partial(self._accept, sock), READABLE)

    def close(self) -> None:
        """Close the listeners and every handshake in progress."""
        for sock in self._listeners:
            self._loop.unwatch(sock)
            sock.close()
        self._resting.clear()
        for negotiation in list(self._negotiations):
            negotiation.refuse("the engine was closed")

    def abandon(self) -> None:
        """Close the descriptors only: the way out after a fork."""
        for sock in [*self._listeners, *self._sockets]:
            sock.close()

    def dial(
        self,
        target: str,
        purpose: Purpose,
        *,
        name: str | None,
        on_outcome: Callable[[Outcome], None],
        source: str | None = None,
        within_machine: bool = False,
    ) -> None:
        """Call "host:port", or "@name" for a local socket; the outcome comes by callback.

        With `name`, anybody else who answers is turned away. With `source` the call is made
        from this local address. `within_machine`: to a process of the same one.
        """

        def admit(purpose: Purpose, found: str) -> str | None:
            if name is not None and found != name:
                return f"{found} answered instead of {name}"
            return self._may_prove(purpose, found)

        machine = DialerHandshake(
            secret=self._secret,
            name=self._name,
            facts=self.facts,
            admit=admit,
            sessions=self._sessions,
        )
        try:
            sock, code = _begin_to_connect(target, source, UNPACED if within_machine else b"")
        except PeerUnreachable as error:
            on_outcome(error)
            return

        def ended(negotiation: Negotiation, outcome: Outcome) -> None:
            self._forget(negotiation, keep_socket=isinstance(outcome, Greeted))
            on_outcome(outcome)

        sock = self._encrypt(sock, server_side=False)
        negotiation = self._begin(sock, machine, target, ended, machine.start(purpose))
        if code not in (0, errno.EINPROGRESS):
            negotiation.refuse(errno.errorcode.get(code, str(code)), unreachable=True)
            return

        def on_event(events: int) -> None:
            self._loop.change(sock, READABLE)
            negotiation.on_event(events)

        self._loop.watch(sock, on_event, READABLE | WRITABLE)

    @property
    def is_busy(self) -> bool:
        """Whether a handshake is under way, or one has to wait."""
        return bool(self._negotiations or self._resting)

    def expire(self, now: float) -> None:
        """End handshakes that take too long. At every tick."""
        for negotiation in [n for n in self._negotiations if n.deadline <= now]:
            negotiation.refuse("no answer in time", unreachable=True)
        for sock in self._resting:
            self._loop.watch(sock, partial(self._accept, sock), READABLE)
        self._resting.clear()

    def _encrypt(self, sock: socket.socket, *, server_side: bool) -> socket.socket:
        if self.credentials is None or sock.family == socket.AF_UNIX:
            return sock
        return TlsSocket(sock, self.credentials, server_side=server_side)

    def _begin(
        self,
        sock: socket.socket,
        machine: Handshake,
        address: str,
        on_outcome: Callable[[Negotiation, Outcome], None],
        first: bytes = b"",
    ) -> Negotiation:
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        negotiation = Negotiation(
            sock,
            machine,
            address=address,
            deadline=time.monotonic() + self._timeout_s,
            on_outcome=on_outcome,
            first=first,
        )
        self._negotiations.add(negotiation)
        self._sockets.add(sock)
        return negotiation

    def _accept(self, listener: socket.socket, _events: int) -> None:
        try:
            sock, _ = listener.accept()
        except OSError as error:
            # The caller hung up: the next one may succeed. Without descriptors, though, it would
            # stay ready for ever, and this thread would do nothing but look at it.
            if error.errno in OUT_OF_RESOURCES:
                self._loop.unwatch(listener)
                self._resting.append(listener)
            return
        self._make_room()
        sock.setblocking(False)
        machine = AcceptorHandshake(
            secret=self._secret,
            name=self._name,
            facts=self.facts,
            admit=self._answer,
            sessions=self._sessions,
        )
        sock = self._encrypt(sock, server_side=True)
        negotiation = self._begin(sock, machine, "", self._accepted)
        self._loop.watch(sock, negotiation.on_event, READABLE)

    def _make_room(self) -> None:
        """Give up the oldest silent callers, so that they lock out nobody who speaks."""
        calls = [(m.accepted, n.deadline, n)
                 for n in self._negotiations
                 if isinstance(m := n.machine, AcceptorHandshake)]  # fmt: skip
        if len(calls) >= NEGOTIATIONS_MAX:
            min(calls, key=lambda call: call[:2])[2].refuse("too many callers")

    def _accepted(self, negotiation: Negotiation, outcome: Outcome) -> None:
        self._forget(negotiation, keep_socket=isinstance(outcome, Greeted))
        if isinstance(outcome, HandshakeRefused):
            if outcome.reason != DUPLICATE:
                self._tally.count("refused_handshakes")
            logger.debug("refused a caller: %s", outcome.reason)
            return
        machine = negotiation.machine
        assert isinstance(machine, AcceptorHandshake)
        if self._spared and not share_machine(outcome.facts.host, self.facts.host):
            set_congestion(outcome.sock, self._spared)
        self._install(outcome)
        try:
            negotiation.send(machine.ready())
        except OSError as error:
            logger.debug("%s hung up before it was told: %s", outcome.name, error)

    def _forget(self, negotiation: Negotiation, *, keep_socket: bool) -> None:
        self._negotiations.discard(negotiation)
        self._loop.unwatch(negotiation.sock)
        if not keep_socket:
            Stream.discard(negotiation.sock)

    def _answer(self, purpose: Purpose, name: str) -> str | None:
        if name == self._name:
            return "a name that is already mine"
        if purpose is Purpose.CONTROL and (self._standing(name) or self._is_accepting(name)):
            return DUPLICATE
        if purpose is Purpose.CONTROL and self._has_proved_to(name) and self._name < name:
            return DUPLICATE
        return self._admit(purpose, name)

    def _may_prove(self, purpose: Purpose, name: str) -> str | None:
        if name == self._name:
            return "that is my own address"
        if purpose is Purpose.CONTROL and (self._standing(name) or self._is_accepting(name)):
            return DUPLICATE
        return self._admit(purpose, name)

    def _is_accepting(self, name: str) -> bool:
        return any(
            isinstance(m := n.machine, AcceptorHandshake)
            and m.purpose is Purpose.CONTROL
            and m.peer_name == name
            and m.accepted
            for n in self._negotiations
        )

    def _has_proved_to(self, name: str) -> bool:
        return any(
            isinstance(m := n.machine, DialerHandshake)
            and m.purpose is Purpose.CONTROL
            and m.peer_name == name
            for n in self._negotiations
        )


def _begin_to_connect(
    target: str, source: str | None, congestion: bytes
) -> tuple[socket.socket, int]:
    """Return a socket that is connecting, and what its first step said.

    With `congestion` that is its algorithm. Never asks a resolver: that would block.

    Raises:
        PeerUnreachable: a peer told an address that is none, or there are no descriptors left.
    """
    try:
        family, address = address_of(target)
        if family != socket.AF_UNIX:
            socket.getaddrinfo(address[0], None, flags=socket.AI_NUMERICHOST)
        sock = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, ValueError) as error:  # AddressInvalid is one
        raise PeerUnreachable(shown(target), f"unreachable: {error}") from error
    try:
        sock.setblocking(False)
        if congestion and family != socket.AF_UNIX:
            set_congestion(sock, congestion)
        if source is not None:
            sock.bind((source, 0))
        return sock, sock.connect_ex(address)
    except (OSError, ValueError) as error:  # no address at all: too long, for example
        sock.close()
        raise PeerUnreachable(shown(target), f"unreachable: {error}") from error
