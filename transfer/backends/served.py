"""One data connection at the owner's end, in Python: requests are served one after the other."""

from __future__ import annotations

import select
import socket
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, Protocol

from transfer.backends.incoming import IncomingWrites
from transfer.backends.python_lane import memory_at
from transfer.connections.tls_socket import TlsSocket, buffered, unsent
from transfer.landing import IOVEC_MAX, Landing, gather, scatter, spread
from transfer.memory.address_space import is_mapped
from transfer.memory.region import Access
from transfer.pieces import Ints, out_of_bounds
from transfer.wire import (
    REQUEST,
    Reply,
    Request,
    RequestKind,
    Status,
    parse_pieces,
    parse_request,
)

IMMEDIATE, CLOSED, MAP, NOTES = range(4)

# Bytes taken from one connection before the others get their turn.
TURN_BYTES: Final = 256 << 10
NEEDED: Final = {RequestKind.WRITE: Access.WRITE, RequestKind.READ: Access.READ}


class Desk(Protocol):
    """What a connection needs of its server."""

    bytes_served: int
    refused: int

    def check_size(self, request: Request) -> None:
        """Refuse what is larger than agreed. Raises `ProtocolViolation`."""

    def find_offer(self, token: bytes, to: str) -> Offered | None:
        """Return what is offered to the peer that asks."""

    def tell(self, kind: int, connection: ServedConnection, detail: object) -> None:
        """Report an event."""

    def keep_note(self, connection: ServedConnection, note: bytes) -> None:
        """Keep a note whose bytes are in place."""


@dataclass(slots=True, eq=False)
class Offered:
    """Memory that peers of one name may access. `live` turns False once and for all."""

    to: str
    address: int
    nbytes: int
    access: Access
    live: bool = True


@dataclass(slots=True, eq=False)
class ServedPeer:
    """One life of a peer."""

    id: int
    name: str
    writes: IncomingWrites = field(default_factory=IncomingWrites)
    connections: set[ServedConnection] = field(default_factory=set)


