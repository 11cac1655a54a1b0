"""One connection while its two ends prove themselves: a socket that feeds a handshake."""

from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from transfer.connections.handshake import AcceptorHandshake, Facts, Handshake, Purpose
from transfer.connections.tls import explain
from transfer.connections.tls_socket import TlsSocket, unsent
from transfer.errors import HandshakeRefused, PeerUnreachable, ProtocolViolation
from transfer.event_loop import WRITABLE

HANG_UP: Final = "closed by the other side during the handshake (another cluster secret?)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeted:
    """A connection whose other end has proved itself; see `Handshake.session`."""

    sock: socket.socket
    purpose: Purpose
    name: str
    facts: Facts
    session: bytes


Outcome = Greeted | HandshakeRefused


class Negotiation:
    """One connection in its handshake."""

    def __init__(
        self,
        sock: socket.socket,
        machine: Handshake,
        *,
        address: str,
        deadline: float,
        on_outcome: Callable[[Negotiation, Outcome], None],
        first: bytes = b"",
    ) -> None:
        self.sock = sock
        self.machine = machine
        self.address = address
        self.deadline = deadline
        self._on_outcome = on_outcome
        self._first = first
        self._connecting = bool(first)
        self._begun = False
        self.over = False

    def on_event(self, events: int) -> None:
        """The socket is ready: connected, or something to read."""
        try:
            if self._connecting:
                self._check_connected()
            self._begin()
            if events & ~WRITABLE:
                self._read()
        except BlockingIOError:
            pass
        except ProtocolViolation as error:
            self.refuse(error.problem)
        except HandshakeRefused as error:
            self.refuse(error.reason)
        except ssl.SSLError as error:
            self.refuse(f"TLS: {explain(error)}")
        except OSError as error:
            self.refuse(error.strerror or str(error), unreachable=True)

    def refuse(self, reason: str, *, unreachable: bool = False) -> None:
        """End without a connection."""
        kind = PeerUnreachable if unreachable else HandshakeRefused
        self.end(kind(self.address, reason, self.machine.peer_name))

    def end(self, outcome: Outcome) -> None:
        """Report once."""
        if not self.over:
            self.over = True
            self._on_outcome(self, outcome)

    def send(self, data: bytes) -> None:
        """Send a message of the handshake: far smaller than an empty socket's buffer."""
        if data and (self.sock.send(data) != len(data) or unsent(self.sock)):
            raise ConnectionError(errno.ENOBUFS, "a handshake message did not fit")

    def _check_connected(self) -> None:
        code = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, errno.errorcode.get(code, str(code)))
        self._connecting = False

    def _begin(self) -> None:
        """Speak first, if we have called; behind the TLS handshake, if there is one."""
        if self._begun:
            return
        if isinstance(self.sock, TlsSocket):
            self.sock.secure()
            self.machine.bind(self.sock.channel())
        self._begun = True
        self.send(self._first)

    def _read(self) -> None:
        while not self.over:
            data = self.sock.recv(self.machine.needed)
            if not data:
                self.refuse(HANG_UP)
                return
            self.send(self.machine.feed(data))
            if isinstance(self.machine, AcceptorHandshake) and self.machine.refused is not None:
                self.refuse(self.machine.refused)
            elif self.machine.done:
                facts = self.machine.peer_facts
                assert facts is not None
                self.end(Greeted(sock=self.sock, purpose=self.machine.purpose,
                                 name=self.machine.peer_name, facts=facts,
                                 session=self.machine.session))  # fmt: skip
