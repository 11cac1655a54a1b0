"""Congestion control of a connection within this machine: chosen before it stands.

Nothing is lost or queued there, so that there is no bandwidth to find out. BBR sends in time with
what it has found out, a timer for every few packets, and each timer interrupts whoever has the
core: an activation, say. A socket that was BBR's once keeps these timers whatever it is given
afterwards, so a caller chooses before it connects, and a listener for all whom it accepts, who get
back what the system has if they turn out to call over a network.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Final

# Each kernel has it and lets everybody use it; within a machine it does nothing but count.
UNPACED: Final = b"reno"
PACED: Final = (b"bbr",)
# Linux's number; Python knows it only there.
TCP_CONGESTION: Final = getattr(socket, "TCP_CONGESTION", 13)
NAME_BYTES: Final = 16


def congestion_of(sock: socket.socket) -> bytes:
    """Return the name of a socket's algorithm; empty where there is none."""
    try:
        name: bytes = sock.getsockopt(socket.IPPROTO_TCP, TCP_CONGESTION, NAME_BYTES)
    except OSError:
        return b""
    return name.rstrip(b"\0")


def is_paced(name: bytes) -> bool:
    """Whether an algorithm, or a later version of it, paces by itself."""
    return name.startswith(PACED)


def set_congestion(sock: socket.socket, name: bytes) -> None:
    """Choose an algorithm; where a sandbox refuses that it stays: slower, and as good."""
    with suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, TCP_CONGESTION, name)
