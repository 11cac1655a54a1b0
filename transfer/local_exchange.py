"""The server's end of the control channel of one host; `transfer.local_rpc` says what goes over it.

One thread answers all callers, one request of each at a time. Nothing waits for one caller: what it
does not take yet is kept (one reply at most) until its socket has room, what it sends in part is
kept until it is whole.
"""

from __future__ import annotations

import hmac
import itertools
import logging
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from transfer import native
from transfer.local_board import LOAN, WAKE, is_board
from transfer.local_rpc import (
    IDENTITY_BYTES_MAX,
    LENGTH,
    NONCE_BYTES,
    RECEIVE_BYTES,
    frame,
    mac,
    receive_with_descriptors,
    socket_name,
)

if TYPE_CHECKING:
    from transfer._native import LocalCallers

logger = logging.getLogger(__name__)

Descriptors = Sequence[int]
CALLERS_MAX: Final = 4096
PROOF_S_MAX: Final = 10.0
REST_S: Final = 0.1


class _Caller:
    """One connection at the server. `identity` is empty until the caller has proved itself."""

    __slots__ = (
        "arrived", "board", "identity", "loan", "shares", "since_s", "socket", "transcript",
        "unsent", "wanted",
    )  # fmt: skip

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.identity = ""
        self.transcript = b""
        self.arrived = bytearray()
        self.wanted = 0  # bytes that make `arrived` worth looking at
        self.unsent = b""
        self.board = -1  # a descriptor that came with its proof, until that was looked at
        self.shares = False  # a board
        self.loan = 0  # number of what was lent to it; 0: nothing
        self.since_s = time.monotonic()


