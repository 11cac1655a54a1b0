"""An event loop's connection to a server of its own host: requests without a thread.

    ask ─▶ queue ─▶ one request at a time on the socket ─▶ the loop's reader ─▶ its future

What is on its way when the connection breaks or is too late may have been handled; what is still in
the queue then was not, and its future says so (`NotAsked`).
"""

from __future__ import annotations

import asyncio
from collections import deque

from transfer.errors import ControlError, RpcTimeout
from transfer.local_rpc import LENGTH, RECEIVE_BYTES, Line, LineBroken


class NotAsked(ControlError):
    """Nothing of the request was handled."""


class _Call:
    __slots__ = ("deadline_s", "future", "timeout_s", "unsent")

    def __init__(
        self, frame: bytes, future: asyncio.Future[bytes], timeout_s: float, now: float
    ) -> None:
        self.unsent = frame
        self.future = future
        self.timeout_s = timeout_s
        self.deadline_s = now + timeout_s  # on the loop's clock


class LoopLine:
    """Belongs to the thread of its event loop.

    Args:
        line: Proved, and used for nothing else from now on.
        address: The server's.
        nbytes_max: Of a reply.
    """

    def __init__(self, line: Line, address: str, *, nbytes_max: int) -> None:
        self._address = address
        self._nbytes_max = nbytes_max
        self.loop = asyncio.get_running_loop()
        self._socket = line.detach()
        self._queue: deque[_Call] = deque()
        self._current: _Call | None = None
        self._arrived = bytearray()
        self._timer: asyncio.TimerHandle | None = None
        self._is_writing = False
        self.closed = False
        self.loop.add_reader(self._socket, self._receive)

    def ask(self, request: bytes, timeout_s: float) -> asyncio.Future[bytes]:
        """Send a request when those before it are answered; the future has its reply.

        It fails with RpcTimeout, NotAsked, or ControlError if there will be no reply.
        """
        loop = self.loop
        frame = LENGTH.pack(len(request)) + request
        call = _Call(frame, loop.create_future(), timeout_s, loop.time())
        if self.closed:
            call.future.set_exception(NotAsked(f"the connection to {self._address} is closed"))
            return call.future
        self._queue.append(call)
        self._watch(call.deadline_s)
        if self._current is None:
            self._next()
        return call.future

    def close(self) -> None:
        """Hang up. Idempotent."""
        self._break(LineBroken(f"the connection to {self._address} was closed"))

    def _next(self) -> None:
        while self._queue and self._current is None:
            call = self._queue.popleft()
            if call.future.done():
                continue  # nobody waits for it any more
            self._current = call
            self._send()

    def _send(self) -> None:
        call = self._current
        if call is None:
            return
        try:
            sent = self._socket.send(call.unsent)
        except BlockingIOError:
            sent = 0
        except OSError as error:  # of an incomplete frame nothing is handled
            self._break(NotAsked(f"{self._address}: {error}"))
            return
        call.unsent = call.unsent[sent:]
        if bool(call.unsent) != self._is_writing:
            self._wait_for_room(wanted=bool(call.unsent))

    def _wait_for_room(self, *, wanted: bool) -> None:
        self._is_writing = wanted
        if wanted:
            self.loop.add_writer(self._socket, self._send)
        else:
            self.loop.remove_writer(self._socket)

    def _receive(self) -> None:
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._break(LineBroken(f"the connection broke: {error}"))
            return
        call = self._current
        if not data or call is None:
            self._break(LineBroken("the connection was closed before the reply"))
            return
        if self._arrived:
            self._arrived += data
        whole = self._arrived or data
        if len(whole) >= LENGTH.size:
            (nbytes,) = LENGTH.unpack_from(whole)
            if nbytes > self._nbytes_max or len(whole) > LENGTH.size + nbytes or call.unsent:
                self._break(LineBroken(f"a reply of {nbytes} bytes, {len(whole)} are there"))
                return
            if len(whole) == LENGTH.size + nbytes:
                self._current = None
                if not call.future.done():
                    call.future.set_result(bytes(whole[LENGTH.size :]))
                self._arrived.clear()
                self._next()
                return
        if not self._arrived:
            self._arrived += data

    def _watch(self, deadline_s: float) -> None:
        """Look again at this time, or sooner."""
        if self._timer is not None and self._timer.when() <= deadline_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_at(deadline_s, self._look)

    def _look(self) -> None:
        self._timer, now = None, self.loop.time()
        late = [call for call in self._queue if call.deadline_s <= now]
        for call in late:
            self._queue.remove(call)
            _fail(call, NotAsked(f"{self._address} was busy for {call.timeout_s} s"))
        current = self._current
        if current is not None and current.deadline_s <= now:
            self._break(RpcTimeout(self._address, current.timeout_s))
            return
        left = [call.deadline_s for call in (*self._queue, current) if call is not None]
        if left:
            self._watch(min(left))

    def _break(self, error: ControlError) -> None:
        if self.closed:
            return
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
        if not self.loop.is_closed():
            self.loop.remove_reader(self._socket)
            self.loop.remove_writer(self._socket)
        self._socket.close()
        current, self._current = self._current, None
        if current is not None:
            _fail(current, error)
        for call in self._queue:
            _fail(call, NotAsked(f"the connection to {self._address} broke before"))
        self._queue.clear()


def _fail(call: _Call, error: ControlError) -> None:
    if not call.future.done():
        call.future.set_exception(error)
