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
from collections import deque
from collections.abc import Callable
from typing import Final

from transfer.errors import (
    AccessRefused,
    PeerLost,
    ProtocolViolation,
    RegionUnknown,
    TransferError,
)
from transfer.event_loop import EventLoop
from transfer.landing import Landing, gather, scatter, spread
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
    """One data connection to the owner. `send` from any thread under the queue's lock."""

    def __init__(self, sock: socket.socket, loop: EventLoop, queue: RequestQueue) -> None:
        self._queue = queue
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
        self._queue.on_broken(self, evidence)

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
            self._queue.tally.count("malformed")
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
        self._queue.on_reply(self, reply)


class RequestQueue:
    """All our requests to one peer. Thread-safe.

    Args:
        dial: opens a data connection, and calls back on the engine's thread with the socket or
            with None.
    """

    def __init__(
        self,
        peer: str,
        loop: EventLoop,
        tally: Tally,
        *,
        num_connections: int,
        dial: Callable[[Callable[[socket.socket | None], None]], None],
    ) -> None:
        self._peer = peer
        self._loop = loop
        self._dial = dial
        self._num_connections = num_connections
        self._changed = threading.Condition()
        self._operations: dict[int, Operation] = {}
        self._pending: deque[Slice] = deque()
        self._connections: list[RequestConnection] = []
        self._num_dialing = 0
        self._redial_at = 0.0
        self._next_id = 1
        self._closed: TransferError | None = None
        self.tally = tally

    def submit(self, operation: Operation) -> None:
        """Take an operation; waits while too many are under way.

        Raises:
            TransferTimeout: its deadline came before its turn.
            PeerLost, EngineClosed: the queue is closed.
        """
        with self._changed:
            while self._closed is None and len(self._operations) >= OPERATIONS_MAX:
                remaining = operation.handle.deadline - time.monotonic()
                if remaining <= 0 or self._loop.is_current or not self._changed.wait(remaining):
                    raise operation.handle.timed_out()
            if self._closed is not None:
                raise self._closed
            operation.transfer_id = self._next_id
            self._next_id += 1
            self._operations[operation.transfer_id] = operation
            self._pending.extend(operation.slices)
            self._pump()

    def expire(self, now: float) -> None:
        """Fail what is beyond its deadline. On the engine's thread, at every tick."""
        with self._changed:
            late = [op for op in self._operations.values() if op.handle.deadline <= now]
            for operation in late:
                self._end(operation, operation.handle.timed_out())
            if late:
                self._abort_connections(set(late))
            self._pump()

    def close(self, error: TransferError) -> None:
        """Fail everything, now and from now on. On the engine's thread."""
        with self._changed:
            self._closed = error
            for operation in list(self._operations.values()):
                self._end(operation, self._describe_loss(operation, error))
            for connection in self._connections:
                connection.close()
            self._connections.clear()

    def streams(self) -> list[Stream]:
        """Return the streams of all connections."""
        return [connection.stream for connection in self._connections]

    def on_reply(self, connection: RequestConnection, reply: Reply) -> None:
        """One slice was answered."""
        with self._changed:
            part = connection.in_flight.pop((reply.transfer_id, reply.slice_idx))
            operation = part.operation
            if operation.transfer_id in self._operations:
                self._settle(part, reply.status)
            elif operation.place is not None:
                os.close(operation.place[0])  # too late: nobody waits for it any more
            self._pump()

    def on_broken(self, connection: RequestConnection, evidence: str) -> None:
        """A connection broke: its slices go out again."""
        with self._changed:
            if connection in self._connections:
                self._connections.remove(connection)
            again = [
                s
                for s in connection.in_flight.values()
                if s.operation.transfer_id in self._operations
            ]
            connection.in_flight.clear()
            logger.info("data connection to %s broke (%s), %s slices sent again",
                        self._peer, evidence, len(again))  # fmt: skip
            self.tally.add("tcp", resends=len(again))
            self._pending.extendleft(reversed(again))
            self._redial_at = time.monotonic() + REDIAL_S
            self._pump()

    def _settle(self, part: Slice, status: Status) -> None:
        operation = part.operation
        if status is not Status.OK:
            self.tally.add(operation.handle.backend, refused=1)
            self._end(operation, _refusal(self._peer, status))
            return
        operation.num_finished += 1
        operation.handle.bytes_moved += part.nbytes
        if operation.num_finished == operation.num_slices:
            self._end(operation, None)

    def _end(self, operation: Operation, error: TransferError | None) -> None:
        del self._operations[operation.transfer_id]
        if error is not None:
            self.tally.add(operation.handle.backend, failures=1)
            self._pending = deque(s for s in self._pending if s.operation is not operation)
        operation.handle.finish(error)
        self._changed.notify_all()

    def _pump(self) -> None:
        while self._pending and self._closed is None:
            free = [c for c in self._connections
                    if not c.stream.closed and len(c.in_flight) < SLICES_IN_FLIGHT]  # fmt: skip
            if not free:
                break
            connection = min(free, key=lambda c: len(c.in_flight))
            part = self._pending.popleft()
            part.attempts += 1
            part.oldest = min(self._operations)
            handle = part.operation.handle
            handle.attempts = max(handle.attempts, part.attempts)
            connection.send(part)
        if self._pending and self._closed is None:
            self._open_connection()

    def _open_connection(self) -> None:
        if len(self._connections) + self._num_dialing >= self._num_connections:
            return
        if self._num_dialing or time.monotonic() < self._redial_at:
            return  # the tick comes back to it
        self._num_dialing += 1
        self._loop.call(lambda: self._dial(self._on_dialed))

    def _on_dialed(self, sock: socket.socket | None) -> None:
        with self._changed:
            self._num_dialing -= 1
            if sock is None:
                self._redial_at = time.monotonic() + REDIAL_S
                return
            if self._closed is not None:
                Stream.discard(sock)
                return
            connection = RequestConnection(sock, self._loop, self)
            connection.stream.open()
            self._connections.append(connection)
            self._pump()

    def _abort_connections(self, late: set[Operation]) -> None:
        # What is half sent or half received would go on touching the caller's memory.
        for connection in list(self._connections):
            if any(s.operation in late for s in connection.in_flight.values()):
                connection.close()
                self.on_broken(connection, "an operation on it was given up")

    def _describe_loss(self, operation: Operation, error: TransferError) -> TransferError:
        if not isinstance(error, PeerLost):
            return error
        handle = operation.handle
        return PeerLost(
            error.peer,
            error.evidence,
            backend=handle.backend,
            attempts=handle.attempts,
            bytes_moved=handle.bytes_moved,
            elapsed_s=handle.elapsed_s,
        )


def _refusal(peer: str, status: Status) -> AccessRefused:
    if status is Status.UNKNOWN:
        return RegionUnknown(peer, "the key was withdrawn, or never offered to us")
    if status is Status.NO_RIGHT:
        return AccessRefused(peer, "the key does not give this right")
    return AccessRefused(peer, "a piece is outside of the offered window")