class ServedConnection:
    """Under the server's lock."""

    def __init__(self, sock: socket.socket, peer: ServedPeer, desk: Desk, ident: int) -> None:
        self.sock = sock
        self.peer = peer
        self.id = ident
        self.asking: Request | None = None
        self._desk = desk
        self._outbox: deque[memoryview] = deque()
        # What the outbox reads from; it must not be sent once that was withdrawn.
        self._source: Offered | None = None
        # Something may have been read already that `epoll` does not see.
        self._resumes = isinstance(sock, TlsSocket)
        self.interest = self.events
        self._await_request()

    def serve(self) -> None:
        """Go as far as the socket and a turn's bytes allow.

        Raises:
            ProtocolViolation, OSError: the connection is over.
        """
        budget = TURN_BYTES
        self._resumes = False
        try:
            while self.asking is None:
                self._guard()
                while not self._landing.remaining and not self._outbox and self.asking is None:
                    self._then()
                self._send()
                if self._outbox or self.asking is not None:
                    return
                if unsent(self.sock) or (budget <= 0 and not buffered(self.sock)):
                    return
                received = self._landing.receive(self.sock)
                if not received:
                    raise ConnectionError("closed by the other side")
                budget -= received
        except BlockingIOError:
            pass

    @property
    def events(self) -> int:
        """What to wait for."""
        if self.asking is not None:
            return 0
        if self._outbox or unsent(self.sock):
            return select.EPOLLOUT
        return select.EPOLLIN | (select.EPOLLOUT if self._resumes else 0)

    def answer(self, status: Status, payload: bytes, descriptor: int) -> None:
        """Answer the map request; a few bytes, which fit into any socket's empty buffer."""
        assert self.asking is not None
        reply = _reply(self.asking, status, len(payload)).encode() + payload
        rights = [] if descriptor < 0 else [
            (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [descriptor]))
        ]  # fmt: skip
        if self.sock.sendmsg([reply], rights) != len(reply):
            raise ConnectionError("send failed")
        self.asking = None
        self._resumes = isinstance(self.sock, TlsSocket)
        self._await_request()

    def _send(self) -> None:
        while self._outbox:
            if self._source is not None and not self._source.live:
                raise ConnectionError("a key was withdrawn while its memory was read")
            sent = self.sock.sendmsg(list(islice(self._outbox, IOVEC_MAX)))
            while self._outbox and sent >= self._outbox[0].nbytes:
                sent -= self._outbox.popleft().nbytes
            if sent:
                self._outbox[0] = self._outbox[0][sent:]
        if isinstance(self.sock, TlsSocket):
            self.sock.flush()
        self._source = None

    def _await_request(self) -> None:
        header = bytearray(REQUEST.size)
        self._receive(Landing([memoryview(header)]), lambda: self._on_header(header))

    def _receive(
        self,
        landing: Landing,
        then: Callable[[], None],
        guard: Callable[[], None] = lambda: None,
    ) -> None:
        # The guard looks before each step whether it may still be taken.
        self._landing, self._then, self._guard = landing, then, guard

    def _on_header(self, header: bytearray) -> None:
        request = parse_request(bytes(header))
        self._desk.check_size(request)
        table = bytearray(16 * request.num_pieces)
        self._receive(Landing([memoryview(table)]), lambda: self._on_pieces(request, table))

    def _on_pieces(self, request: Request, table: bytearray) -> None:
        offsets, lengths = parse_pieces(bytes(table), request.nbytes)
        if request.kind is RequestKind.MAP:
            self.asking = request
            detail = (request.transfer_id, request.slice_idx, request.token)
            self._desk.tell(MAP, self, detail)
            return
        offer = self._desk.find_offer(request.token, self.peer.name)
        status = _judge(request, offer, offsets, lengths)
        if status is not Status.OK or offer is None:
            self._desk.refused += 1
            self._drop_payload(request, status)
        elif request.kind is RequestKind.WRITE:
            self._land(request, offer, offsets, lengths)
        else:
            self._desk.bytes_served += request.nbytes
            self._source = offer
            memory = memory_at(offer.address, offsets, lengths)
            self._reply(request, Status.OK, gather(memory, offsets, lengths))

    def _drop_payload(self, request: Request, status: Status) -> None:
        writes = request.kind is RequestKind.WRITE
        nbytes = request.nbytes + request.note_bytes if writes else 0
        self._receive(Landing.nowhere(nbytes), lambda: self._reply(request, status, []))

    def _land(self, request: Request, offer: Offered, offsets: Ints, lengths: Ints) -> None:
        if not self.peer.writes.begin(request, self):
            self._drop_payload(request, Status.OK)
            return
        memory = memory_at(offer.address, offsets, lengths)
        places, packed = scatter(memory, offsets, lengths)
        note = bytearray(request.note_bytes)

        def guard() -> None:
            writes = self.peer.writes
            if offer.live and writes.is_receiver(request, self):
                return
            if offer.live and not writes.is_in_place(request):
                # It may not be called in place while another connection still brings it.
                raise ConnectionError("its slice came again over another connection")
            status = Status.OK if offer.live else Status.UNKNOWN
            rest = Landing.nowhere(self._landing.remaining)
            self._receive(rest, lambda: self._reply(request, status, []))

        def landed() -> None:
            if packed is not None:
                spread(memory, packed, offsets, lengths)
            self._desk.bytes_served += request.nbytes
            if self.peer.writes.finish(request, self):
                if request.immediate is not None:
                    self._desk.tell(IMMEDIATE, self, request.immediate)
                if note:
                    self._desk.keep_note(self, bytes(note))
            self._reply(request, Status.OK, [])

        self._receive(Landing([*places, memoryview(note)]), landed, guard)

    def _reply(self, request: Request, status: Status, payload: list[memoryview]) -> None:
        nbytes = sum(part.nbytes for part in payload)
        header = memoryview(_reply(request, status, nbytes).encode())
        self._outbox.extend([header, *payload])
        self._await_request()


def _judge(request: Request, offer: Offered | None, offsets: Ints, lengths: Ints) -> Status:
    if offer is None:
        return Status.UNKNOWN
    if NEEDED[request.kind] not in offer.access:
        return Status.NO_RIGHT
    if out_of_bounds(offsets, lengths, offer.nbytes) is not None:
        return Status.OUT_OF_BOUNDS
    return Status.OK if is_mapped(offer.address, offer.nbytes) else Status.GONE


def _reply(request: Request, status: Status, nbytes: int) -> Reply:
    return Reply(
        status=status,
        transfer_id=request.transfer_id,
        slice_idx=request.slice_idx,
        nbytes=nbytes,
    )
