"""A TCP socket whose bytes are encrypted, used like a plain socket that does not block.

    sendmsg  --> encrypt --> [ outgoing ] --> [ ciphertext ] --> kernel
    recv_into <-- decrypt <-- [ incoming ] <------------------- kernel

Two things are hidden from `poll`, and whoever waits has to ask for them:
  * `buffered`: bytes that came out of the kernel and were not read yet. Read until there are none
    before you sleep; reading takes nothing from the kernel while there are.
  * `unsent`: bytes that count as sent, and did not go into the kernel yet. Wait for room, `flush`.
"""

from __future__ import annotations

import hashlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, cast

from transfer.connections.tls import Credentials, explain
from transfer.errors import HandshakeRefused

RECEIVE_BYTES: Final = 256 << 10
# Encrypted at once; what the kernel does not take of it waits here.
SEND_BYTES: Final = 256 << 10
RECORD_BYTES: Final = 16 << 10
# Shorter buffers are joined: encrypting each would cost more than the copy.
JOINED_BYTES: Final = 4 << 10
# To key updates of a peer that reads nothing.
ANSWERS_BYTES_MAX: Final = 64 << 10
HANDSHAKE_RECORD: Final = 0x16
# A fatal alert, `protocol_version`: who knows TLS understands it, and our own engines do.
TLS_ONLY: Final = b"\x15\x03\x03\x00\x02\x02\x46"

_local: Final = threading.local()


