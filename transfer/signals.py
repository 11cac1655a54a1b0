"""Immediates between processes of one host: four bytes each on a unix socket per peer.

The bytes of the write lie in the target's memory before its immediate enters the socket, and the
kernel's socket lock orders the two for the reader.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from typing import Final

from transfer.connections.stream import Stream

SIGNAL: Final = struct.Struct("=I")
RECEIVE_BYTES: Final = 64 << 10


class SignalEnded(ConnectionError):
    """The other side closed, or its process died."""


class SignalChannel:
    """One peer's signal socket, both directions. `send` and `receive` are thread-safe.

    Attributes:
        peer: name of the peer.
    """

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.sock = sock
        self.peer = peer
        self.fd = sock.fileno()
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._rest = b""
        self._closed = False

    def send(self, immediate: int, deadline: float) -> bool:
        """Send one immediate; False if the socket stays full until the deadline.

        Raises:
            OSError: the connection is gone.
        """
        data = SIGNAL.pack(immediate)
        if not self._sending.acquire(blocking=False) and not self._sending.acquire(
            timeout=max(deadline - time.monotonic(), 0.0)
        ):
            return False
        try:
            while data:
                try:
                    data = data[self.sock.send(data, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    # A stopped peer does not read. Once a part of the four bytes is out, giving
                    # up would tear the stream; the kernel never splits so little, but if it did:
                    if not self._await_room(deadline):
                        if len(data) < SIGNAL.size:
                            raise SignalEnded("gave up inside an immediate") from None
                        return False
            return True
        finally:
            self._sending.release()

    def receive(self) -> tuple[int, ...]:
        """Return what has arrived, without waiting.

        Raises:
            OSError: the connection ended, and everything before its end has been returned.
        """
        with self._receiving:
            if self._closed:
                return ()
            try:
                data = self.sock.recv(RECEIVE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return ()
            if not data:
                raise SignalEnded("the signal socket was closed by the other side")
            data = self._rest + data
            whole = len(data) - len(data) % SIGNAL.size
            self._rest = data[whole:]
            return struct.unpack(f"={whole // SIGNAL.size}I", data[:whole])

    def close(self) -> None:
        """Close; idempotent."""
        with self._receiving:
            if not self._closed:
                self._closed = True
                Stream.discard(self.sock)

    def _await_room(self, deadline: float) -> bool:
        poll = select.poll()
        poll.register(self.sock, select.POLLOUT)
        remaining = deadline - time.monotonic()
        return remaining > 0 and bool(poll.poll(remaining * 1000))


class SignalPoll:
    """All signal sockets, and a wake-up. One thread waits at a time; the rest is thread-safe."""

    def __init__(self) -> None:
        self._channels: dict[int, SignalChannel] = {}
        # Reentrant: a signal handler may call `wake` in the very thread that holds it.
        self._lock = threading.RLock()
        self._open = False

    def open(self) -> None:
        """Create the descriptors."""
        self._epoll = select.epoll()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wakeup, select.EPOLLIN)
        self._open = True

    def fileno(self) -> int:
        """Readable while a channel is; -1 once closed."""
        return self._epoll.fileno()

    def close(self) -> None:
        """Free the descriptors; idempotent. The channels belong to their peers."""
        with self._lock:
            if self._open:
                self._open = False
                self._channels.clear()
                self._epoll.close()
                os.close(self._wakeup)

    def abandon(self) -> None:
        """Close the descriptors without the lock: the way out after a fork."""
        if self._open:
            self._open = False
            self._epoll.close()
            os.close(self._wakeup)

    def add(self, channel: SignalChannel) -> None:
        """Watch a channel."""
        with self._lock:
            if self._open:
                self._channels[channel.fd] = channel
                self._epoll.register(channel.fd, select.EPOLLIN)

    def remove(self, channel: SignalChannel) -> None:
        """Forget a channel, before it is closed; idempotent."""
        with self._lock:
            if self._open and self._channels.get(channel.fd) is channel:
                del self._channels[channel.fd]
                self._epoll.unregister(channel.fd)

    def wake(self) -> None:
        """Make `wait` return."""
        with self._lock:
            if self._open:
                os.eventfd_write(self._wakeup, 1)

    def wait(self, timeout_s: float) -> list[SignalChannel]:
        """Return the channels that have something to read."""
        ready = []
        for fd, _ in self._epoll.poll(timeout_s):
            if fd == self._wakeup:
                os.eventfd_read(self._wakeup)
            elif (channel := self._channels.get(fd)) is not None:
                ready.append(channel)
        return ready
