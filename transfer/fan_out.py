"""Requests to several servers of the control channel at once, over one thread.

    callers                     this thread                          servers
    request(calls) ──▶ queue ──▶ one DEALER per address ═══════════▶ RpcServer
      waits for all  ◀─────────── replies by number, in any order ◀═

`RpcClient` is cheaper for one server (its caller does the work), but it knows a dead one only by
its silence. Here the end of a connection ends the requests that were under way on it at once.

Servers of the caller's own host are asked by the caller itself (`transfer.local_lines`) where
nobody needs to know the moment in which a connection ends that nothing is under way on (`on_lost`).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from transfer.control import MESSAGE_BYTES_MAX, ClientClosed, read_reply
from transfer.curve import secure_client
from transfer.errors import ControlError, RpcTimeout
from transfer.local_lines import LocalLines

logger = logging.getLogger(__name__)

Reply = bytes | ControlError
_IDLE_S: Final = 60.0
_TOLD_S: Final = 2.0
_JOIN_S: Final = 10.0


class _Round:
    """The calls of one `request`, and what came back so far."""

    def __init__(self, calls: Sequence[tuple[str, bytes]], timeout_s: float) -> None:
        self.calls = calls
        self.timeout_s = timeout_s
        self.deadline_s = time.monotonic() + timeout_s
        self.replies: list[Reply | None] = [None] * len(calls)
        self.left = len(calls)
        self.done = threading.Event()

    def settle(self, idx: int, reply: Reply) -> None:
        """Enter one reply; only this module's thread calls it."""
        assert self.replies[idx] is None, idx
        self.replies[idx] = reply
        self.left -= 1
        if not self.left:
            self.done.set()


