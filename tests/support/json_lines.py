"""Lines of JSON over a socket: how a test and a process of it talk."""

from __future__ import annotations

import json
import socket
from typing import Any

ANSWER_S = 60.0


class JsonLines:
    """Both directions of one connection. Not thread-safe."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(ANSWER_S)
        self._sock = sock
        self._rest = b""

    def say(self, **fields: Any) -> None:
        self._sock.sendall(json.dumps(fields).encode() + b"\n")

    def hear(self) -> dict[str, Any]:
        while b"\n" not in self._rest:
            data = self._sock.recv(1 << 16)
            if not data:
                raise EOFError("the other side has ended")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        self._sock.close()
