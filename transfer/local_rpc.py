"""The control channel between processes of one host: a unix socket beside ZeroMQ's.

ZeroMQ hands every message to a thread of its own, and CURVE encrypts it; on one host that is most
of a small request's time. Here the caller writes to the socket itself and the server's thread
reads it. The socket has an abstract name made of the server's address and the secret: who finds
it is in the server's network namespace, and so on its host.

    caller                                          server
      | -- nonce | identity ----------------------->  |
      | <------------------------- nonce | mac -----  |   wrong: the caller hangs up
      | -- mac ------------------------------------>  |   wrong: closed without a word
      | -- request -------------------------------->  |   one at a time
      | <-------------------------------- reply ----  |

Each frame is its length (u32, little-endian) and that many bytes. Each mac is HMAC-SHA256 under a
key from the secret, over the direction, both nonces and the identity. Nothing is encrypted: the
bytes never leave the kernel, which shows them to nobody but root.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Final

from transfer.errors import ControlError

logger = logging.getLogger(__name__)

NONCE_BYTES: Final = 32
MAC_BYTES: Final = 32
IDENTITY_BYTES_MAX: Final = 256
CALLERS_MAX: Final = 4096
PROOF_S_MAX: Final = 10.0
REST_S: Final = 0.1
ANYWHERE: Final = ("0.0.0.0", "*")
_LENGTH: Final = struct.Struct("<I")
_RECEIVE_BYTES: Final = 1 << 18


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


def _mac(secret: bytes, direction: bytes, transcript: bytes) -> bytes:
    key = hmac.digest(secret, b"moe-runtime local rpc", hashlib.sha256)
    return hmac.digest(key, direction + transcript, hashlib.sha256)


def _frame(*parts: bytes) -> bytes:
    return b"".join((_LENGTH.pack(sum(map(len, parts))), *parts))


class LineBroken(ControlError):
    """The connection ended before the reply: the request may or may not have been handled."""


class Line:
    """A caller's connection, proved. Not thread-safe.

    After any error it is of no use any more: a late reply must not be taken for the next one's.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    @classmethod
    def open(cls, name: bytes, secret: bytes, identity: str, deadline_s: float) -> Line | None:
        """Connect and prove the secret both ways; None if nobody of ours is there.

        Raises:
            TimeoutError: it is there, and did not answer in time.
        """
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.settimeout(_left(deadline_s))
            sock.connect(name)
            line, nonce, me = cls(sock), secrets.token_bytes(NONCE_BYTES), identity.encode()
            sock.sendall(_frame(nonce, me))
            answer = line._receive(NONCE_BYTES + MAC_BYTES, deadline_s)
            transcript = nonce + answer[:NONCE_BYTES] + me
            expected = _mac(secret, b"server", transcript)
            if not hmac.compare_digest(answer[NONCE_BYTES:], expected):
                sock.close()
                return None
            sock.sendall(_frame(_mac(secret, b"client", transcript)))
        except TimeoutError:
            sock.close()
            raise
        except (OSError, LineBroken):
            sock.close()
            return None
        return line

    def send(self, payload: bytes, deadline_s: float) -> bool:
        """Send a request; False if nothing of it can have been handled.

        Raises:
            TimeoutError: it did not fit in time.
            LineBroken: part of it is sent.
        """
        self._socket.settimeout(_left(deadline_s))
        try:
            self._socket.sendall(_LENGTH.pack(len(payload)) + payload)
        except TimeoutError:
            raise
        except OSError:
            return False  # of an incomplete frame nothing is handled
        return True

    def receive(self, nbytes_max: int, deadline_s: float) -> bytes:
        """Wait for the reply.

        Raises:
            TimeoutError: none in time.
            LineBroken: there will be none.
        """
        return self._receive(nbytes_max, deadline_s)

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def _receive(self, nbytes_max: int, deadline_s: float) -> bytes:
        data = self._some(deadline_s)
        while len(data) < _LENGTH.size:
            data += self._some(deadline_s)
        (nbytes,) = _LENGTH.unpack_from(data)
        if nbytes > nbytes_max:
            raise LineBroken(f"a reply of {nbytes} bytes")
        have = len(data) - _LENGTH.size
        if have == nbytes:
            return data[_LENGTH.size :]
        parts = [data[_LENGTH.size :]]
        while have < nbytes:
            parts.append(self._some(deadline_s))
            have += len(parts[-1])
        if have > nbytes:
            raise LineBroken("more than one reply")
        return b"".join(parts)

    def _some(self, deadline_s: float) -> bytes:
        self._socket.settimeout(_left(deadline_s))
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
        except TimeoutError:
            raise
        except OSError as error:
            raise LineBroken(f"the connection broke: {error}") from error
        if not data:
            raise LineBroken("the connection was closed before the reply")
        return data


