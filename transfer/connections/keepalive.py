"""Finding out that a peer's machine has vanished, without any traffic."""

from __future__ import annotations

import socket
from typing import Final

# After about six seconds; then other ways to the peer are tried, see `resumption`.
KEEPALIVE: Final = {
    socket.TCP_KEEPIDLE: 3,
    socket.TCP_KEEPINTVL: 1,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 6_000,
}


def keep_alive(sock: socket.socket) -> None:
    """Let the kernel ask the other side whether it is there, unless it is on this host."""
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE.items():
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
