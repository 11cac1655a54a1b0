"""The requesting half of data connections: slices of our writes and reads, sent to the owner.

A peer has several connections, opened at the first use, each with a few slices in flight. When
one breaks while the peer lives, its unfinished slices go out again over another; the owner drops
what it already has. Same-host peers use the same code over unix sockets, to map memory and for
memory that cannot be mapped.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from transfer.errors import (
    ProtocolViolation,
)
from transfer.event_loop import EventLoop
from transfer.landing import Landing, gather, scatter, spread
from transfer.rail import RailName, SliceSink
from transfer.slices import Operation, Slice
from transfer.statistics import Tally
from transfer.stream import Stream
from transfer.wire import (
    PLACE,
    REPLY,
    Reply,
    Request,
    RequestKind,
    Status,
    encode_pieces,
    parse_reply,
)

logger = logging.getLogger(__name__)

SLICES_IN_FLIGHT: Final = 4
OPERATIONS_MAX: Final = 256
REDIAL_S: Final = 0.05
TURN_BYTES: Final = 4 << 20


class RequestConnection:
    """One data connection to the owner. `send` from any thread under the rail's lock."""

    def __init__(self, sock: socket.socket, loop: EventLoop, rail: TcpRail) -> None:
        self._rail = rail
        self._descriptors = sock.family == socket.AF_UNIX
        self.in_flight: dict[tuple[int, int], Slice] = {}
        self.stream = Stream(
            sock,
            loop,
            on_readable=self._on_readable,
            on_broken=self._on_broken,
            outbox_bytes_max=1 << 62,  # bounded by the slices in flight
        )
        self._await_reply()

    def send(self, part: Slice) -> None:
        """Send one slice."""
        operation, pieces = part.operation, part.pieces
        write = operation.kind is RequestKind.WRITE
        request = Request(
            kind=operation.kind,
            transfer_id=operation.transfer_id,
            oldest=part.oldest,
            slice_idx=part.idx,
            num_slices=operation.num_slices,
            num_pieces=len(pieces),
            nbytes=part.nbytes,
            immediate=operation.immediate,
            token=operation.token,
        )
        remote = pieces.target_offsets if write else pieces.source_offsets
        head = request.encode() + encode_pieces(remote, pieces.lengths)
        payload: list[memoryview] = []
        if write and operation.region is not None:
            payload = gather(operation.region.array, pieces.source_offsets, pieces.lengths)
        self.in_flight[part.key] = part
        self.stream.send([head, *payload])

    def close(self) -> None:
        """Close without resending; what the kernel still holds is thrown away."""
        self.stream.close(abort=True)
        self._drop_descriptor()

    def _on_broken(self, evidence: str) -> None:
        self._drop_descriptor()
        self._rail.on_broken(self, evidence)

    def _drop_descriptor(self) -> None:
        if self._landing.descriptor >= 0:
            os.close(self._landing.descriptor)
            self._landing.descriptor = -1

    def _await_reply(self) -> None:
        header = bytearray(REPLY.size)
        self._landing = Landing([memoryview(header)])
        self._then: Callable[[], None] = lambda: self._on_header(header)

    def _on_readable(self) -> None:
        budget = TURN_BYTES
        try:
            while budget > 0 and not self.stream.closed:
                received = self._landing.receive(self.stream.sock, descriptors=self._descriptors)
                if not received:
                    self.stream.broken("closed by the other side")
                    return
                budget -= received
                while not self._landing.remaining and not self.stream.closed:
                    self._then()
        except BlockingIOError:
            pass
        except ProtocolViolation as error:
            self._rail.tally.count("malformed")
            self.stream.broken(str(error))
        except OSError as error:
            self.stream.broken(f"receive failed: {error}")

    def _on_header(self, header: bytearray) -> None:
        reply = parse_reply(bytes(header))
        descriptor = self._landing.descriptor
        found = self.in_flight.get((reply.transfer_id, reply.slice_idx))
        if found is None:
            raise ProtocolViolation(f"reply to slice {reply.slice_idx} that was not asked for")
        operation = found.operation
        expected = 0
        if reply.status is Status.OK and operation.kind is RequestKind.READ:
            expected = found.nbytes
        elif reply.status is Status.OK and operation.kind is RequestKind.MAP:
            expected = PLACE.size
        mapping = operation.kind is RequestKind.MAP and reply.status is Status.OK
        if reply.nbytes != expected or (descriptor >= 0) != mapping:
            raise ProtocolViolation(f"reply of {reply.nbytes} bytes, expected {expected}")
        if expected and operation.kind is RequestKind.READ:
            self._land(reply, found)
        elif expected:
            self._take_place(reply, operation, descriptor)
        else:
            self._finish(reply)

    def _land(self, reply: Reply, part: Slice) -> None:
        pieces, region = part.pieces, part.operation.region
        assert region is not None
        memory = region.array
        places, packed = scatter(memory, pieces.target_offsets, pieces.lengths)

        def landed() -> None:
            if packed is not None:
                spread(memory, packed, pieces.target_offsets, pieces.lengths)
            self._finish(reply)

        self._landing, self._then = Landing(places), landed

    def _take_place(self, reply: Reply, operation: Operation, descriptor: int) -> None:
        place = bytearray(PLACE.size)

        def placed() -> None:
            operation.place = (descriptor, *PLACE.unpack(place))
            self._landing.descriptor = -1  # the operation owns it now
            self._finish(reply)

        self._landing, self._then = Landing([memoryview(place)]), placed
        self._landing.descriptor = descriptor

    def _finish(self, reply: Reply) -> None:
        self._await_reply()
        self._rail.on_reply(self, reply)


