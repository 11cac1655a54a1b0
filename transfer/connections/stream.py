"""A connected socket that never blocks the engine's thread: what cannot go out at once waits here.

Small messages leave in the caller's own thread; only the rest of a message that the kernel does
not take is left to the engine's thread. The outbox is bounded.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice, takewhile
from typing import Final

from transfer.connections.tls_socket import TlsSocket, buffered, unsent
from transfer.event_loop import READABLE, WRITABLE, EventLoop

IOVEC_MAX: Final = 512
LINGER_NONE: Final = struct.pack("ii", 1, 0)

Buffer = bytes | bytearray | memoryview


class Stream:
    """Outgoing half of a connection, and its place in the event loop.

    `on_readable` runs on the loop's thread. `on_broken` runs there too, once, with the evidence.
    `send` may be called from any thread; whole messages never mix.
    """

    def __init__(
        self,
        sock: socket.socket,
        loop: EventLoop,
        *,
        on_readable: Callable[[], None],
        on_broken: Callable[[str], None],
        outbox_bytes_max: int,
    ) -> None:
        self.sock = sock
        self._loop = loop
        self._on_readable = on_readable
        self._on_broken = on_broken
        # A descriptor, or -1, travels with the first byte of its view.
        self._outbox: deque[tuple[memoryview, int]] = deque()
        self._outbox_bytes = 0
        self._outbox_bytes_max = outbox_bytes_max
        self._room = threading.Condition()
        self._reading = True
        self._events = READABLE
        self.closed = False

    def open(self) -> None:
        """Start to receive. On the loop's thread."""
        self._loop.watch(self.sock, self._on_event, READABLE)
        if buffered(self.sock):  # it came with the last word of the handshake
            self._loop.call(lambda: self._on_event(READABLE))

    @property
    def outbox_bytes(self) -> int:
        """Bytes that wait for the kernel."""
        return self._outbox_bytes

    @property
    def full(self) -> bool:
        """Whether the outbox is beyond its bound."""
        return self._outbox_bytes > self._outbox_bytes_max

    def send(
        self, parts: Sequence[Buffer], *, deadline: float | None = None, descriptor: int = -1
    ) -> bool:
        """Send one message made of `parts`, which must not change before they are gone.

        With a `deadline` (`time.monotonic`) the call waits for room in a full outbox; without
        one it never waits and may exceed the bound by this one message. The connection owns
        the `descriptor` from here on.

        Returns:
            False if the connection is closed, or there was no room in time: nothing was sent.
        """
        views = [view for part in parts if (view := memoryview(part).cast("B")).nbytes]
        with self._room:
            while deadline is not None and self.full and not self.closed:
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not self._room.wait(remaining):
                    return False
            if self.closed:
                if descriptor >= 0:
                    os.close(descriptor)
                return False
            idle = not self._outbox
            for view in views:
                self._outbox.append((view, descriptor))
                self._outbox_bytes += view.nbytes
                descriptor = -1
            if idle:
                self._push()
            return True

    def read(self) -> None:
        """Read once now, whether or not something is there. On the loop's thread."""
        self._on_readable()

    def pause(self) -> None:
        """Stop reading until the outbox has drained: the peer does not take our replies."""
        with self._room:
            self._reading = False
            self._await_events()

    def close(self, *, abort: bool = False) -> None:
        """Close, without `on_broken`. With `abort` what the kernel still holds is thrown away."""
        with self._room:
            if self.closed:
                return
            self.closed = True
            self._clear()
            self._room.notify_all()
            self._loop.unwatch(self.sock)
            self.discard(self.sock, abort=abort)

    @staticmethod
    def discard(sock: socket.socket, *, abort: bool = False) -> None:
        """Close a socket so that the other side sees the end, even if a fork holds a copy."""
        try:
            if abort and sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NONE)
            else:
                sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other side was faster
        sock.close()

    def _push(self) -> None:
        try:
            while self._outbox:
                self._advance(self._send_some())
            if isinstance(self.sock, TlsSocket):
                self.sock.flush()
        except BlockingIOError:
            pass
        except OSError as error:
            evidence = f"send failed: {error.strerror or error}"
            self._loop.call(lambda: self.broken(evidence))
            self._clear()
        self._await_events()

    def _send_some(self) -> int:
        head, descriptor = self._outbox[0]
        if descriptor < 0:
            plain = takewhile(lambda entry: entry[1] < 0, islice(self._outbox, IOVEC_MAX))
            return self.sock.sendmsg([view for view, _ in plain])
        rights = array("i", [descriptor])
        sent = self.sock.sendmsg([head], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        self._outbox[0] = (head, -1)
        os.close(descriptor)
        return sent

    def _advance(self, sent: int) -> None:
        self._outbox_bytes -= sent
        while sent:
            head, descriptor = self._outbox.popleft()
            if sent < head.nbytes:
                self._outbox.appendleft((head[sent:], descriptor))
                return
            sent -= head.nbytes

    def _clear(self) -> None:
        for _, descriptor in self._outbox:
            if descriptor >= 0:
                os.close(descriptor)
        self._outbox.clear()
        self._outbox_bytes = 0

    def _await_events(self) -> None:
        if self.closed:
            return
        if not self._reading and not self._outbox:
            self._reading = True
        waits = self._outbox or unsent(self.sock)
        events = (READABLE if self._reading else 0) | (WRITABLE if waits else 0)
        if events != self._events:
            self._events = events
            self._loop.change(self.sock, events)

    def _on_event(self, events: int) -> None:
        if events & WRITABLE:
            with self._room:
                self._push()
                self._room.notify_all()
        # Errors and hang-ups are read too: reading says what happened.
        if events & ~WRITABLE and not self.closed:
            self._on_readable()
            while buffered(self.sock) and not self.closed:
                self._on_readable()

    def broken(self, evidence: str) -> None:
        """Close because the connection failed; tells `on_broken` unless it was closed before."""
        if not self.closed:
            self.close()
            self._on_broken(evidence)
