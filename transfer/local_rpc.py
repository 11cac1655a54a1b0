"""The control channel between processes of one host: a unix socket beside ZeroMQ's.

ZeroMQ hands every message to a thread of its own, and CURVE encrypts it; on one host that is most
of a small request's time. Here the caller writes to the socket itself and the server's thread
reads it. The socket has an abstract name made of the server's address and the secret: who finds
it is in the server's network namespace, and so on its host.

    caller                                          server
      | -- nonce | identity ----------------------->  |
      | <------------------------- nonce | mac -----  |   wrong: the caller hangs up
      | -- mac (and a board) ---------------------->  |   wrong: closed without a word
      | -- request -------------------------------->  |   one at a time
      | <-------------------------------- reply ----  |

Each frame is its length (u32, little-endian) and that many bytes. Each mac is HMAC-SHA256 under a
key from the secret, over the direction, both nonces and the identity. Nothing is encrypted: the
bytes never leave the kernel, which shows them to nobody but root. A caller that asks in a stream
offers its server memory, too, where both read each other's short frames without the kernel
(`transfer/local_board.py`). A server may lend descriptors, of memory for instance, to a caller with
whom it shares a board; the loan ends with the connection. The server's end is in
`transfer.local_exchange`.
"""

from __future__ import annotations

import array
import hashlib
import hmac
import os
import secrets
import select
import socket
import struct
import time
from typing import Final

from transfer import native
from transfer.errors import ControlError
from transfer.local_board import LENT_MAX, LOAN, WAKE, new_board

NONCE_BYTES: Final = 32
MAC_BYTES: Final = 32
IDENTITY_BYTES_MAX: Final = 256
ANYWHERE: Final = ("0.0.0.0", "*")
LENGTH: Final = struct.Struct("<I")
RECEIVE_BYTES: Final = 1 << 18


def socket_name(address: str, secret: bytes) -> bytes:
    """Return the abstract name of the server that is bound to "host:port"."""
    host, _, port = address.rpartition(":")
    place = f"{'*' if host in ANYWHERE else host}:{port}"
    digest = hmac.digest(secret, b"moe-runtime local rpc name " + place.encode(), hashlib.sha256)
    return b"\0moe-runtime-rpc-" + digest[:16].hex().encode()


def is_ours(host: str) -> bool:
    """Whether a numeric address is one of this network namespace."""
    try:
        socket.inet_aton(host)  # a name would have to be resolved, which can take long
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True


def mac(secret: bytes, direction: bytes, transcript: bytes) -> bytes:
    """Return the proof of one end, "server" or "client", over nonces and identity."""
    key = hmac.digest(secret, b"moe-runtime local rpc", hashlib.sha256)
    return hmac.digest(key, direction + transcript, hashlib.sha256)


def frame(*parts: bytes) -> bytes:
    """Return a frame of these parts."""
    return b"".join((LENGTH.pack(sum(map(len, parts))), *parts))


def receive_with_descriptors(
    sock: socket.socket, nbytes: int, count: int
) -> tuple[bytes, list[int]]:
    """Return what has come, and the descriptors that came with it: no child inherits them.

    `socket.recv_fds` does not hand its flags on.

    Args:
        sock: Of which something is ready.
        nbytes: To take at most.
        count: Descriptors at most; the kernel closes the rest.

    Raises:
        BlockingIOError: Nothing has come.
        OSError: The connection broke.
    """
    descriptors = array.array("i")
    room = socket.CMSG_LEN(count * descriptors.itemsize)
    flags = socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
    data, messages, _, _ = sock.recvmsg(nbytes, room, flags)
    for level, kind, sent in messages:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(sent[: len(sent) - len(sent) % descriptors.itemsize])
    return data, list(descriptors)


