"""What a connection within a host is made to be, and that one over a network is left alone."""

from __future__ import annotations

import socket

import pytest

from tests.support.data_connections import tcp_pair
from tests.support.engines import engine_pair, offer
from transfer import allocate
from transfer.backends.lane import LOCAL_BUFFER_BYTES, tune
from transfer.connections import rendezvous
from transfer.connections.congestion import (
    TCP_CONGESTION,
    UNPACED,
    congestion_of,
    is_paced,
    set_congestion,
)
from transfer.host import host_identity, share_machine

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


def test_a_connection_within_the_host_needs_no_model_of_a_network() -> None:
    ours, theirs = tcp_pair()
    default = congestion_of(theirs)
    tune(ours)
    assert congestion_of(ours) == UNPACED
    assert congestion_of(theirs) == default, "each side tunes its own"
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
    assert (socket.IPPROTO_TCP, TCP_CONGESTION, UNPACED) in own.options


def test_a_local_socket_of_another_kind_has_no_such_option() -> None:
    ours, theirs = socket.socketpair()
    tune(ours)
    assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) > 0
    ours.close()
    theirs.close()


def test_whom_a_listener_accepts_has_its_algorithm_and_may_be_given_back_the_systems() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        system = congestion_of(listener)
        set_congestion(listener, UNPACED)
        with socket.create_connection(listener.getsockname()) as ours:
            theirs, _ = listener.accept()
            with theirs:
                assert congestion_of(ours) == system
                assert congestion_of(theirs) == UNPACED
                set_congestion(theirs, system)
                assert congestion_of(theirs) == system
                ours.sendall(b"still connected")
                assert theirs.recv(64) == b"still connected"


@pytest.mark.parametrize("same", [True, False])
def test_the_algorithm_is_chosen_before_a_connection_stands(
    monkeypatch: pytest.MonkeyPatch, same: bool
) -> None:
    """Of a system that paces: callers of this machine are spared it, all others have it."""
    with socket.socket() as plain:
        system = congestion_of(plain)
    chosen: list[tuple[str, bytes]] = []

    def choose(sock: socket.socket, name: bytes) -> None:
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            state = "listens"
        else:
            try:
                sock.getpeername()
                state = "stands"
            except OSError:
                state = "new"
        chosen.append((state, name))
        set_congestion(sock, name)

    monkeypatch.setattr(rendezvous, "is_paced", lambda name: name == system)
    monkeypatch.setattr(rendezvous, "set_congestion", choose)
    monkeypatch.setattr(rendezvous, "share_machine", lambda one, other: same)
    with engine_pair("tcp") as (a, b):
        theirs, ours = b.register(allocate(4096)), a.register(allocate(4096))
        a.write(b.name, ours, offer(b, theirs, a), 0, 0, 4096).wait()
        assert a.statistics().rails, "a data connection stands"
    listeners = [item for item in chosen if item[0] == "new" and item[1] == UNPACED]
    assert len(listeners) >= 2, "both engines' listeners, before they listen"
    given_back = [item for item in chosen if item[0] == "stands"]
    assert bool(given_back) is not same
    assert all(name == system for _, name in given_back)


def test_what_paces_is_known_by_name_in_all_its_versions() -> None:
    assert is_paced(b"bbr")
    assert is_paced(b"bbr3")
    assert not is_paced(b"cubic")
    assert not is_paced(b"")


def test_processes_share_a_machine_whatever_their_network_namespaces() -> None:
    own = host_identity()
    boot, _, namespace = own.partition("/")
    assert share_machine(own, f"{boot}/{int(namespace) + 1}")
    assert not share_machine(own, f"{boot[::-1]}x/{namespace}")
