"""The front's end of the links to the workers: one ROUTER socket with CURVE, in the event loop.

A worker's routing id is its incarnation. Nobody without the cluster secret gets past the
handshake, and a message that names another incarnation than its connection's is dropped.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from typing import TYPE_CHECKING

import zmq
import zmq.asyncio

from moe_runtime.messages import MessageInvalid, decode_worker_message, encode
from transfer.control import secure_server

if TYPE_CHECKING:
    from collections.abc import Callable

    from moe_runtime.messages import FrontMessage, WorkerMessage

logger = logging.getLogger(__name__)

_LINGER_MS = 200
_CLOSE_TIMEOUT_S = 1.0


class WorkerLink:
    """Receives from and sends to all workers. Belongs to one event loop.

    Args:
        secret: The cluster secret.
        host: Address to listen on.
        on_message: Called with every valid message, in the order of each worker.
        on_undelivered: Called with (incarnation, message) that could not be sent: the worker is
            not connected.
    """

    def __init__(
        self,
        secret: bytes,
        *,
        host: str,
        on_message: Callable[[WorkerMessage], None],
        on_undelivered: Callable[[str, FrontMessage], None],
    ) -> None:
        self._secret = secret
        self._host = host
        self._on_message = on_message
        self._on_undelivered = on_undelivered
        # Bounded by the journal: a Submit and a Cancel per attempt at an open request.
        self._outgoing: asyncio.Queue[tuple[str, FrontMessage]] = asyncio.Queue()
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.address = ""
        self.num_invalid = 0

    def open(self) -> None:
        """Listen on a free port; `address` is set afterwards."""
        self._context = zmq.asyncio.Context()
        socket = self._socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # unknown worker: an error, not silence
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a worker that reconnects replaces its old self
        socket.setsockopt(zmq.SNDHWM, 0)  # see _outgoing
        secure_server(socket, self._secret)
        port = socket.bind_to_random_port(f"tcp://{self._host}")
        self.address = f"{self._host}:{port}"
        self._tasks = [
            asyncio.create_task(self._receive(socket), name="worker-link-receive"),
            asyncio.create_task(self._send(socket), name="worker-link-send"),
        ]

    async def close(self) -> None:
        """Send what is queued, then close."""
        if self._socket is None or self._context is None:
            return
        receive, send = self._tasks
        sent = asyncio.create_task(self._outgoing.join())
        await asyncio.wait(
            {sent, send}, timeout=_CLOSE_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
        )
        for task in (sent, receive, send):
            task.cancel()
        await asyncio.gather(sent, receive, send, return_exceptions=True)
        self._socket.close()
        self._context.term()
        self._socket = self._context = None

    def send(self, incarnation: str, message: FrontMessage) -> None:
        """Queue a message to a worker; never blocks."""
        self._outgoing.put_nowait((incarnation, message))

    def failure(self) -> BaseException | None:
        """Why the link no longer works, if it does not."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                return task.exception()
        return None

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            identity = frames[0].decode("ascii", errors="replace")
            try:
                message = decode_worker_message(b"".join(frames[1:]))
            except MessageInvalid as error:
                self._refuse(identity, str(error))
                continue
            if message.incarnation != identity:
                self._refuse(identity, f"it speaks for {message.incarnation!r}")
                continue
            self._on_message(message)

    def _refuse(self, identity: str, problem: str) -> None:
        self.num_invalid += 1
        logger.warning("message of worker %s dropped: %s", identity, problem)

    async def _send(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            incarnation, message = await self._outgoing.get()
            try:
                await socket.send_multipart([incarnation.encode("ascii"), encode(message)])
            except zmq.ZMQError as error:
                if error.errno not in (errno.EHOSTUNREACH, zmq.EAGAIN):
                    raise
                self._on_undelivered(incarnation, message)
            finally:
                self._outgoing.task_done()
