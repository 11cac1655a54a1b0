"""The lane in Python: what the compiled one does, for machines without a compiler and for TLS."""

from __future__ import annotations

import ctypes
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np

from transfer.backends.attendance import Attendance
from transfer.connections.stream import LINGER_NONE
from transfer.connections.tls_socket import TlsSocket, buffered, unsent
from transfer.errors import ProtocolViolation
from transfer.landing import IOVEC_MAX, Landing, gather, scatter, spread
from transfer.memory.region import Bytes
from transfer.pieces import Ints
from transfer.wire import (
    PLACE,
    REPLY,
    RequestKind,
    Status,
    encode_pieces,
    parse_reply,
    parse_request,
)

# Descriptor, offset and size of a mapping.
Place = tuple[int, int, int]
Finished = tuple[object, int, Place | None]

# Larger requests are not sent by `post`, which a caller may do under a lock.
POST_BYTES_MAX: Final = 64 << 10
TURN_BYTES: Final = 4 << 20


@dataclass(slots=True, eq=False)
class _Job:
    item: object
    kind: RequestKind
    key: tuple[int, int]
    parts: deque[memoryview]
    expected: int
    memory: Bytes
    offsets: Ints
    lengths: Ints


class PythonLane(Attendance):
    """A lane in Python, over a descriptor or a TLS connection. Owns the socket."""

    def __init__(self, connection: int | TlsSocket) -> None:
        self._sock: socket.socket = (
            socket.socket(fileno=connection) if isinstance(connection, int) else connection
        )
        self._sock.setblocking(False)
        self._local = self._sock.family == socket.AF_UNIX
        self._lock = threading.Lock()
        # In order: waiting for replies, being sent, not sent yet.
        self._jobs: deque[_Job] = deque()
        self._unsent: deque[_Job] = deque()
        self._closed = False
        self._evidence: str | None = None
        self._await_reply()

    @property
    def evidence(self) -> str | None:
        """Why it can be used no more."""
        return self._evidence or ("closed here" if self._closed else None)

    @property
    def in_flight(self) -> int:
        """Requests without an answer."""
        return len(self._jobs)

    @property
    def unsent(self) -> bool:
        """Whether something waits until the kernel takes it."""
        return bool(self._unsent) or unsent(self._sock)

    def fileno(self) -> int:
        """The socket."""
        return self._sock.fileno()

    def post(
        self,
        item: object,
        header: bytes,
        writes: bool,
        base: int,
        ours: Ints,
        theirs: Ints,
        lengths: Ints,
        note: bytes = b"",
        /,
    ) -> bool:
        """Send a request."""
        if not len(ours) == len(theirs) == len(lengths) or (lengths < 0).any():
            raise ValueError("offsets and lengths differ in number, or one is negative")
        request = parse_request(header)
        given = len(lengths), int(lengths.sum()), len(note)
        if (request.num_pieces, request.nbytes, request.note_bytes) != given:
            raise ValueError("the pieces or the note are not those of the header")
        head = header + encode_pieces(theirs, lengths)
        memory = memory_at(base, ours, lengths)
        payload = gather(memory, ours, lengths) if writes else []
        expected = 0 if writes else request.nbytes
        job = _Job(
            item=item,
            kind=request.kind,
            key=(request.transfer_id, request.slice_idx),
            parts=deque([memoryview(head), *payload, *([memoryview(note)] if note else [])]),
            expected=PLACE.size if request.kind is RequestKind.MAP else expected,
            memory=memory,
            offsets=ours,
            lengths=lengths,
        )
        with self._lock:
            if self.evidence is not None:
                return False
            self._jobs.append(job)
            self._unsent.append(job)
            if len(self._unsent) == 1 and request.nbytes <= POST_BYTES_MAX:
                self._send()
        return True

    def close(self) -> list[object]:
        """Reset the connection."""
        with self._lock:
            items = [job.item for job in self._jobs]
            self._jobs.clear()
            self._unsent.clear()
            if not self._closed:
                self._closed = True
                if self._landing.descriptor >= 0:
                    os.close(self._landing.descriptor)
                    self._landing.descriptor = -1
                with suppress(OSError):  # also wakes who sleeps on it
                    if not self._local:
                        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NONE)
                    self._sock.shutdown(socket.SHUT_RDWR)
                self._sock.close()
            return items

    def abandon(self) -> None:
        """Close the descriptor only."""
        self._closed = True
        self._sock.close()

    def move(self, events: int) -> list[Finished]:
        """Move what can be moved, without waiting."""
        finished: list[Finished] = []
        with self._lock:
            if self._closed or self._evidence is not None:
                return finished
            try:
                if events & select.POLLOUT:
                    self._send()
                if events & ~select.POLLOUT:
                    self._receive(finished)
            except ProtocolViolation as error:
                self._evidence = f"malformed: {error.problem}"
            except OSError as error:
                self._evidence = f"connection broke: {error.strerror or error}"
        return finished

    def wanted_events(self) -> int:
        """What to poll for; an idle one too, because the other side may close it."""
        return select.POLLIN | (select.POLLOUT if self.unsent else 0)

    def _send(self) -> None:
        try:
            while self._unsent:
                parts = self._unsent[0].parts
                sent = self._sock.sendmsg(list(islice(parts, IOVEC_MAX)))
                while parts and sent >= parts[0].nbytes:
                    sent -= parts.popleft().nbytes
                if sent:
                    parts[0] = parts[0][sent:]
                if not parts:
                    self._unsent.popleft()
            if isinstance(self._sock, TlsSocket):
                self._sock.flush()
        except BlockingIOError:
            pass
        except OSError as error:
            self._evidence = f"send failed: {error.strerror or error}"

    def _await_reply(self) -> None:
        header = bytearray(REPLY.size)
        self._landing = Landing([memoryview(header)])
        self._then: Callable[[list[Finished]], None] = lambda finished: self._on_header(
            header, finished
        )

    def _receive(self, finished: list[Finished]) -> None:
        budget = TURN_BYTES
        try:
            while budget > 0 or buffered(self._sock):
                received = self._landing.receive(self._sock, descriptors=self._local)
                if not received:
                    self._evidence = "closed by the other side"
                    return
                budget -= received
                while not self._landing.remaining:
                    self._then(finished)
        except BlockingIOError:
            pass

    def _on_header(self, header: bytearray, finished: list[Finished]) -> None:
        reply = parse_reply(bytes(header))
        descriptor = self._landing.descriptor
        job = self._jobs[0] if self._jobs else None
        if job is None or job.parts or job.key != (reply.transfer_id, reply.slice_idx):
            raise ProtocolViolation("a reply to what was not asked")
        ok = reply.status is Status.OK
        if reply.nbytes != (job.expected if ok else 0):
            raise ProtocolViolation("a reply of another size")
        if (descriptor >= 0) != (ok and job.kind is RequestKind.MAP):
            raise ProtocolViolation("a descriptor too many or too few")
        if not reply.nbytes:
            self._finish(reply.status, None, finished)
        elif job.kind is RequestKind.MAP:
            self._await_place(descriptor)
        else:
            self._land(job)

    def _land(self, job: _Job) -> None:
        places, packed = scatter(job.memory, job.offsets, job.lengths)

        def landed(finished: list[Finished]) -> None:
            if packed is not None:
                spread(job.memory, packed, job.offsets, job.lengths)
            self._finish(Status.OK, None, finished)

        self._landing, self._then = Landing(places), landed

    def _await_place(self, descriptor: int) -> None:
        data = bytearray(PLACE.size)

        def placed(finished: list[Finished]) -> None:
            self._landing.descriptor = -1  # goes to the caller
            self._finish(Status.OK, (descriptor, *PLACE.unpack(data)), finished)

        self._landing, self._then = Landing([memoryview(data)]), placed
        self._landing.descriptor = descriptor

    def _finish(self, status: Status, place: Place | None, finished: list[Finished]) -> None:
        finished.append((self._jobs.popleft().item, status.value, place))
        self._await_reply()


def python_progress(lanes: Sequence[PythonLane], timeout_s: float, /) -> list[Finished]:
    """Do for `PythonLane` what the compiled `progress` does.

    Sleeps until a lane is ready and moves bytes both ways, until a request has ended, a lane is
    broken, nothing is under way, or time is over.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        poll = select.poll()
        usable = {lane.fileno(): lane for lane in lanes if lane.evidence is None}
        for fd, lane in usable.items():
            poll.register(fd, lane.wanted_events())
        busy = any(lane.in_flight for lane in usable.values())
        remaining = deadline - time.monotonic()
        ready = poll.poll(max(remaining, 0.0) * 1000) if busy or timeout_s <= 0 else []
        finished = [f for fd, events in ready for f in usable[fd].move(events)]
        broken = any(lane.evidence is not None for lane in lanes)
        if finished or broken or not busy or remaining <= 0:
            return finished


def memory_at(base: int, offsets: Ints, lengths: Ints) -> Bytes:
    """View the memory behind an address, as far as the pieces reach."""
    span = int((offsets + lengths).max()) if len(lengths) else 0
    area = memoryview((ctypes.c_uint8 * span).from_address(base)).cast("B")
    return np.frombuffer(area, dtype=np.uint8)
