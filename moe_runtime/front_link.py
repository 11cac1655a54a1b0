"""A worker's link to the front: typed messages over an authenticated ZeroMQ socket.

ZeroMQ sockets belong to one thread, and the rank loop must not wait for a socket. So a link
thread owns the socket; the rank loop puts messages into a bounded queue and takes what arrived:

    rank loop --send()--> queue --eventfd--> link thread --> front
    rank loop <-received()-- deque <-- link thread <-- front      (then `on_arrival()` is called)
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from typing import TYPE_CHECKING

import zmq

from moe_runtime.messages import (
    FrontMessage,
    MessageInvalid,
    Stop,
    WorkerMessage,
    decode_front_message,
    encode,
)
from transfer.control import secure_client

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

# More than this many messages behind, the front is gone or hopelessly late; it re-submits what it
# misses, so the oldest are dropped rather than the rank loop stopped.
QUEUE_MESSAGES_MAX = 65_536
_LINGER_MS = 500


class FrontLink:
    """Sends worker messages and collects front messages; `send` and `received` are thread-safe.

    Args:
        address: "host:port" of the front.
        secret: The cluster secret.
        incarnation: The name that the front knows this worker by.
        on_arrival: Called on the link's thread after messages came in.
        on_stop: Called on the link's thread when the front says `Stop`.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        *,
        incarnation: str,
        on_arrival: Callable[[], None],
        on_stop: Callable[[], None],
    ) -> None:
        self._address = address
        self._secret = secret
        self._incarnation = incarnation
        self._on_arrival = on_arrival
        self._on_stop = on_stop
        self._outgoing: deque[bytes] = deque(maxlen=QUEUE_MESSAGES_MAX)
        self._incoming: deque[FrontMessage] = deque(maxlen=QUEUE_MESSAGES_MAX)
        self._unsent: bytes | None = None  # taken from the queue; the socket had no room for it
        self._closing = False
        self._event = -1
        self._thread = threading.Thread(target=self._run, name="front-link", daemon=True)

    def open(self) -> None:
        """Start the link thread; the connection is made, and made again, in the background."""
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread.start()

    def close(self) -> None:
        """Send what is queued (for at most half a second) and free the socket."""
        if self._event < 0:
            return
        self._closing = True
        os.eventfd_write(self._event, 1)
        self._thread.join()
        os.close(self._event)
        self._event = -1

    def send(self, message: WorkerMessage) -> None:
        """Queue one message; never blocks."""
        self._outgoing.append(encode(message))
        os.eventfd_write(self._event, 1)

    def received(self) -> list[FrontMessage]:
        """Take the messages that arrived since the last call, in order."""
        messages = []
        while self._incoming:
            messages.append(self._incoming.popleft())
        return messages

    def _run(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        secure_client(socket, self._secret, identity=self._incarnation)
        socket.connect(f"tcp://{self._address}")
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._event, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if self._event in ready:
                    os.eventfd_read(self._event)
                has_room = self._send_queued(socket)
                if self._closing:
                    return
                # Asked for only when it is full: a socket with room is always ready to be written.
                poller.modify(socket, zmq.POLLIN if has_room else zmq.POLLIN | zmq.POLLOUT)
                if socket in ready:
                    self._receive(socket)
        finally:
            socket.close()
            context.term()

    def _send_queued(self, socket: zmq.Socket[bytes]) -> bool:
        """Send what is queued; False if the socket has no room for it (the front is away)."""
        while self._unsent is not None or self._outgoing:
            if self._unsent is None:
                self._unsent = self._outgoing.popleft()
            try:
                socket.send(self._unsent, zmq.NOBLOCK)
            except zmq.Again:
                return False
            self._unsent = None
        return True

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        while socket.poll(0):
            try:
                message = decode_front_message(socket.recv())
            except MessageInvalid as error:
                logger.warning("from the front: %s", error)
                continue
            if isinstance(message, Stop):
                self._on_stop()  # at once: the rank loop may be waiting for members that stop too
            else:
                self._incoming.append(message)
        self._on_arrival()