def find_line(
    address: str, secret: bytes, identity: str, deadline_s: float, *, shares_memory: bool = False
) -> Line | None:
    """Connect to the server at "host:port" if it is one of this host; else None, at once.

    Args:
        address: The server's.
        secret: The cluster secret.
        identity: Name of this end.
        deadline_s: Of the monotonic clock.
        shares_memory: What is asked with `Line.ask` may go by a board.

    Raises:
        TimeoutError: It is there, and did not answer in time.
    """
    host, _, port = address.rpartition(":")
    if not is_ours(host):
        return None
    for name in (address, f"{ANYWHERE[0]}:{port}"):
        line = Line.open(
            socket_name(name, secret), secret, identity, deadline_s, shares_memory=shares_memory
        )
        if line is not None:
            return line
    return None


class LineBroken(ControlError):
    """The connection ended before the reply: the request may or may not have been handled."""


class Line:
    """A caller's connection, proved. Not thread-safe.

    After any error it is of no use any more: a late reply must not be taken for the next one's.

    Args:
        sock: The connection, which belongs to the line from now on.
        board: Descriptor of the memory that was offered with it; the caller's.
    """

    def __init__(self, sock: socket.socket, board: int = -1) -> None:
        self._socket = sock
        self._shares = board >= 0
        self._ask = self._ask_in_python
        self._send, self._receive = self._send_in_python, self._receive_in_python
        if native.compiled is not None:
            sock.settimeout(None)  # the compiled way sees to the deadlines
            compiled = native.compiled.LocalLine(sock.fileno(), board)
            self._ask, self._send, self._receive = compiled.ask, compiled.send, compiled.receive

    @classmethod
    def open(
        cls,
        name: bytes,
        secret: bytes,
        identity: str,
        deadline_s: float,
        *,
        shares_memory: bool = False,
    ) -> Line | None:
        """Connect and prove the secret both ways; None if nobody of ours is there.

        Raises:
            TimeoutError: it is there, and did not answer in time.
        """
        sock, line = socket.socket(socket.AF_UNIX), None
        board = new_board() if shares_memory and native.compiled is not None else -1
        try:
            sock.settimeout(_left(deadline_s))
            sock.connect(name)
            if _prove(sock, secret, identity.encode(), deadline_s, board):
                line = cls(sock, board)
        except TimeoutError:
            raise
        except OSError:
            pass
        finally:
            if line is None:
                sock.close()
            if board >= 0:
                os.close(board)
        return line

    def ask(self, request: bytes, nbytes_max: int, deadline_s: float) -> bytes | None:
        """Send a request and wait for its reply; None if nothing of it can have been handled.

        Raises:
            TimeoutError: No reply in time.
            LineBroken: There will be none.
        """
        try:
            return self._ask(request, deadline_s, nbytes_max)
        except ConnectionError as error:
            raise LineBroken(str(error)) from error

    def send(self, request: bytes, deadline_s: float) -> bool:
        """Send a request without waiting for its reply; False if nothing of it can be handled.

        Raises:
            TimeoutError: It was not taken in time.
        """
        return bool(self._send(request, deadline_s))

    def receive(self, nbytes_max: int, deadline_s: float) -> bytes:
        """Wait for the reply to what was sent.

        Raises:
            TimeoutError: No reply in time.
            LineBroken: There will be none.
        """
        try:
            return self._receive(deadline_s, nbytes_max)
        except ConnectionError as error:
            raise LineBroken(str(error)) from error

    def borrow(self, deadline_s: float) -> list[int]:
        """Return descriptors that the server lends, the caller's from now on; it may lend none.

        Raises:
            TimeoutError: No answer in time.
            LineBroken: There will be none.
        """
        if not self._shares:
            return []
        descriptors: list[int] = []
        try:
            self._socket.sendall(LENGTH.pack(LOAN))
        except OSError as error:
            raise LineBroken(f"the connection broke: {error}") from error
        try:
            word = WAKE
            while word == WAKE:  # of the board: it woke nobody who waited
                data, more = self._some_with_descriptors(deadline_s)
                descriptors += more
                (word,) = LENGTH.unpack(data)
        except BaseException:
            _close_all(descriptors)
            raise
        if word != LOAN:
            _close_all(descriptors)
            raise LineBroken("something else than a loan was answered")
        return descriptors

    def _some_with_descriptors(self, deadline_s: float) -> tuple[bytes, list[int]]:
        """Take one word that is no frame, and the descriptors that came with it."""
        data = b""
        descriptors: list[int] = []
        while len(data) < LENGTH.size:
            ready = select.poll()
            ready.register(self._socket, select.POLLIN)
            if not ready.poll(_left(deadline_s) * 1e3):
                _close_all(descriptors)
                raise TimeoutError
            try:
                some, more = receive_with_descriptors(
                    self._socket, LENGTH.size - len(data), LENT_MAX
                )
            except BlockingIOError:
                continue
            except OSError as error:
                _close_all(descriptors)
                raise LineBroken(f"the connection broke: {error}") from error
            descriptors += more
            if not some:
                _close_all(descriptors)
                raise LineBroken("the connection was closed before the loan")
            data += some
        return data, descriptors

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def detach(self) -> socket.socket:
        """Return the connection, which is the caller's from now on, and not blocking."""
        self._socket.setblocking(False)
        return self._socket

    def _ask_in_python(self, request: bytes, deadline_s: float, nbytes_max: int, /) -> bytes | None:
        if not self._send_in_python(request, deadline_s):
            return None
        return self._receive_in_python(deadline_s, nbytes_max)

    def _send_in_python(self, request: bytes, deadline_s: float, /) -> bool | None:
        self._socket.settimeout(_left(deadline_s))
        try:
            self._socket.sendall(LENGTH.pack(len(request)) + request)
        except TimeoutError:
            raise
        except OSError:
            return None  # of an incomplete frame nothing is handled
        return True

    def _receive_in_python(self, deadline_s: float, nbytes_max: int, /) -> bytes:
        return _receive(self._socket, nbytes_max, deadline_s)


