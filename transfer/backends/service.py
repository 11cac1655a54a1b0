"""The serving half of data connections: peers write, read and map what we offered them.

Everything here runs on the engine's thread. Each access is checked against the offer it names:
made to this peer, still live, with the right, inside the window.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from transfer.errors import ProtocolViolation
from transfer.event_loop import EventLoop
from transfer.immediates import ImmediateBoard
from transfer.landing import Landing, gather, scatter, spread
from transfer.pieces import Ints, out_of_bounds
from transfer.region import Access, Offer, OfferTable
from transfer.statistics import Tally
from transfer.stream import Stream
from transfer.wire import (
    PLACE,
    REQUEST,
    Reply,
    Request,
    RequestKind,
    Status,
    parse_pieces,
    parse_request,
)

# Unread replies of one connection beyond which its requests wait.
REPLY_BYTES_MAX: Final = 16 << 20
# Bytes taken from one connection before the others get their turn.
TURN_BYTES: Final = 2 << 20
OPEN_WRITES_MAX: Final = 4096
NEEDED: Final = {RequestKind.WRITE: Access.WRITE, RequestKind.READ: Access.READ}


@dataclass(slots=True)
class _OpenWrite:
    arrived: set[int] = field(default_factory=set)
    receiving: dict[int, object] = field(default_factory=dict)


class IncomingWrites:
    """Which slices of a peer's writes are in place. Makes sending a slice twice harmless.

    A slice that comes again over another connection takes over from the first: of two
    receivers of one slice only the latest may write.
    """

    def __init__(self) -> None:
        self._open: dict[int, _OpenWrite] = {}
        self._finished: set[int] = set()
        self._oldest = 0

    def begin(self, request: Request, receiver: object) -> bool:
        """Say whether this slice is to be written by `receiver`; False if it is in place.

        Raises:
            ProtocolViolation: the peer keeps more writes open than any engine does.
        """
        self._forget_below(request.oldest)
        transfer_id = request.transfer_id
        if transfer_id < self._oldest or transfer_id in self._finished:
            return False
        write = self._open.setdefault(transfer_id, _OpenWrite())
        if len(self._open) + len(self._finished) > OPEN_WRITES_MAX:
            raise ProtocolViolation(f"more than {OPEN_WRITES_MAX} open writes")
        if request.slice_idx in write.arrived:
            return False
        write.receiving[request.slice_idx] = receiver
        return True

    def is_receiver(self, request: Request, receiver: object) -> bool:
        """Whether `receiver` may still write this slice."""
        write = self._open.get(request.transfer_id)
        return write is not None and write.receiving.get(request.slice_idx) is receiver

    def finish(self, request: Request, receiver: object) -> bool:
        """Note that a slice is in place; True exactly once, when it completes its write."""
        if not self.is_receiver(request, receiver):
            return False
        write = self._open[request.transfer_id]
        del write.receiving[request.slice_idx]
        write.arrived.add(request.slice_idx)
        if len(write.arrived) < request.num_slices:
            return False
        del self._open[request.transfer_id]
        self._finished.add(request.transfer_id)
        return True

    def _forget_below(self, oldest: int) -> None:
        if oldest > self._oldest:
            self._oldest = oldest
            self._open = {k: v for k, v in self._open.items() if k >= oldest}
            self._finished = {k for k in self._finished if k >= oldest}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceContext:
    """What all serving connections of an engine share."""

    loop: EventLoop
    offers: OfferTable
    board: ImmediateBoard
    tally: Tally


class ServiceConnection:
    """Serves the requests of one data connection, one after the other."""

    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        context: ServiceContext,
        *,
        writes: IncomingWrites,
        on_closed: Callable[[ServiceConnection], None],
    ) -> None:
        self._peer = peer
        self._context = context
        self._writes = writes
        self._on_closed = on_closed
        self._may_share = sock.family == socket.AF_UNIX
        self.stream = Stream(
            sock,
            context.loop,
            on_readable=self._on_readable,
            on_broken=lambda _: on_closed(self),
            outbox_bytes_max=REPLY_BYTES_MAX,
        )
        self._await_request()

    def _await_request(self) -> None:
        header = bytearray(REQUEST.size)
        self._receive(Landing([memoryview(header)]), lambda: self._on_header(header))

    def _receive(self, landing: Landing, then: Callable[[], None]) -> None:
        self._landing, self._then = landing, then

    def _on_readable(self) -> None:
        budget = TURN_BYTES
        try:
            while budget > 0 and not self.stream.closed:
                received = self._landing.receive(self.stream.sock)
                if not received:
                    self.stream.broken("closed by the other side")
                    return
                budget -= received
                # A step without any bytes to wait for is taken at once.
                while not self._landing.remaining and not self.stream.closed:
                    self._then()
                if self.stream.full:
                    self.stream.pause()
                    return
        except BlockingIOError:
            pass
        except ProtocolViolation as error:
            self._context.tally.count("malformed")
            self.stream.broken(str(error))
        except OSError as error:
            self.stream.broken(f"receive failed: {error}")

    def _on_header(self, header: bytearray) -> None:
        request = parse_request(bytes(header))
        table = bytearray(16 * request.num_pieces)
        self._receive(Landing([memoryview(table)]), lambda: self._on_pieces(request, table))

    def _on_pieces(self, request: Request, table: bytearray) -> None:
        offsets, lengths = parse_pieces(bytes(table), request.nbytes)
        offer = self._context.offers.find(request.token, to=self._peer)
        status = self._judge(request, offer, offsets, lengths)
        if status is not Status.OK or offer is None:
            self._context.tally.add("tcp", refused=1)
            self._drop_payload(request, status)
        elif request.kind is RequestKind.WRITE:
            self._land(request, offer, offsets, lengths)
        elif request.kind is RequestKind.READ:
            self._context.tally.add("tcp", bytes_served=request.nbytes)
            self._reply(request, Status.OK, gather(offer.window, offsets, lengths))
        else:
            self._share(request, offer)

    def _judge(self, request: Request, offer: Offer | None, offsets: Ints, lengths: Ints) -> Status:
        if offer is None:
            return Status.UNKNOWN
        if request.kind is RequestKind.MAP:
            return Status.OK if self._may_share and offer.region.shareable else Status.NO_RIGHT
        if NEEDED[request.kind] not in offer.access:
            return Status.NO_RIGHT
        if out_of_bounds(offsets, lengths, offer.nbytes) is not None:
            return Status.OUT_OF_BOUNDS
        return Status.OK

    def _drop_payload(self, request: Request, status: Status) -> None:
        nbytes = request.nbytes if request.kind is RequestKind.WRITE else 0
        self._receive(Landing.nowhere(nbytes), lambda: self._reply(request, status))

    def _land(self, request: Request, offer: Offer, offsets: Ints, lengths: Ints) -> None:
        if not self._writes.begin(request, self):
            self._drop_payload(request, Status.OK)
            return
        places, packed = scatter(offer.window, offsets, lengths)

        def allowed() -> bool:
            return offer.live and self._writes.is_receiver(request, self)

        landing = Landing(places, lock=self._context.offers.landing, allowed=allowed)

        def landed() -> None:
            with self._context.offers.landing:
                if landing.revoked or not allowed():
                    self._reply(request, Status.OK if offer.live else Status.UNKNOWN)
                    return
                if packed is not None:
                    spread(offer.window, packed, offsets, lengths)
            self._finish_write(request)

        self._receive(landing, landed)

    def _finish_write(self, request: Request) -> None:
        self._context.tally.add("tcp", bytes_served=request.nbytes)
        if self._writes.finish(request, self) and request.immediate is not None:
            self._context.board.count(self._peer, [request.immediate])
        self._reply(request, Status.OK)

    def _share(self, request: Request, offer: Offer) -> None:
        memory = offer.region.memory
        assert memory is not None
        writable = Access.WRITE in offer.access
        # A file of its own, opened for reading only, if reading is all that was offered.
        flags = os.O_CLOEXEC | (os.O_RDWR if writable else os.O_RDONLY)
        fd = memory.fd
        descriptor = os.open(f"/proc/self/fd/{fd}", flags) if fd >= 0 else -1
        if memory.fd != fd and descriptor >= 0:
            # Closed while we opened it: its number may be another file's by now.
            os.close(descriptor)
            descriptor = -1
        if descriptor < 0:
            self._reply(request, Status.UNKNOWN)
            return
        place = PLACE.pack(offer.region.memory_offset + offer.offset, offer.nbytes)
        self._reply(request, Status.OK, [memoryview(place)], descriptor=descriptor)

    def _reply(
        self,
        request: Request,
        status: Status,
        payload: list[memoryview] | None = None,
        *,
        descriptor: int = -1,
    ) -> None:
        payload = payload or []
        reply = Reply(
            status=status,
            transfer_id=request.transfer_id,
            slice_idx=request.slice_idx,
            nbytes=sum(part.nbytes for part in payload),
        )
        self.stream.send([reply.encode(), *payload], descriptor=descriptor)
        self._await_request()
