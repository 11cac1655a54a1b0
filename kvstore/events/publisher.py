"""Publishes the pool's events over ZeroMQ, as vLLM's engines do: PUB, and ROUTER for replay.

    master's thread                 this thread                         subscribers
    offer(batches) ──▶ queue ──▶ number | payload ──▶ PUB ──▶ topic | number | payload
       never waits                     └─▶ ReplayBuffer ◀── ROUTER ◀── empty | start
                                                               └────▶ empty | number | payload ...
                                                                      empty | -1 | empty

Numbers are 8 bytes, big endian. A slow subscriber misses batches of PUB, sees a gap in the numbers
and asks. If this thread itself falls behind, batches are lost here: from then on all are refused
until the queue is empty, and then the master tells its whole state (`wants_state`).
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import zmq

from configs.kv_events import EventSecurity, KVEventsConfig
from kvstore.events.event_log import Change, Cleared, EventBatch, encode_changes
from kvstore.events.replay import ReplayBuffer
from transfer.curve import secure_server
from transfer.errors import ControlError

logger = logging.getLogger(__name__)

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_LINGER_MS = 200
_IDLE_MS = 1000
_JOIN_S = 10.0
_IN_USE = " (the endpoints of several masters of one host differ by {shard})"
# A request is 8 bytes; the frames of the CURVE handshake are larger than that.
_REQUEST_BYTES_MAX = 4096


class EventPublisher:
    """One thread that sends events and answers replays. Thread-safe.

    Args:
        config: Where, to whom and how much.
        secret: The cluster secret, for `curve`.
        wall_clock: Seconds since the epoch, told with each batch.
    """

    def __init__(
        self,
        config: KVEventsConfig,
        *,
        secret: bytes,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._secret = secret
        self._wall_clock = wall_clock
        self._topic = config.topic.encode()
        self._lock = threading.Lock()  # the queue and `_behind`
        self._queue: deque[EventBatch] = deque()
        self._behind = False
        self._closing = False
        self._replay = ReplayBuffer(
            batches_max=config.buffer_batches, bytes_max=config.buffer_bytes, encode=self._encode
        )
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._thread: threading.Thread | None = None
        self._wake_fd = -1
        self.endpoint = config.endpoint
        self.replay_endpoint = config.replay_endpoint

    def open(self) -> None:
        """Bind both sockets (`endpoint` and `replay_endpoint` name the ports) and start.

        Raises:
            ControlError: An address can't be bound.
        """
        self._context = zmq.Context()
        publish = self._context.socket(zmq.PUB)
        publish.sndhwm = self._config.hwm_batches
        replay = self._context.socket(zmq.ROUTER)
        replay.maxmsgsize = _REQUEST_BYTES_MAX
        # A whole answer fits (folded state, batches, end), though half of the mark may be reads not
        # yet accounted for. More is given up, not cut silently.
        replay.sndhwm = 2 * (self._config.buffer_batches + 2)
        replay.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self.endpoint = self._bind(publish, self._config.endpoint)
            self.replay_endpoint = self._bind(replay, self._config.replay_endpoint)
        except ControlError:
            self._context.destroy(linger=0)
            self._context = None
            raise
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(
            target=self._run, args=(publish, replay), name="kv-events", daemon=True
        )
        self._thread.start()
        logger.info("events of the store on %s, replay on %s", self.endpoint, self.replay_endpoint)

    def close(self) -> None:
        """Send what is queued and free the sockets; idempotent."""
        thread, context = self._thread, self._context
        if thread is None or context is None:
            return
        with self._lock:
            self._closing = True
            os.eventfd_write(self._wake_fd, 1)
        thread.join(_JOIN_S)
        if thread.is_alive():  # its sockets are its own: they go with the process
            logger.error("the events' thread did not end within %.0f s", _JOIN_S)
            return
        context.term()
        os.close(self._wake_fd)
        self._thread = self._context = None

    @property
    def wants_state(self) -> bool:
        """Whether batches were refused and the whole state should be offered now."""
        with self._lock:
            return self._behind and not self._queue

    def offer(self, batches: Sequence[EventBatch]) -> bool:
        """Queue batches without waiting; False if they were refused.

        After a refusal only batches that begin with `Cleared` are taken, once the queue is empty.
        """
        if not batches:
            return True
        with self._lock:
            if self._closing:
                return False
            restated = not self._queue and isinstance(batches[0].changes[0], Cleared)
            room = len(self._queue) + len(batches) <= self._config.queue_batches
            if not restated and (self._behind or not room):
                if not self._behind:
                    logger.warning("events fell behind; the whole state will be told anew")
                self._behind = True
                return False
            self._behind = False
            self._queue.extend(batches)
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)
        return True

    # -- its thread ---------------------------------------------------------------------------

    def _bind(self, listener: zmq.Socket[bytes], endpoint: str) -> str:
        listener.linger = _LINGER_MS
        if self._config.security is EventSecurity.CURVE:
            secure_server(listener, self._secret)
        try:
            if _is_path_in_use(endpoint):  # ZeroMQ would put its own in the place of that socket
                raise zmq.ZMQError(errno.EADDRINUSE)
            listener.bind(endpoint)
        except zmq.ZMQError as error:
            hint = _IN_USE if error.errno == errno.EADDRINUSE else ""
            raise ControlError(f"events: bind {endpoint}: {error}{hint}") from error
        bound = listener.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        return bound.decode().rstrip("\0")

    def _run(self, publish: zmq.Socket[bytes], replay: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_fd, zmq.POLLIN)
        poller.register(replay, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll(_IDLE_MS))
                if self._wake_fd in ready:
                    os.eventfd_read(self._wake_fd)
                closing = self._closing  # read before the queue: nothing is queued after it
                self._publish_queued(publish)
                if closing:
                    return
                if replay in ready:
                    self._answer(replay)
        finally:
            publish.close()
            replay.close()

    def _publish_queued(self, publish: zmq.Socket[bytes]) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    return
                batch = self._queue.popleft()
            payload = self._encode(batch.changes)
            self._replay.append(batch, payload)
            publish.send_multipart([self._topic, _number(batch.sequence), payload])

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        frames = replay.recv_multipart()
        if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
            logger.warning("a replay request of %d frames was dropped", len(frames))
            return
        identity, start = frames[0], int.from_bytes(frames[2], "big")
        try:
            for sequence, payload in self._replay.since(start):
                replay.send_multipart([identity, b"", _number(sequence), payload], zmq.NOBLOCK)
            replay.send_multipart([identity, b"", END_OF_REPLAY, b""], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            # Without the end marker the subscriber knows that the answer is not whole.
            logger.warning("a replay from %d was given up: %s", start, error)

    def _encode(self, changes: Sequence[Change]) -> bytes:
        return encode_changes(
            changes,
            at_s=self._wall_clock(),
            form=self._config.form,
            block_tokens=self._config.block_tokens,
        )


def _is_path_in_use(endpoint: str) -> bool:
    """Tell whether somebody listens on an ipc endpoint."""
    path = endpoint.removeprefix("ipc://")
    if path == endpoint:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.setblocking(False)
        try:
            return caller.connect_ex(path) in (0, errno.EAGAIN)  # that one: a full backlog
        except OSError:  # too long a path, which `bind` tells
            return False


def _number(sequence: int) -> bytes:
    return sequence.to_bytes(8, "big")
