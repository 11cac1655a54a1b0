"""What a connection within a host is made to be, and that one over a network is left alone."""

from __future__ import annotations

import socket

import pytest

from tests.support.data_connections import tcp_pair
from transfer.backends.lane import LOCAL_BUFFER_BYTES, LOCAL_CONGESTION, TCP_CONGESTION, tune

pytestmark = pytest.mark.unit


class Far:
    """A connection from 192.0.2.1 to 192.0.2.2, or of one of them with itself."""

    family = socket.AF_INET

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self.options: list[tuple[int, int, object]] = []

    def getpeername(self) -> tuple[str, int]:
        return self._peer, 1

    def getsockname(self) -> tuple[str, int]:
        return "192.0.2.1", 2

    def setsockopt(self, level: int, option: int, value: object) -> None:
        self.options.append((level, option, value))
        if option == TCP_CONGESTION and level == socket.IPPROTO_TCP:
            raise FileNotFoundError("a system without it")


def congestion(sock: socket.socket) -> bytes:
    return sock.getsockopt(socket.IPPROTO_TCP, TCP_CONGESTION, 16).rstrip(b"\0")


def test_a_connection_within_the_host_needs_no_model_of_a_network() -> None:
    ours, theirs = tcp_pair()
    default = congestion(theirs)
    tune(ours)
    assert congestion(ours) == LOCAL_CONGESTION
    assert congestion(theirs) == default, "each side tunes its own"
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        bounded = ours.getsockopt(socket.SOL_SOCKET, option)
        # Doubled by the kernel, or cut at what it allows.
        assert bounded == 2 * LOCAL_BUFFER_BYTES or bounded < LOCAL_BUFFER_BYTES * 2
    ours.sendall(b"still connected")
    assert theirs.recv(64) == b"still connected"
    ours.close()
    theirs.close()


def test_a_connection_over_a_network_is_left_to_the_system() -> None:
    far = Far("192.0.2.2")
    tune(far)  # type: ignore[arg-type]
    assert far.options == []


def test_a_system_that_refuses_the_algorithm_keeps_its_own() -> None:
    own = Far("192.0.2.1")
    tune(own)  # type: ignore[arg-type]
    assert (socket.IPPROTO_TCP, TCP_CONGESTION, LOCAL_CONGESTION) in own.options


def test_a_local_socket_of_another_kind_has_no_such_option() -> None:
    ours, theirs = socket.socketpair()
    tune(ours)
    assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) > 0
    ours.close()
    theirs.close()