class _Line:
    """One server's socket and the calls under way on it."""

    def __init__(self, socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
        self.socket = socket
        self.monitor = monitor
        self.waiting: dict[int, tuple[_Round, int]] = {}

    def close(self) -> None:
        """Free both sockets."""
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close()


class RpcFanOut:
    """Sends requests to any servers. Thread-safe: rounds of several threads run side by side.

    The thread starts with the first request.

    Args:
        secret: The cluster secret.
        identity: Unique among the clients of each server.
        on_lost: Called on the thread with the address of a server whose connection ended.
    """

    def __init__(
        self, secret: bytes, *, identity: str, on_lost: Callable[[str], None] | None = None
    ) -> None:
        self._secret = secret
        self._identity = identity
        self._on_lost = on_lost
        self._local: LocalLines | None = None
        if on_lost is None:
            self._local = LocalLines(secret, identity=identity, nbytes_max=MESSAGE_BYTES_MAX)
        self._lock = threading.Lock()  # the queue, and starting and closing
        self._queue: deque[_Round] = deque()
        self._forgotten: deque[str] = deque()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._wake_fd = -1
        self._lines: dict[str, _Line] = {}
        self._next_id = 0

    def request(self, calls: Sequence[tuple[str, bytes]], *, timeout_s: float) -> list[Reply]:
        """Send each (address, request) and wait for all replies, or for the deadline.

        Returns:
            Per call its reply, or what went wrong: RpcTimeout, RemoteError, or ControlError if
            the connection ended or the address is none. The request may have been carried out.

        Raises:
            ClientClosed: Nothing was asked.
        """
        if not calls:
            return []
        if self._closed:
            raise ClientClosed("the client is closed")
        if self._local is None:
            return self._wait(self._begin(calls, timeout_s))
        far: list[tuple[list[int], _Round]] = []
        near = self._local.request(
            calls,
            timeout_s,
            lambda idxs: far.append((idxs, self._begin([calls[i] for i in idxs], timeout_s))),
        )
        replies: dict[int, Reply] = {
            idx: _judge(reply, calls[idx][0]) for idx, reply in near.items()
        }
        for idxs, sent in far:
            replies.update(zip(idxs, self._wait(sent), strict=True))
        return [replies[idx] for idx in range(len(calls))]

    def _begin(self, calls: Sequence[tuple[str, bytes]], timeout_s: float) -> _Round:
        sent = _Round(calls, timeout_s)
        if not self._hand_over(sent):
            raise ClientClosed("the client is closed")
        return sent

    @staticmethod
    def _wait(sent: _Round) -> list[Reply]:
        sent.done.wait()
        return [reply for reply in sent.replies if reply is not None]

    def tell(self, calls: Sequence[tuple[str, bytes]]) -> None:
        """Send requests whose replies nobody waits for; they may be lost."""
        if calls:
            self._hand_over(_Round(calls, _TOLD_S))

    def forget(self, address: str) -> None:
        """Close the connection to a server that is not asked any more."""
        if self._local is not None:
            self._local.forget(address)
        with self._lock:
            if self._thread is not None and not self._closed:
                self._forgotten.append(address)
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """End what is under way with ControlError, and free the sockets; idempotent.

        A request to a server of this host that is under way ends by itself.
        """
        if self._local is not None:
            self._local.close()
        with self._lock:
            thread, closed = self._thread, self._closed
            self._closed = True
            if thread is None or closed:
                return
            os.eventfd_write(self._wake_fd, 1)
        thread.join(_JOIN_S)

    # -- the thread -----------------------------------------------------------------------------

    def _hand_over(self, sent: _Round) -> bool:
        with self._lock:
            if self._closed:
                return False
            self._start()
            self._queue.append(sent)
            os.eventfd_write(self._wake_fd, 1)
            return True

    def _start(self) -> None:
        if self._thread is None:
            self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._thread = threading.Thread(target=self._run, name="rpc-fan-out", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            while self._turn(context):
                pass
        finally:
            with self._lock:
                self._closed = True
                rounds = list(self._queue)
                os.close(self._wake_fd)
            for sent in rounds:
                for idx in range(len(sent.calls)):
                    sent.settle(idx, ClientClosed("the client is closed"))
            for address in tuple(self._lines):
                self._drop(address, ClientClosed("the client is closed"))
            context.term()

    def _turn(self, context: zmq.Context[zmq.Socket[bytes]]) -> bool:
        """Wait for whatever comes next, and deal with it; False once closed."""
        poller = zmq.Poller()
        poller.register(self._wake_fd, zmq.POLLIN)
        for line in self._lines.values():
            poller.register(line.socket, zmq.POLLIN)
            poller.register(line.monitor, zmq.POLLIN)
        ready = dict(poller.poll(self._pause_ms()))
        for address, line in tuple(self._lines.items()):
            if line.socket in ready:
                self._receive(line)
            if line.monitor in ready and self._has_ended(line):
                self._drop(address, ControlError(f"the connection to {address} ended"))
                if self._on_lost is not None:
                    self._on_lost(address)
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
            if not self._take(context):
                return False
        self._expire()
        return True

    def _take(self, context: zmq.Context[zmq.Socket[bytes]]) -> bool:
        with self._lock:
            if self._closed:
                return False
            rounds, forgotten = list(self._queue), list(self._forgotten)
            self._queue.clear()
            self._forgotten.clear()
        for address in forgotten:
            self._drop(address, ControlError(f"{address} is not asked any more"))
        for sent in rounds:
            for idx, (address, payload) in enumerate(sent.calls):
                self._send(context, sent, idx, address, payload)
        return True

    def _send(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        sent: _Round,
        idx: int,
        address: str,
        payload: bytes,
    ) -> None:
        try:
            line = self._lines.get(address)
            if line is None:
                line = self._lines[address] = self._connect(context, address)
            self._next_id += 1
            line.socket.send_multipart(
                [self._next_id.to_bytes(8, "little"), payload], flags=zmq.NOBLOCK
            )
        except zmq.ZMQError as error:
            sent.settle(idx, ControlError(f"request to {address!r}: {error}"))
            return
        line.waiting[self._next_id] = (sent, idx)

    def _connect(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> _Line:
        socket = context.socket(zmq.DEALER)
        socket.linger = 0
        socket.maxmsgsize = MESSAGE_BYTES_MAX
        secure_client(socket, self._secret, identity=self._identity)
        line = _Line(socket, socket.get_monitor_socket(zmq.EVENT_DISCONNECTED))
        try:
            socket.connect(f"tcp://{address}")
        except zmq.ZMQError:
            line.close()
            raise
        return line

    def _receive(self, line: _Line) -> None:
        while True:
            try:
                frames = line.socket.recv_multipart(flags=zmq.NOBLOCK)
            except zmq.Again:
                return
            found = line.waiting.pop(int.from_bytes(frames[0], "little"), None)
            if found is None:
                continue  # too late
            sent, idx = found
            try:
                reply = frames[1] if len(frames) == 2 else b""
                sent.settle(idx, read_reply(reply, sent.calls[idx][0]))
            except ControlError as error:
                sent.settle(idx, error)

    @staticmethod
    def _has_ended(line: _Line) -> bool:
        event = recv_monitor_message(line.monitor, flags=zmq.NOBLOCK)["event"]
        return bool(event == zmq.EVENT_DISCONNECTED)

    def _pause_ms(self) -> int:
        ends = [s.deadline_s for line in self._lines.values() for s, _ in line.waiting.values()]
        pause_s = min(ends) - time.monotonic() if ends else _IDLE_S
        return max(0, int(pause_s * 1e3) + 1)

    def _expire(self) -> None:
        now = time.monotonic()
        for address, line in tuple(self._lines.items()):
            late = [i for i, (sent, _) in line.waiting.items() if sent.deadline_s <= now]
            for request_id in late:
                sent, idx = line.waiting.pop(request_id)
                sent.settle(idx, RpcTimeout(address, sent.timeout_s))
            if late and not line.waiting:
                # Nothing that was not delivered yet may reach a server that starts there later.
                self._drop(address, ControlError(f"{address} is silent"))

    def _drop(self, address: str, error: ControlError) -> None:
        line = self._lines.pop(address, None)
        if line is None:
            return
        for sent, idx in line.waiting.values():
            sent.settle(idx, error)
        line.close()


def _judge(reply: bytes | ControlError, address: str) -> Reply:
    if isinstance(reply, ControlError):
        return reply
    try:
        return read_reply(reply, address)
    except ControlError as error:
        return error
