"""What peers do to our memory over sockets: the server, its thread, and what Python has to do.

The thread sleeps and moves bytes without the interpreter's lock (where the server is compiled).
It comes back for immediates to count, for memory to share, and for connections that ended.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, cast

from transfer.backends.lane import tune
from transfer.backends.served import CLOSED, IMMEDIATE, NOTES
from transfer.backends.server import LeftNote, PythonServer, ServerLike, make_server
from transfer.connections.tls_socket import TlsSocket
from transfer.errors import ProtocolViolation
from transfer.immediates import ImmediateBoard
from transfer.memory.region import Access, Offer, OfferTable
from transfer.statistics import Tally
from transfer.wire import PLACE, Status

logger = logging.getLogger(__name__)

SLEEP_S: Final = 600.0
JOIN_S: Final = 5.0
NONE_SHARED: Final = -1


@dataclass(frozen=True, slots=True)
class _Served:
    name: str
    local: bool


class Service:
    """Serves all data connections of an engine. Thread-safe.

    Args:
        on_failure: called on the service's thread if a bug ends it.
        encrypted: whether some of the connections are TLS.
    """

    def __init__(
        self,
        name: str,
        offers: OfferTable,
        board: ImmediateBoard,
        tally: Tally,
        on_failure: Callable[[BaseException], None],
        *,
        encrypted: bool = False,
    ) -> None:
        self._offers = offers
        self._board = board
        self._tally = tally
        self._on_failure = on_failure
        self._encrypted = encrypted
        self._peers: dict[int, _Served] = {}
        # Events are taken and acted upon under it: who has it knows that nothing is on its way.
        self._delivering = threading.Lock()
        self._thread = threading.Thread(
            target=self._run, name=f"transfer-{name[:8]}-data", daemon=True
        )
        self._opened: ServerLike | None = None
        self._stopping = False
        self._on_notes: Callable[[], None] | None = None

    def open(self) -> None:
        """Start to serve."""
        self._opened = make_server(encrypted=self._encrypted)
        self._offers.bind(self._opened)
        self._thread.start()

    @property
    def _server(self) -> ServerLike:
        assert self._opened is not None, "the service is not open"
        return self._opened

    def close(self) -> None:
        """Close all connections, end the thread; idempotent."""
        if self._stopping or self._opened is None:
            return
        self._stopping = True
        self._server.wake()
        if self._thread.ident is not None:
            self._thread.join(JOIN_S)
        if self._thread.is_alive():
            logger.error("the data thread did not end within %s s", JOIN_S)
            return
        self.collect()
        self._offers.unbind()
        self._server.close()

    def abandon(self) -> None:
        """Close the descriptors only: the way out after a fork."""
        self._stopping = True
        if self._opened is not None:
            self._opened.abandon()

    def open_peer(self, name: str, *, local: bool) -> int:
        """Make the place of one life of a peer; `local` if descriptors can travel to it."""
        peer_id = self._server.open_peer(name)
        self._peers[peer_id] = _Served(name, local)
        return peer_id

    def close_peer(self, peer_id: int) -> None:
        """Close a peer's connections; nothing of it lands or counts after the return."""
        self._server.close_peer(peer_id)
        with self._delivering:
            self._peers.pop(peer_id, None)

    def connections(self, peer_id: int) -> list[int]:
        """Return the ids of a peer's connections."""
        return self._server.connections(peer_id)

    def reset(self, connection_id: int) -> None:
        """Reset a connection; idempotent."""
        self._server.detach(connection_id)

    def attach(self, peer_id: int, sock: socket.socket) -> None:
        """Serve a connection; the socket is the service's."""
        try:
            tune(sock)
            if isinstance(sock, TlsSocket):
                assert isinstance(self._server, PythonServer), "made for encrypted connections"
                self._server.attach_socket(peer_id, sock)
            else:
                try:
                    self._server.attach(peer_id, sock.fileno())
                finally:
                    # Not before: a child that is forked meanwhile must find it somewhere to close.
                    sock.detach()
        except OSError as error:
            sock.close()
            logger.info("a data connection could not be served: %s", error)

    def deliver(self) -> None:
        """Act upon everything that has happened so far. Any thread."""
        with self._delivering:
            for kind, peer_id, connection_id, detail in self._server.take_events():
                peer = self._peers.get(peer_id)
                if kind == CLOSED:
                    evidence, malformed = cast("tuple[str, bool]", detail)
                    name = peer.name if peer is not None else "a peer that is gone"
                    level = logging.WARNING if malformed else logging.DEBUG
                    logger.log(level, "data connection of %s ended: %s", name, evidence)
                elif kind == NOTES:
                    self._many_notes()
                elif peer is None:
                    continue
                elif kind == IMMEDIATE:
                    self._count(peer.name, cast("int", detail), connection_id)
                else:
                    self._share(peer, cast("tuple[int, int, bytes]", detail)[2], connection_id)

    def take_notes(self) -> list[LeftNote]:
        """Return what peers have left with writes since the last call. Any thread."""
        return [] if self._opened is None else self._opened.take_notes()

    def on_notes(self, handler: Callable[[], None]) -> None:
        """Name who takes notes when there are many, instead of who did so far."""
        self._on_notes = handler

    def collect(self) -> None:
        """Bring the statistics up to date. Any thread."""
        if self._opened is None:
            return
        served, refused, malformed = self._server.take_counters()
        if served or refused:
            self._tally.add("tcp", bytes_served=served, refused=refused)
        for _ in range(malformed):
            self._tally.count("malformed")

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._server.run(SLEEP_S)
                self.deliver()
        except BaseException as error:
            logger.exception("the data thread failed")
            self._on_failure(error)
            raise

    def _count(self, name: str, immediate: int, connection_id: int) -> None:
        try:
            self._board.count(name, [immediate])
        except ProtocolViolation as error:
            logger.warning("data connection of %s ended: %s", name, error.problem)
            self._tally.count("malformed")
            self._server.detach(connection_id)

    def _many_notes(self) -> None:
        if self._on_notes is None:
            logger.warning("nobody takes the notes that peers leave: %s dropped",
                           len(self._server.take_notes()))  # fmt: skip
            return
        try:
            self._on_notes()
        except Exception:
            logger.exception("a handler of notes raised")

    def _share(self, peer: _Served, token: bytes, connection_id: int) -> None:
        offer = self._offers.find(token, to=peer.name)
        if offer is None:
            status, descriptor = Status.UNKNOWN, NONE_SHARED
        elif not peer.local or not offer.region.shareable:
            status, descriptor = Status.NO_RIGHT, NONE_SHARED
        else:
            descriptor = _open_again(offer)
            status = Status.UNKNOWN if descriptor == NONE_SHARED else Status.OK
        place = b""
        if status is Status.OK and offer is not None:
            place = PLACE.pack(offer.region.memory_offset + offer.offset, offer.nbytes)
        else:
            self._tally.add("tcp", refused=1)
        try:
            self._server.answer(connection_id, status.value, place, descriptor)
        finally:
            if descriptor != NONE_SHARED:
                os.close(descriptor)


def _open_again(offer: Offer) -> int:
    """Open the offered memory's file anew, for reading only if reading is all that was offered."""
    memory = offer.region.memory
    assert memory is not None
    fd = memory.fd
    if fd < 0:
        return NONE_SHARED
    mode = os.O_RDWR if Access.WRITE in offer.access else os.O_RDONLY
    try:
        descriptor = os.open(f"/proc/self/fd/{fd}", mode | os.O_CLOEXEC)
    except FileNotFoundError:  # closed before we opened it, as its peer was just lost
        return NONE_SHARED
    if memory.fd != fd:
        # Closed while we opened it: its number may be another file's by now.
        os.close(descriptor)
        return NONE_SHARED
    return descriptor