def _left(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


class _Caller:
    """One connection at the server. `identity` is empty until the caller has proved itself."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.identity = ""
        self.transcript = b""
        self.arrived = bytearray()
        self.wanted = 0  # bytes that make `arrived` worth looking at
        self.unsent = b""
        self.since_s = time.monotonic()


class Exchange:
    """The server's end: one thread that answers callers of this host.

    Args:
        address: What the server is bound to.
        secret: The cluster secret.
        answer: (identity, request) -> reply. Must not raise.
        nbytes_max: Of a request.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        answer: Callable[[str, bytes], bytes],
        *,
        nbytes_max: int,
    ) -> None:
        self._secret = secret
        self._answer = answer
        self._nbytes_max = nbytes_max
        self._name = socket_name(address, secret)
        self._callers: dict[int, _Caller] = {}
        self._closing = False
        self._resting = 0.0  # until when nobody is accepted
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Listen. Where the name is taken (by a stranger, then), callers go by ZeroMQ."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            listener.bind(self._name)
        except OSError as error:
            listener.close()
            logger.warning("no local control channel: %s", error)
            return
        listener.listen(CALLERS_MAX)
        self._listener = listener
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(listener, select.EPOLLIN)
        self._epoll.register(self._wakeup, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="rpc-local", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hang up on all, end the thread and free the socket; idempotent."""
        if self._thread is None:
            return
        self._closing = True
        os.eventfd_write(self._wakeup, 1)
        self._thread.join()
        self._thread = None
        self._epoll.close()
        os.close(self._wakeup)

    def _run(self) -> None:
        try:
            while not self._closing:
                pause_s = REST_S if self._resting else PROOF_S_MAX
                for descriptor, events in self._epoll.poll(pause_s):
                    if descriptor == self._listener.fileno():
                        self._accept()
                    elif descriptor in self._callers:
                        self._serve(self._callers[descriptor], events)
                self._drop_unproved()
                if self._resting and time.monotonic() > self._resting:
                    self._resting = 0.0
                    self._epoll.register(self._listener, select.EPOLLIN)
        finally:
            self._listener.close()
            for caller in list(self._callers.values()):
                self._drop(caller)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:  # no descriptors: it would be ready again at once, and for long
            logger.warning("local callers are not accepted for a moment: %s", error)
            self._epoll.unregister(self._listener)
            self._resting = time.monotonic() + REST_S
            return
        if len(self._callers) >= CALLERS_MAX:
            sock.close()
            return
        sock.setblocking(False)
        self._callers[sock.fileno()] = _Caller(sock)
        self._epoll.register(sock, select.EPOLLIN)

    def _serve(self, caller: _Caller, events: int) -> None:
        try:
            if events & select.EPOLLOUT:
                self._send(caller, b"")
            if events & ~select.EPOLLOUT and not self._read(caller):
                self._drop(caller)
        except BlockingIOError:
            pass
        except OSError:
            self._drop(caller)

    def _read(self, caller: _Caller) -> bool:
        """Take what has come; False if the caller is to be dropped."""
        data = caller.socket.recv(_RECEIVE_BYTES)
        if not data:
            return False
        if caller.arrived:
            caller.arrived += data
            if len(caller.arrived) < caller.wanted:
                return True
            data = bytes(caller.arrived)
            caller.arrived.clear()
        while len(data) >= _LENGTH.size:
            (nbytes,) = _LENGTH.unpack_from(data)
            if nbytes > (self._nbytes_max if caller.identity else NONCE_BYTES + IDENTITY_BYTES_MAX):
                return False
            end = _LENGTH.size + nbytes
            if len(data) < end:
                caller.wanted = end
                break
            if not self._take(caller, data[_LENGTH.size : end]):
                return False
            data = data[end:]
        else:
            caller.wanted = 0
        caller.arrived += data
        return True

    def _take(self, caller: _Caller, payload: bytes) -> bool:
        if not caller.identity:
            return self._meet(caller, payload)
        if caller.unsent:  # it asks on without taking the reply
            return False
        reply = self._answer(caller.identity, payload)
        self._send(caller, _LENGTH.pack(len(reply)) + reply)
        return True

    def _meet(self, caller: _Caller, payload: bytes) -> bool:
        if not caller.transcript:
            nonce, me = payload[:NONCE_BYTES], payload[NONCE_BYTES:]
            if len(nonce) < NONCE_BYTES or not me:
                return False
            ours = secrets.token_bytes(NONCE_BYTES)
            caller.transcript = nonce + ours + me
            self._send(caller, _frame(ours, _mac(self._secret, b"server", caller.transcript)))
            return True
        if not hmac.compare_digest(payload, _mac(self._secret, b"client", caller.transcript)):
            logger.warning("a local caller without the secret was refused")
            return False
        caller.identity = caller.transcript[2 * NONCE_BYTES :].decode(errors="replace")
        return True

    def _send(self, caller: _Caller, data: bytes) -> None:
        waiting = caller.unsent + data
        try:
            sent = caller.socket.send(waiting)
        except BlockingIOError:
            sent = 0
        was_waiting, caller.unsent = bool(caller.unsent), waiting[sent:]
        if bool(caller.unsent) != was_waiting:
            more = select.EPOLLOUT if caller.unsent else 0
            self._epoll.modify(caller.socket, select.EPOLLIN | more)

    def _drop(self, caller: _Caller) -> None:
        self._callers.pop(caller.socket.fileno(), None)
        caller.socket.close()

    def _drop_unproved(self) -> None:
        if len(self._callers) and any(not c.identity for c in self._callers.values()):
            late_s = time.monotonic() - PROOF_S_MAX
            for caller in list(self._callers.values()):
                if not caller.identity and caller.since_s < late_s:
                    self._drop(caller)