class TlsSocket(socket.socket):
    """Takes over a socket that is connected or connecting. Thread-safe, as a socket is.

    Args:
        sock: given away.
        credentials: ours.
        server_side: whether it was accepted.
    """

    def __init__(self, sock: socket.socket, credentials: Credentials, *, server_side: bool) -> None:
        super().__init__(fileno=sock.detach())
        self.setblocking(False)
        self._own = credentials.certificate
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = credentials.server if server_side else credentials.client
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        # With a buffer it returns how much it has put there, which its annotation does not know.
        self._read = cast("Callable[[int, memoryview], int]", self._tls.read)
        self._lock = threading.Lock()
        self._ciphertext = memoryview(b"")
        self._dry = True
        self._heard = False
        self.secured = False

    @property
    def buffered(self) -> bool:
        """Whether something may be read without the kernel's help."""
        return self._tls.pending() > 0 or (self._incoming.pending > 0 and not self._dry)

    @property
    def unsent(self) -> bool:
        """Whether something waits until the kernel takes it."""
        return self._ciphertext.nbytes > 0 or self._outgoing.pending > 0

    def secure(self) -> None:
        """Go on with the TLS handshake; both ends have shown their certificates when `secured`.

        Raises:
            BlockingIOError: the other side has to speak first.
            HandshakeRefused: there is no TLS over there, or no certificate that we accept.
            OSError: the connection broke.
        """
        with self._lock:
            while not self.secured:
                try:
                    self._tls.do_handshake()
                    self.secured = True
                except ssl.SSLWantReadError:
                    self._flush()
                    self._hear()
                except ssl.SSLError as error:
                    self._flush()  # tells the other side why
                    raise HandshakeRefused("", f"TLS: {explain(error)}") from error
            self._flush()

    def channel(self) -> bytes:
        """Return what this connection, once `secured`, has in common with its other end only.

        Both certificates, and the client's Finished: a mac over the whole TLS handshake. Python
        calls it "tls-unique", a name that is not defined for TLS 1.3; the value is as unique.
        """
        theirs = self._tls.getpeercert(binary_form=True)
        finished = self._tls.get_channel_binding("tls-unique")
        assert theirs is not None
        assert finished is not None
        client, server = (theirs, self._own) if self._tls.server_side else (self._own, theirs)
        return b"".join(hashlib.sha256(part).digest() for part in (client, server, finished))

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        """Receive; empty at the end of the stream."""
        place = memoryview(bytearray(min(bufsize, RECEIVE_BYTES)))
        return bytes(place[: self.recvmsg_into([place])[0]])

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """Receive into a buffer; 0 at the end of the stream."""
        view = memoryview(buffer).cast("B")
        return self.recvmsg_into([view[:nbytes] if nbytes else view])[0]

    def recvmsg_into(
        self, buffers: Iterable[Any], ancbufsize: int = 0, flags: int = 0, /
    ) -> tuple[int, list[Any], int, Any]:
        """Receive into several buffers, as far as bytes are there."""
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        with self._lock:
            received = self._decrypt(views)
            while not received and self._refill():
                received = self._decrypt(views)
            self._answer()
        return received, [], 0, None

    def send(self, data: Any, flags: int = 0, /) -> int:
        """Send one buffer, or its beginning."""
        return self.sendmsg([data])

    def sendmsg(
        self,
        buffers: Iterable[Any],
        ancdata: Iterable[Any] = (),
        flags: int = 0,
        address: Any = None,
        /,
    ) -> int:
        """Send several buffers, or their beginning; says how many bytes, all of them `unsent` yet.

        Raises:
            BlockingIOError: there is no room.
        """
        assert not list(ancdata), "descriptors do not travel between hosts"
        with self._lock:
            self._flush()
            if self.unsent:
                raise BlockingIOError
            taken = 0
            for portion in _portions(buffers):
                taken += self._tls.write(portion)
            self._flush()
            return taken

    def flush(self) -> None:
        """Give the kernel what it takes of what is unsent."""
        with self._lock:
            self._flush()

    def detach(self) -> int:
        """Refused: whoever writes to the bare descriptor would write unencrypted."""
        raise TypeError("a TLS connection is more than its descriptor")

    def _decrypt(self, views: list[memoryview]) -> int:
        received = 0
        for view in views:
            filled = 0
            while filled < view.nbytes:
                try:
                    nbytes = self._read(view.nbytes - filled, view[filled:])
                except ssl.SSLWantReadError:
                    self._dry = True
                    return received + filled
                if not nbytes:  # it said goodbye
                    return received + filled
                filled += nbytes
            received += filled
        return received

    def _refill(self, nbytes: int = RECEIVE_BYTES) -> bool:
        """Take ciphertext out of the kernel; False at its end."""
        scratch = _scratch()
        received = super().recv_into(scratch[:nbytes])
        self._incoming.write(scratch[:received])
        self._dry = False
        return received > 0

    def _hear(self) -> None:
        """Take more of a TLS handshake."""
        try:
            heard = self._refill(RECORD_BYTES)
        except ConnectionError:
            heard = False
        if not heard:
            cause = (
                "during the TLS handshake" if self._heard else "before it spoke TLS (is it off?)"
            )
            raise HandshakeRefused("", f"closed by the other side {cause}")
        if self._tls.server_side and not self._heard and _scratch()[0] != HANDSHAKE_RECORD:
            super().send(TLS_ONLY)
            raise HandshakeRefused("", "the caller speaks no TLS")
        self._heard = True

    def _answer(self) -> None:
        # TLS itself has things to say, as that it has taken a new key.
        if self._outgoing.pending:
            self._flush()
            if self._outgoing.pending > ANSWERS_BYTES_MAX:
                raise ConnectionError("it asks for new keys, and reads no answers")

    def _flush(self) -> None:
        while self.unsent:
            if not self._ciphertext.nbytes:
                self._ciphertext = memoryview(self._outgoing.read())
            try:
                sent = super().send(self._ciphertext)
            except BlockingIOError:
                return
            self._ciphertext = self._ciphertext[sent:]


def buffered(sock: socket.socket) -> bool:
    """Whether something may be read that `poll` does not see; never of a plain socket."""
    return isinstance(sock, TlsSocket) and sock.buffered


def unsent(sock: socket.socket) -> bool:
    """Whether sent bytes wait for the kernel; never those of a plain socket."""
    return isinstance(sock, TlsSocket) and sock.unsent


def _scratch() -> memoryview:
    found: memoryview | None = getattr(_local, "scratch", None)
    if found is None:
        found = _local.scratch = memoryview(bytearray(RECEIVE_BYTES))
    return found


def _portions(buffers: Iterable[Any]) -> Iterator[memoryview | bytearray]:
    """Cut buffers into what is encrypted by one call: long ones as they lie, short ones joined."""
    room = SEND_BYTES
    joined = bytearray()
    for buffer in buffers:
        view = memoryview(buffer).cast("B")[:room]
        room -= view.nbytes
        if view.nbytes < JOINED_BYTES:
            joined += view
        if joined and (view.nbytes >= JOINED_BYTES or len(joined) >= RECORD_BYTES):
            yield joined
            joined = bytearray()
        if view.nbytes >= JOINED_BYTES:
            yield view
        if not room:
            break
    if joined:
        yield joined
