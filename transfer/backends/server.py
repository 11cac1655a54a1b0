"""The owner's end of data connections: peers write and read what we offered them.

`PythonServer` is what the compiled `Server` does, for machines without a compiler; both pass the
same tests. Each access is checked against the offer it names: made to this peer, still live,
with the right, inside the window.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from itertools import count
from typing import Final, Protocol

from transfer import native
from transfer.backends.served import CLOSED, NOTES, Offered, ServedConnection, ServedPeer
from transfer.connections.stream import Stream
from transfer.errors import ProtocolViolation
from transfer.memory.region import Access
from transfer.wire import PAYLOAD_BYTES_MAX, SLICE_PIECES, SLICES_MAX, Request, Status

# Kind (`IMMEDIATE`, `CLOSED`, `MAP`, `NOTES`), peer, connection, and: the immediate; evidence and
# whether it was nonsense; transfer, slice and token of a map request; None.
Event = tuple[int, int, int, object]
# The peer that left it, nanoseconds of the monotonic clock when its bytes were in place, its bytes.
LeftNote = tuple[str, int, bytes]
# There is an event when so many have been left since the last one, or so many bytes.
NOTES_TOLD: Final = 1024
NOTES_TOLD_BYTES: Final = 1 << 20


class ServerLike(Protocol):
    """What `PythonServer` and the compiled server have in common. Thread-safe."""

    def open_peer(self, name: str, /) -> int:
        """Make the place of one life of a peer; returns its id."""

    def close_peer(self, peer_id: int, /) -> None:
        """Close all its connections and forget it; nothing of it lands after the return."""

    def attach(self, peer_id: int, fd: int, /) -> int:
        """Serve a connection; returns its id. The descriptor is the server's, even on failure.

        Raises:
            OSError: no such peer, or out of resources.
        """

    def detach(self, connection_id: int, /) -> None:
        """Reset a connection; idempotent."""

    def connections(self, peer_id: int, /) -> list[int]:
        """Return the ids of a peer's connections."""

    def add_offer(self, token: bytes, to: str, address: int, nbytes: int, rights: int, /) -> None:
        """Let the peers named `to` access memory, which the caller keeps alive."""

    def withdraw_offer(self, token: bytes, /) -> None:
        """Make a token void; idempotent. Its memory is not touched after the return."""

    def run(self, timeout_s: float, /) -> None:
        """Serve until there is an event, `wake` is called or time is over. One thread at a time."""

    def wake(self) -> None:
        """Make `run` return."""

    def take_events(self) -> list[Event]:
        """Return what has happened since the last call."""

    def take_notes(self) -> list[LeftNote]:
        """Return what peers have left since the last call, in the order of arrival."""

    def take_counters(self) -> tuple[int, int, int]:
        """Return bytes served, requests refused, nonsense, since the last call."""

    def answer(self, connection_id: int, status: int, payload: bytes, descriptor: int, /) -> None:
        """Answer a map request. The descriptor, or -1, stays the caller's."""

    def close(self) -> None:
        """Close all connections and forget all offers; no thread may be in `run`. Idempotent."""

    def abandon(self) -> None:
        """Close the descriptors only, touching no lock: the way out after a fork."""