class TcpRail:
    """A rail made of several connections, opened as they are needed.

    Args:
        sock: the first connection.
        dial: opens another one, and calls back on the engine's thread with the socket or None.
    """

    orders_immediates = True
    drops_late_writes = True

    def __init__(
        self,
        rail: RailName,
        sock: socket.socket,
        loop: EventLoop,
        sink: SliceSink,
        tally: Tally,
        *,
        num_connections: int,
        dial: Callable[[Callable[[socket.socket | None], None]], None],
    ) -> None:
        self.rail = rail
        self.tally = tally
        self._loop = loop
        self._sink = sink
        self._dial = dial
        self._num_connections = num_connections
        self._lock = threading.RLock()
        self._connections: list[RequestConnection] = []
        self._dialing = False
        self._redial_at = 0.0
        self._closed = False
        self._add(sock)

    def room(self, urgent: bool) -> int:
        """How many slices it would take now."""
        with self._lock:
            room = sum(SLICES_IN_FLIGHT - len(c.in_flight) for c in self._connections)
            if room <= 0:
                self._open_another()
            return room

    def post(self, part: Slice) -> None:
        """Send a slice over the least busy connection."""
        with self._lock:
            connection = min(self._connections, key=lambda c: len(c.in_flight))
            connection.send(part)
            if len(connection.in_flight) > 1:
                self._open_another()

    def progress(self, timeout_s: float) -> bool:
        """The engine's thread receives the replies."""
        return False

    def give_up(self, slices: Sequence[Slice]) -> list[Slice]:
        """Abort the connections that carry any of these. On the engine's thread."""
        lost = []
        with self._lock:
            for connection in list(self._connections):
                if any(connection.in_flight.get(part.key) is part for part in slices):
                    connection.close()
                    self._connections.remove(connection)
                    lost += [p for p in connection.in_flight.values() if p not in slices]
                    connection.in_flight.clear()
            if not self._connections and not self._closed:
                self._loop.call(lambda: self._sink.broken(self, "its operations were given up"))
        return lost

    def close(self) -> None:
        """Close all connections; what the kernel still holds is thrown away."""
        with self._lock:
            self._closed = True
            for connection in self._connections:
                connection.close()
            self._connections.clear()

    def abandon(self) -> None:
        """Close the descriptors only."""
        for connection in self._connections:
            connection.stream.sock.close()

    def on_reply(self, connection: RequestConnection, reply: Reply) -> None:
        """One slice was answered."""
        with self._lock:
            part = connection.in_flight.pop((reply.transfer_id, reply.slice_idx))
        self._sink.done(self, [(part, reply.status)])

    def on_broken(self, connection: RequestConnection, evidence: str) -> None:
        """A connection broke."""
        with self._lock:
            if connection in self._connections:
                self._connections.remove(connection)
            lost = list(connection.in_flight.values())
            connection.in_flight.clear()
            self._redial_at = time.monotonic() + REDIAL_S
            over = not self._connections
        if over:
            self._sink.failed(self, lost, evidence)
            self.close()
            self._sink.broken(self, evidence)
        else:
            self._sink.failed(self, lost, evidence)

    def _add(self, sock: socket.socket) -> None:
        connection = RequestConnection(sock, self._loop, self)
        connection.stream.open()
        self._connections.append(connection)

    def _open_another(self) -> None:
        full = len(self._connections) + self._dialing >= self._num_connections
        if full or self._dialing or self._closed or time.monotonic() < self._redial_at:
            return
        self._dialing = True
        self._loop.call(lambda: self._dial(self._on_dialed))

    def _on_dialed(self, sock: socket.socket | None) -> None:
        with self._lock:
            self._dialing = False
            if sock is None:
                self._redial_at = time.monotonic() + REDIAL_S
                return
            if self._closed or not self._connections:
                Stream.discard(sock)
                return
            self._add(sock)
        self._sink.done(self, [])  # there is room
