"""Plain sockets and memcpy, in C: what this host allows.

python raw_transfer.py LIBRARY
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

import exchange

KINDS = {"write": 0, "read": 1}
SYSTEM, RENO = "system", "reno"


class RawSide:
    """Several connections of which a request uses the first `connections`; 0 is memcpy.

    They have the system's congestion control, or the request's `congestion`.
    """

    def __init__(self, library: str) -> None:
        self._library = ctypes.CDLL(library)
        self._target = exchange.start_target(__file__, library)
        told = exchange.answer(self._target)
        self.pids = [os.getpid(), self._target.pid]
        self._memory = exchange.filled(exchange.WINDOW_BYTES, 1)
        self._other = exchange.filled(exchange.WINDOW_BYTES, 2)
        self._sets: dict[tuple[int, str], Any] = {}
        self._ports = told["ports"]
        self._copied = False

    def local(self) -> Any:
        return self._memory

    def remote(self, offset: int, nbytes: int) -> bytes:
        if self._copied:
            return bytes(self._other[offset : offset + nbytes].tobytes())
        return exchange.ask_bytes(self._target, offset, nbytes)

    def operation(self, request: dict[str, Any], local: Any, remote: Any) -> Callable[[], None]:
        here, there = (a.ctypes.data_as(ctypes.POINTER(ctypes.c_int64)) for a in (local, remote))
        size, blocks = ctypes.c_size_t(request["size"]), ctypes.c_size_t(request["blocks"])
        base = ctypes.c_void_p(self._memory.ctypes.data)
        self._copied = request["connections"] == 0
        keep = (local, remote)
        if self._copied:
            other, copy = ctypes.c_void_p(self._other.ctypes.data), self._library.raw_copy
            if request["op"] == "write":
                return lambda: keep and copy(other, base, there, here, size, blocks)
            return lambda: keep and copy(base, other, here, there, size, blocks)
        count = request["connections"]
        descriptors = self._connections(count, request.get("congestion", SYSTEM))
        kind, move = KINDS[request["op"]], self._library.raw_move

        def go() -> None:
            if move(descriptors, count, kind, base, here, there, size, blocks) or not keep:
                raise RuntimeError("the connection failed")

        return go

    def _connections(self, count: int, congestion: str) -> Any:
        if (count, congestion) not in self._sets:
            port = self._ports[congestion]
            descriptors = [self._library.raw_connect(port) for _ in range(count)]
            if min(descriptors) < 0:
                raise RuntimeError("cannot connect")
            for descriptor in descriptors if congestion != SYSTEM else ():
                with socket.socket(fileno=os.dup(descriptor)) as sock:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
            for descriptor in descriptors if count > 1 else ():
                flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
                fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_NONBLOCK)
            self._sets[count, congestion] = (ctypes.c_int * count)(*descriptors)
        return self._sets[count, congestion]


def target(library: str) -> None:
    """Serve the memory on a thread, and tell its bytes."""
    import threading

    memory = exchange.filled(exchange.WINDOW_BYTES, 7)
    serve = ctypes.CDLL(library).raw_serve
    listeners = {name: socket.create_server(("127.0.0.1", 0)) for name in (SYSTEM, RENO)}
    # What it accepts is as it is.
    listeners[RENO].setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, RENO.encode())
    for listener in listeners.values():
        arguments = (listener.fileno(), ctypes.c_void_p(memory.ctypes.data),
                     ctypes.c_size_t(memory.nbytes))  # fmt: skip
        threading.Thread(target=serve, args=arguments, daemon=True).start()
    exchange.say({"ports": {name: sock.getsockname()[1] for name, sock in listeners.items()}})
    exchange.serve_bytes(memory)
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "target":
        target(sys.argv[2])
    else:
        exchange.serve(RawSide(sys.argv[1]))