class PythonServer:
    """All data connections of an engine. One lock: withdrawing waits for the step in progress."""

    def __init__(self, slice_bytes_max: int, slice_pieces_max: int, slices_max: int) -> None:
        self._limits = (slice_bytes_max, slice_pieces_max, slices_max)
        self._lock = threading.Lock()
        self._epoll = select.epoll()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wakeup, select.EPOLLIN)
        self._ids = count(1)
        self._offers: dict[bytes, Offered] = {}
        self._peers: dict[int, ServedPeer] = {}
        self._connections: dict[int, ServedConnection] = {}  # by descriptor
        self._events: list[Event] = []
        self._notes: list[LeftNote] = []
        self._untold = [0, 0]  # notes, and their bytes
        self._closed = False
        self.bytes_served = 0
        self.refused = 0
        self._malformed = 0

    def open_peer(self, name: str, /) -> int:
        """Make the place of one life of a peer."""
        with self._lock:
            peer = ServedPeer(next(self._ids), name)
            self._peers[peer.id] = peer
            return peer.id

    def close_peer(self, peer_id: int, /) -> None:
        """Close all its connections and forget it."""
        with self._lock:
            peer = self._peers.pop(peer_id, None)
            for connection in list(peer.connections) if peer else []:
                self._end(connection)

    def attach(self, peer_id: int, fd: int, /) -> int:
        """Serve a connection."""
        return self.attach_socket(peer_id, socket.socket(fileno=fd))

    def attach_socket(self, peer_id: int, sock: socket.socket) -> int:
        """Serve a connection that is more than its descriptor: an encrypted one."""
        sock.setblocking(False)
        with self._lock:
            peer = self._peers.get(peer_id)
            if peer is None or self._closed:
                sock.close()
                raise OSError(errno.ENOTCONN, "no such peer")
            connection = ServedConnection(sock, peer, self, next(self._ids))
            peer.connections.add(connection)
            self._connections[sock.fileno()] = connection
            self._epoll.register(sock.fileno(), connection.interest)
            return connection.id

    def detach(self, connection_id: int, /) -> None:
        """Reset a connection."""
        with self._lock:
            connection = self._find(connection_id)
            if connection is not None:
                self._end(connection, abort=True)

    def connections(self, peer_id: int, /) -> list[int]:
        """Return the ids of a peer's connections."""
        with self._lock:
            peer = self._peers.get(peer_id)
            return [connection.id for connection in peer.connections] if peer else []

    def add_offer(self, token: bytes, to: str, address: int, nbytes: int, rights: int, /) -> None:
        """Let peers access memory."""
        with self._lock:
            if token in self._offers:
                raise ValueError("the token is in use")
            self._offers[token] = Offered(to, address, nbytes, Access(rights))

    def withdraw_offer(self, token: bytes, /) -> None:
        """Make a token void."""
        with self._lock:
            offer = self._offers.pop(token, None)
            if offer is not None:
                offer.live = False

    def run(self, timeout_s: float, /) -> None:
        """Serve until there is an event."""
        deadline = time.monotonic() + timeout_s
        woken = False
        while not self._events and not woken:
            remaining = deadline - time.monotonic()
            for fd, events in self._epoll.poll(max(remaining, 0.0)):
                if fd == self._wakeup:
                    os.eventfd_read(self._wakeup)
                    woken = True
                    continue
                with self._lock:
                    # Looked up again each time: another thread may have closed it.
                    connection = self._connections.get(fd)
                    if connection is not None:
                        self._serve(connection, events)
            if remaining <= 0:
                return

    def wake(self) -> None:
        """Make `run` return."""
        if not self._closed:
            os.eventfd_write(self._wakeup, 1)

    def take_events(self) -> list[Event]:
        """Return what has happened."""
        with self._lock:
            events, self._events = self._events, []
            return events

    def take_notes(self) -> list[LeftNote]:
        """Return what peers have left."""
        with self._lock:
            notes, self._notes, self._untold = self._notes, [], [0, 0]
            return notes

    def take_counters(self) -> tuple[int, int, int]:
        """Return bytes served, requests refused, nonsense."""
        with self._lock:
            counters = self.bytes_served, self.refused, self._malformed
            self.bytes_served = self.refused = self._malformed = 0
            return counters

    def answer(self, connection_id: int, status: int, payload: bytes, descriptor: int, /) -> None:
        """Answer a map request."""
        with self._lock:
            connection = self._find(connection_id)
            if connection is None or connection.asking is None:
                return
            try:
                connection.answer(Status(status), payload, descriptor)
            except OSError as error:
                self._fail(connection, str(error))
                return
            self._update_interest(connection)

    def close(self) -> None:
        """Close all connections and forget all offers."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for connection in list(self._connections.values()):
                self._end(connection)
            self._peers.clear()
            self._offers.clear()
            self._close_descriptors()

    def abandon(self) -> None:
        """Close the descriptors only."""
        if not self._closed:
            self._closed = True
            for connection in self._connections.values():
                connection.sock.close()
            self._close_descriptors()

    def check_size(self, request: Request) -> None:
        """Refuse what is larger than agreed. For the connections."""
        sizes = (request.nbytes, request.num_pieces, request.num_slices)
        if any(size > limit for size, limit in zip(sizes, self._limits, strict=True)):
            raise ProtocolViolation("a slice of too many pieces or bytes")

    def find_offer(self, token: bytes, to: str) -> Offered | None:
        """Return what is offered to the peer that asks. For the connections."""
        offer = self._offers.get(token)
        return offer if offer is not None and offer.to == to else None

    def tell(self, kind: int, connection: ServedConnection, detail: object) -> None:
        """Report an event. For the connections."""
        self._events.append((kind, connection.peer.id, connection.id, detail))

    def keep_note(self, connection: ServedConnection, note: bytes) -> None:
        """Keep a note. For the connections."""
        self._notes.append((connection.peer.name, time.monotonic_ns(), note))
        self._untold = [self._untold[0] + 1, self._untold[1] + len(note)]
        if self._untold[0] >= NOTES_TOLD or self._untold[1] >= NOTES_TOLD_BYTES:
            self._untold = [0, 0]
            self.tell(NOTES, connection, None)

    def _find(self, connection_id: int) -> ServedConnection | None:
        return next((c for c in self._connections.values() if c.id == connection_id), None)

    def _serve(self, connection: ServedConnection, events: int) -> None:
        try:
            if connection.asking is not None and events & ~select.EPOLLIN:
                raise ConnectionError("closed by the other side")
            connection.serve()
        except ProtocolViolation as error:
            self._malformed += 1
            self._fail(connection, f"malformed: {error.problem}", malformed=True)
        except OSError as error:
            self._fail(connection, str(error))
        else:
            self._update_interest(connection)

    def _update_interest(self, connection: ServedConnection) -> None:
        if connection.events != connection.interest:
            connection.interest = connection.events
            self._epoll.modify(connection.sock.fileno(), connection.interest)

    def _fail(
        self, connection: ServedConnection, evidence: str, *, malformed: bool = False
    ) -> None:
        self.tell(CLOSED, connection, (evidence, malformed))
        self._end(connection)

    def _end(self, connection: ServedConnection, *, abort: bool = False) -> None:
        connection.peer.connections.discard(connection)
        del self._connections[connection.sock.fileno()]
        self._epoll.unregister(connection.sock.fileno())
        Stream.discard(connection.sock, abort=abort)

    def _close_descriptors(self) -> None:
        self._epoll.close()
        os.close(self._wakeup)


def make_server(*, encrypted: bool = False) -> ServerLike:
    """Return the compiled server, or the one in Python: where TLS is on, or nothing was built."""
    kind: Callable[[int, int, int], ServerLike] = (
        PythonServer if encrypted or native.compiled is None else native.compiled.Server
    )
    return kind(PAYLOAD_BYTES_MAX, SLICE_PIECES, SLICES_MAX)