def _prove(sock: socket.socket, secret: bytes, me: bytes, deadline_s: float, board: int) -> bool:
    nonce = secrets.token_bytes(NONCE_BYTES)
    sock.sendall(frame(nonce, me))
    answer = _receive(sock, NONCE_BYTES + MAC_BYTES, deadline_s)
    transcript = nonce + answer[:NONCE_BYTES] + me
    if not hmac.compare_digest(answer[NONCE_BYTES:], mac(secret, b"server", transcript)):
        return False
    proof = frame(mac(secret, b"client", transcript))
    if board >= 0:
        socket.send_fds(sock, [proof], [board])  # a stream takes a few bytes whole
    else:
        sock.sendall(proof)
    return True


def _receive(sock: socket.socket, nbytes_max: int, deadline_s: float) -> bytes:
    """Return one frame. Raises TimeoutError, or ConnectionError if there will be none."""
    data = _some(sock, deadline_s)
    while len(data) < LENGTH.size:
        data += _some(sock, deadline_s)
    (nbytes,) = LENGTH.unpack_from(data)
    if nbytes > nbytes_max:
        raise ConnectionError(f"a reply of {nbytes} bytes")
    parts, have = [data[LENGTH.size :]], len(data) - LENGTH.size
    while have < nbytes:
        parts.append(_some(sock, deadline_s))
        have += len(parts[-1])
    if have > nbytes:
        raise ConnectionError("more than one reply")
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _some(sock: socket.socket, deadline_s: float) -> bytes:
    sock.settimeout(_left(deadline_s))
    try:
        data = sock.recv(RECEIVE_BYTES)
    except TimeoutError:
        raise
    except OSError as error:
        raise ConnectionError(f"the connection broke: {error}") from error
    if not data:
        raise ConnectionError("the connection was closed before the reply")
    return data


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
    descriptors.clear()


def _left(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s