class Exchange:
    """The server's end: one thread that answers callers of this host.

    Args:
        address: What the server is bound to.
        secret: The cluster secret.
        answer: (identity, request) -> reply. Must not raise.
        nbytes_max: Of a request.
        afterwards: Called when replies are on their way, and when somebody wrote to `wakeup`.
            Returns after how many seconds it is to be called at the latest; None: whenever. Must
            not raise.
        lend: (identity, number) -> descriptors for this caller; they stay the server's. Must not
            raise.
        ended: The loan of this number is over: the caller hung up, or wants another one instead.
            Must not raise.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        answer: Callable[[str, bytes], bytes],
        *,
        nbytes_max: int,
        afterwards: Callable[[], float | None] | None = None,
        lend: Callable[[str, int], Descriptors] | None = None,
        ended: Callable[[int], None] | None = None,
    ) -> None:
        self._afterwards = afterwards
        self._lend = lend
        self._ended = ended
        self._loans = itertools.count(1)
        self._secret = secret
        self._answer = answer
        self._nbytes_max = nbytes_max
        self._name = socket_name(address, secret)
        self._callers: dict[int, _Caller] = {}
        self._unproved: set[_Caller] = set()
        self._closing = False
        self._resting = 0.0  # until when nobody is accepted
        self._thread: threading.Thread | None = None
        self._compiled: LocalCallers | None = None
        self._wakeup = -1

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
        if native.compiled is not None:
            self._compiled = native.compiled.LocalCallers(self._epoll.fileno(), RECEIVE_BYTES)
        self._thread = threading.Thread(target=self._run, name="rpc-local", daemon=True)
        self._thread.start()

    @property
    def wakeup(self) -> int:
        """An eventfd of the server; who writes to it has `afterwards` called. -1: there is none."""
        return self._wakeup

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
        self._wakeup = -1

    def _run(self) -> None:
        callers, wait, soon_s = self._callers, self._wait, None
        if self._compiled is not None:
            wait = self._compiled.wait
        try:
            while not self._closing:
                timeout_s = REST_S if self._resting else PROOF_S_MAX
                if soon_s is not None and soon_s < timeout_s:
                    timeout_s = soon_s
                for descriptor, events, data in wait(timeout_s):
                    caller = callers.get(descriptor)
                    if caller is not None:
                        self._serve(caller, events, data)
                    elif descriptor == self._listener.fileno():
                        self._accept()
                    elif descriptor == self._wakeup and not self._closing:
                        os.eventfd_read(descriptor)
                if self._afterwards is not None:
                    soon_s = self._afterwards()
                if self._unproved:
                    self._drop_unproved()
                if self._resting and time.monotonic() > self._resting:
                    self._resting = 0.0
                    self._epoll.register(self._listener, select.EPOLLIN)
        finally:
            self._listener.close()
            for caller in list(self._callers.values()):
                self._drop(caller)

    def _wait(self, timeout_s: float, /) -> list[tuple[int, int, bytes | None]]:
        return [(*ready, None) for ready in self._epoll.poll(timeout_s)]

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
        caller = self._callers[sock.fileno()] = _Caller(sock)
        self._unproved.add(caller)
        self._epoll.register(sock, select.EPOLLIN)

    def _serve(self, caller: _Caller, events: int, data: bytes | None) -> None:
        """Do what is due for one caller.

        Args:
            caller: Of which something is ready.
            events: As of epoll; 0: `data` is one whole request.
            data: What has been read from it; None: nothing.
        """
        try:
            if not events and data is not None:
                if len(data) > self._nbytes_max or not self._take(caller, data):
                    self._drop(caller)
                return
            if events & select.EPOLLOUT:
                self._send(caller, b"")
            if events & ~select.EPOLLOUT and not self._read(caller, data):
                self._drop(caller)
        except BlockingIOError:
            pass
        except OSError:
            self._drop(caller)

    def _read(self, caller: _Caller, data: bytes | None) -> bool:
        """Take what has come, or has been read; False if the caller is to be dropped."""
        if data is None:
            data = caller.socket.recv(RECEIVE_BYTES) if caller.identity else _first(caller)
        is_good = bool(data) and self._take_frames(caller, data)
        if self._compiled is not None:
            plain = is_good and bool(caller.identity) and not caller.arrived
            self._compiled.set_plain(caller.socket.fileno(), plain)
        return is_good

    def _take_frames(self, caller: _Caller, data: bytes) -> bool:
        if caller.arrived:
            caller.arrived += data
            if len(caller.arrived) < caller.wanted:
                return True
            data = bytes(caller.arrived)
            caller.arrived.clear()
        at, left = 0, len(data)
        while left >= LENGTH.size:
            (nbytes,) = LENGTH.unpack_from(data, at)
            if nbytes == WAKE and caller.shares:
                at += LENGTH.size
                left -= LENGTH.size
                continue
            if nbytes == LOAN and caller.shares:
                self._lend_to(caller)
                at += LENGTH.size
                left -= LENGTH.size
                continue
            if nbytes > (self._nbytes_max if caller.identity else NONCE_BYTES + IDENTITY_BYTES_MAX):
                return False
            start = at + LENGTH.size
            if left < LENGTH.size + nbytes:
                caller.wanted = LENGTH.size + nbytes
                break
            at = start + nbytes
            if not self._take(caller, data[start:at]):
                return False
            left = len(data) - at
        else:
            caller.wanted = 0
        if left:
            caller.arrived += data[at:]
        return True

    def _take(self, caller: _Caller, payload: bytes) -> bool:
        if not caller.identity:
            return self._meet(caller, payload)
        if caller.unsent:  # it asks on without taking the reply
            return False
        reply = self._answer(caller.identity, payload)
        if self._compiled is None:
            self._send(caller, LENGTH.pack(len(reply)) + reply)
            return True
        sent = self._compiled.send(caller.socket.fileno(), reply)
        if sent < LENGTH.size + len(reply):
            self._send(caller, (LENGTH.pack(len(reply)) + reply)[sent:])
        return True

    def _meet(self, caller: _Caller, payload: bytes) -> bool:
        if not caller.transcript:
            nonce, me = payload[:NONCE_BYTES], payload[NONCE_BYTES:]
            if len(nonce) < NONCE_BYTES or not me:
                return False
            ours = secrets.token_bytes(NONCE_BYTES)
            caller.transcript = nonce + ours + me
            self._send(caller, frame(ours, mac(self._secret, b"server", caller.transcript)))
            return True
        if not hmac.compare_digest(payload, mac(self._secret, b"client", caller.transcript)):
            logger.warning("a local caller without the secret was refused")
            return False
        caller.identity = caller.transcript[2 * NONCE_BYTES :].decode(errors="replace")
        self._unproved.discard(caller)
        if caller.board >= 0:
            if self._compiled is not None and is_board(caller.board):
                descriptor = caller.socket.fileno()
                caller.shares = self._compiled.set_board(descriptor, caller.board)
            _drop_board(caller)
        return True

    def _lend_to(self, caller: _Caller) -> None:
        """Answer a caller that asks for a loan; raise OSError if it does not take the answer."""
        descriptors: Descriptors = ()
        if self._lend is not None:
            self._end_loan(caller)
            number = next(self._loans)
            descriptors = self._lend(caller.identity, number)
            caller.loan = number if descriptors else 0
        answer = LENGTH.pack(LOAN)
        if descriptors:
            socket.send_fds(caller.socket, [answer], descriptors)  # who asks reads
        else:
            self._send(caller, answer)

    def _end_loan(self, caller: _Caller) -> None:
        if caller.loan and self._ended is not None:
            self._ended(caller.loan)
        caller.loan = 0

    def _send(self, caller: _Caller, data: bytes) -> None:
        was_waiting = caller.unsent
        if was_waiting:
            data = was_waiting + data
        try:
            sent = caller.socket.send(data)
        except BlockingIOError:
            sent = 0
        if sent == len(data) and not was_waiting:
            return
        caller.unsent = data[sent:]
        if bool(caller.unsent) != bool(was_waiting):
            more = select.EPOLLOUT if caller.unsent else 0
            self._epoll.modify(caller.socket, select.EPOLLIN | more)

    def _drop(self, caller: _Caller) -> None:
        if self._compiled is not None:
            self._compiled.set_plain(caller.socket.fileno(), False)
            self._compiled.set_board(caller.socket.fileno(), -1)
        _drop_board(caller)
        self._callers.pop(caller.socket.fileno(), None)
        self._unproved.discard(caller)
        caller.socket.close()
        self._end_loan(caller)

    def _drop_unproved(self) -> None:
        late_s = time.monotonic() - PROOF_S_MAX
        for caller in [each for each in self._unproved if each.since_s < late_s]:
            self._drop(caller)


def _first(caller: _Caller) -> bytes:
    """Take what has come from who is not proved, which may bring a board."""
    data, descriptors = receive_with_descriptors(caller.socket, RECEIVE_BYTES, 1)
    for descriptor in descriptors:
        _drop_board(caller)
        caller.board = descriptor
    return data


def _drop_board(caller: _Caller) -> None:
    if caller.board >= 0:
        os.close(caller.board)
        caller.board = -1
