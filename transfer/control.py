"""The control channel: requests and replies over ZeroMQ, for the cluster's members only.

`transfer.curve` keeps strangers out. `RpcServer` and `RpcClient` add requests with deadlines. A
client that got no answer makes a new socket for the next request (a late reply has nowhere to go
then), so that it survives a server that was restarted. On the server's own host requests go by a
unix socket instead (`transfer.local_rpc`), with the same rules.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import msgspec
import zmq

from transfer.curve import secure_client, secure_server
from transfer.errors import ControlError, RemoteError, RpcTimeout
from transfer.local_exchange import Exchange
from transfer.local_rpc import Line, find_line

logger = logging.getLogger(__name__)

LINGER_MS = 200
_POLL_MS = 100
# Larger messages close the connection: nothing on this channel is anywhere near.
MESSAGE_BYTES_MAX = 64 << 20
PORT_MAX = 65535
_LOOK_AGAIN_S = 1.0  # how often a client that goes by ZeroMQ looks for a local server


class _Failure(msgspec.Struct, frozen=True, array_like=True):
    kind: str
    detail: str


_encode_failure = msgspec.msgpack.Encoder().encode
_decode_failure = msgspec.msgpack.Decoder(_Failure).decode
_OK, _FAILED = b"\0", b"\1"

__all__ = [
    "MESSAGE_BYTES_MAX",
    "ClientClosed",
    "RpcClient",
    "RpcServer",
    "read_reply",
    "secure_client",
    "secure_server",
]


def _parse_failure(data: bytes) -> _Failure:
    try:
        return _decode_failure(data)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise ControlError(f"malformed failure from the server: {error}") from error


def read_reply(reply: bytes, address: str) -> bytes:
    """Return what a server answered.

    Raises:
        RemoteError: The handler raised.
        ControlError: It is no reply.
    """
    if reply.startswith(_OK):
        return reply[1:]
    if not reply.startswith(_FAILED):
        raise ControlError(f"malformed reply from {address}")
    failure = _parse_failure(reply[1:])
    raise RemoteError(failure.kind, failure.detail)


class RpcServer:
    """Answers requests one at a time, in order of arrival.

    Args:
        secret: The cluster secret.
        handler: Called with (client identity, request), returns the reply. What it raises is told
            to the client as `RemoteError`, and does not end the server.
        host: Address to bind.
        port: 0 picks a free one; see `address` after `open`.
        afterwards: Called once replies to callers of this host are on their way, for what they
            need not wait for; perhaps late, or not at all. Returns after how many seconds it is
            to be called at the latest; None: whenever. What it raises is logged.
        lend: (client identity, number of the loan) -> descriptors for a caller of this host that
            asks for them; they stay the server's. What it raises is logged.
        ended: The loan of this number is over: that caller is gone, or wants another one.
    """

    def __init__(
        self,
        secret: bytes,
        handler: Callable[[str, bytes], bytes],
        *,
        host: str,
        port: int = 0,
        afterwards: Callable[[], float | None] | None = None,
        lend: Callable[[str, int], Sequence[int]] | None = None,
        ended: Callable[[int], None] | None = None,
    ) -> None:
        if not 0 <= port <= PORT_MAX:
            raise ValueError(f"a port is in [0, {PORT_MAX}], got {port}")
        self._secret = secret
        self._handler = handler
        self._afterwards = afterwards
        self._lend = lend
        self._ended = ended
        self._host = host
        self._port = port
        self._closing = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._thread: threading.Thread | None = None
        self._turn = threading.Lock()
        self._local: Exchange | None = None
        self.address = ""

    def open(self) -> None:
        """Bind and start answering.

        Raises:
            ControlError: The address can't be bound.
        """
        context = zmq.Context()
        socket = context.socket(zmq.ROUTER)
        socket.linger = LINGER_MS
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.maxmsgsize = MESSAGE_BYTES_MAX
        secure_server(socket, self._secret)
        try:
            socket.bind(f"tcp://{self._host}:{self._port or '*'}")
        except zmq.ZMQError as error:
            socket.close()
            context.term()
            raise ControlError(f"bind {self._host}:{self._port}: {error}") from error
        endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        self.address = endpoint.decode().rstrip("\0").removeprefix("tcp://")
        self._context = context
        self._thread = threading.Thread(
            target=self._run, args=(socket,), name="rpc-server", daemon=True
        )
        self._thread.start()
        self._local = Exchange(
            self.address, self._secret, self._reply, nbytes_max=MESSAGE_BYTES_MAX,
            afterwards=None if self._afterwards is None else self._rest,
            lend=None if self._lend is None else self._lent, ended=self._loan_ended,
        )  # fmt: skip
        self._local.open()

    def close(self) -> None:
        """Stop answering and free the socket; idempotent."""
        self._closing.set()
        if self._local is not None:
            self._local.close()
        if self._thread is not None and self._context is not None:
            self._thread.join()
            self._context.term()
            self._thread = None

    def _run(self, socket: zmq.Socket[bytes]) -> None:
        try:
            while not self._closing.is_set():
                if socket.poll(_POLL_MS):
                    self._answer(socket)
        finally:
            socket.close()

    def _answer(self, socket: zmq.Socket[bytes]) -> None:
        frames = socket.recv_multipart()
        if len(frames) != 3:  # identity | request id | request
            logger.warning("request of %d frames dropped, expected 3", len(frames))
            return
        identity, request_id, request = frames
        reply = self._reply(identity.decode(errors="replace"), request)
        socket.send_multipart([identity, request_id, reply])

    @property
    def wakeup(self) -> int:
        """An eventfd: who writes to it has `afterwards` called; -1 if nobody of this host can."""
        return -1 if self._local is None else self._local.wakeup

    def _rest(self) -> float | None:
        assert self._afterwards is not None
        try:
            return self._afterwards()
        except Exception:
            logger.exception("after the replies")
            return None

    def _lent(self, identity: str, number: int) -> Sequence[int]:
        assert self._lend is not None
        try:
            return self._lend(identity, number)
        except Exception:
            logger.exception("nothing is lent to %s", identity)
            return ()

    def _loan_ended(self, number: int) -> None:
        assert self._ended is not None
        try:
            self._ended(number)
        except Exception:
            logger.exception("at the end of loan %d", number)

    def _reply(self, identity: str, request: bytes) -> bytes:
        with self._turn:
            try:
                return _OK + self._handler(identity, request)
            except Exception as error:  # told to the caller, who raises it
                logger.debug("request of %r failed", identity, exc_info=True)
                return _FAILED + _encode_failure(_Failure(type(error).__name__, str(error)))


class ClientClosed(ControlError):
    """The client of a server is closed: nothing was asked."""


class RpcClient:
    """Sends requests to one server. Thread-safe: requests of several threads take turns.

    Args:
        address: "host:port".
        secret: The cluster secret.
        identity: Unique among the clients of the server.
    """

    def __init__(self, address: str, secret: bytes, *, identity: str) -> None:
        self.address = address
        self._secret = secret
        self._identity = identity
        self._lock = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._line: Line | None = None
        self._look_at = 0.0
        self._next_id = 0
        self._closed = False

    def request(self, payload: bytes, *, timeout_s: float) -> bytes:
        """Send a request and wait for its reply.

        Raises:
            RpcTimeout: No reply in time; the request may have been carried out.
            RemoteError: The handler raised.
            ClientClosed: Nothing was asked.
            ControlError: The request is too long; or the server ended before it answered, and the
                request may have been carried out.
        """
        deadline = time.monotonic() + timeout_s
        if not self._lock.acquire(False) and not self._lock.acquire(timeout=max(0.0, timeout_s)):
            raise RpcTimeout(self.address, timeout_s)
        try:
            if self._closed:
                raise ClientClosed(f"the client of {self.address} is closed")
            if len(payload) > MESSAGE_BYTES_MAX:
                raise ControlError(f"a request of {len(payload)} bytes to {self.address}")
            reply = self._ask_locally(payload, deadline, timeout_s)
            if reply is None:
                reply = self._request(payload, deadline, timeout_s)
        finally:
            self._lock.release()
            if self._closed:  # `retire` found us busy
                self._free_if_idle()
        return read_reply(reply, self.address)

    def borrow(self, *, timeout_s: float) -> list[int]:
        """Return descriptors that a server of this host lends, the caller's from now on.

        Empty if it is elsewhere or lends nothing. An earlier loan is over then; and so is this one
        when the connection is.

        Raises:
            RpcTimeout: No answer in time.
            ClientClosed: Nothing was asked.
            ControlError: The server ended.
        """
        deadline = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=max(0.0, timeout_s)):
            raise RpcTimeout(self.address, timeout_s)
        try:
            if self._closed:
                raise ClientClosed(f"the client of {self.address} is closed")
            line, self._line = self._line or self._find_line(deadline), None
            if line is None:
                return []
            try:
                lent = line.borrow(deadline)
            except BaseException:
                line.close()
                raise
            self._line = line
            return lent
        except TimeoutError as error:
            raise RpcTimeout(self.address, timeout_s) from error
        finally:
            self._lock.release()
            if self._closed:
                self._free_if_idle()

    def close(self) -> None:
        """Take no further requests, and free the socket; idempotent. Waits for one under way."""
        self._closed = True
        with self._lock:
            self._free()

    def retire(self) -> None:
        """Take no further requests. Does not wait: the socket goes with the one under way."""
        self._closed = True
        self._free_if_idle()

    def _free_if_idle(self) -> None:
        if self._lock.acquire(blocking=False):
            try:
                self._free()
            finally:
                self._lock.release()

    def _free(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None
        self._drop_socket()
        if self._context is not None:
            self._context.term()
            self._context = None

    def _request(self, payload: bytes, deadline: float, timeout_s: float) -> bytes:
        socket = self._connected()
        self._next_id += 1
        request_id = self._next_id.to_bytes(8, "little")
        socket.send_multipart([request_id, payload])
        while True:
            left_ms = int((deadline - time.monotonic()) * 1e3)
            if left_ms < 0 or not socket.poll(left_ms):
                self._drop_socket()
                raise RpcTimeout(self.address, timeout_s)
            frames = socket.recv_multipart()
            if frames[0] == request_id:
                break
        return frames[1] if len(frames) == 2 else b""

    def _ask_locally(self, payload: bytes, deadline: float, timeout_s: float) -> bytes | None:
        """Ask a server of this host; None if there is none, and nothing was asked."""
        try:
            for _ in range(2):  # a line to a server that is gone tells so at the first use
                line = self._line or self._find_line(deadline)
                if line is None:
                    return None
                self._line = reply = None  # kept only if it is fit for a next request
                try:
                    reply = line.ask(payload, MESSAGE_BYTES_MAX, deadline)
                finally:
                    if reply is None:
                        line.close()
                    else:
                        self._line = line
                if reply is not None:
                    return reply
        except TimeoutError as error:
            raise RpcTimeout(self.address, timeout_s) from error
        return None

    def _find_line(self, deadline: float) -> Line | None:
        now = time.monotonic()
        if self._socket is not None and now < self._look_at:
            return None
        self._look_at = now + _LOOK_AGAIN_S
        line = find_line(self.address, self._secret, self._identity, deadline, shares_memory=True)
        if line is not None:
            self._drop_socket()
        return line

    def _connected(self) -> zmq.Socket[bytes]:
        if self._context is None:
            self._context = zmq.Context()
        if self._socket is None:
            socket = self._context.socket(zmq.DEALER)
            socket.linger = 0
            socket.maxmsgsize = MESSAGE_BYTES_MAX
            self._socket = socket  # before what can fail: an open one would hold up `close`
            secure_client(socket, self._secret, identity=self._identity)
            try:
                socket.connect(f"tcp://{self.address}")
            except zmq.ZMQError as error:
                self._drop_socket()
                raise ControlError(
                    f"{self.address!r} cannot be called: {error.strerror}"
                ) from error
        return self._socket

    def _drop_socket(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
