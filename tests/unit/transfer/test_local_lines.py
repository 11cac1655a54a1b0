"""Servers of the caller's host and others, asked at once: who is stopped or dies keeps nobody."""

from __future__ import annotations

import os
import random
import secrets
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from transfer import ControlError, RpcTimeout, local_lines, native
from transfer.control import RpcServer
from transfer.errors import RemoteError
from transfer.fan_out import RpcFanOut
from transfer.local_rpc import socket_name

SOON_S = 60.0
SECRET = secrets.token_bytes(16)
WAYS = ["python", "compiled"] if native.compiled is not None else ["python"]


@pytest.fixture(params=WAYS, autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "python":
        monkeypatch.setattr(native, "compiled", None)
    return request.param


def answer(identity: str, request: bytes) -> bytes:
    if request == b"raise":
        raise ValueError("no")
    return threading.current_thread().name.encode() + b"|" + request


def open_server(port: int = 0) -> RpcServer:
    server = RpcServer(SECRET, answer, host="127.0.0.1", port=port)
    server.open()
    return server


@pytest.fixture
def servers() -> Iterator[list[RpcServer]]:
    """Three; the last one is found by ZeroMQ only."""
    made = [open_server() for _ in range(3)]
    made[2]._local.close()
    yield made
    for server in made:
        server.close()


@pytest.fixture
def ways() -> Iterator[RpcFanOut]:
    made = RpcFanOut(SECRET, identity="me")
    yield made
    made.close()


@pytest.fixture
def all_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, a server of this host counts as one."""
    monkeypatch.setattr(local_lines, "TAKEN_S", SOON_S)


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


class Impostor:
    """Listens in the place of a server's local end, and takes no notice of anybody."""

    def __init__(self, server: RpcServer) -> None:
        server._local.close()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(socket_name(server.address, SECRET))
        self._socket.listen(100)

    def close(self) -> None:
        self._socket.close()


def test_those_of_this_host_are_asked_without_a_thread(servers, ways, all_are_taken):
    noise = random.Random(seed := time.time_ns())
    for nbytes in (0, 1, 5000, 300_000, 3 << 20):
        payloads = [noise.randbytes(nbytes) for _ in range(2)]
        calls = [(s.address, p) for s, p in zip(servers, payloads, strict=False)]
        expected = [b"rpc-local|" + payload for payload in payloads]
        assert ways.request(calls, timeout_s=SOON_S) == expected, seed
    assert ways._thread is None
    replies = ways.request([(s.address, b"x") for s in servers], timeout_s=SOON_S)
    assert replies == [b"rpc-local|x", b"rpc-local|x", b"rpc-server|x"]
    failed, fine = ways.request([(servers[0].address, b"raise"), (servers[1].address, b"y")],
                                timeout_s=SOON_S)  # fmt: skip
    assert isinstance(failed, RemoteError)
    assert fine == b"rpc-local|y"


def test_threads_do_not_take_turns(servers, ways, all_are_taken):
    def ask(number: int) -> None:
        for turn in range(40):
            payload = b"%d %d" % (number, turn)
            found = ways.request([(s.address, payload) for s in servers], timeout_s=SOON_S)
            wrong.extend(reply for reply in found if not reply.endswith(b"|" + payload))

    wrong: list[bytes] = []
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)
    assert not wrong


def test_one_that_is_stopped_costs_the_others_nothing(ways):
    """One that does not even say who it is, and one that has taken its request."""
    entered, go = threading.Event(), threading.Event()

    def stall(identity: str, request: bytes) -> bytes:
        entered.set()
        assert go.wait(SOON_S)
        return request

    deaf, fine = open_server(), open_server()
    impostor = Impostor(deaf)
    slow = RpcServer(SECRET, stall, host="127.0.0.1")
    slow.open()
    try:
        # The deaf one is asked by ZeroMQ instead, where it does answer.
        calls = [(deaf.address, b"1"), (fine.address, b"2")]
        first, second = ways.request(calls, timeout_s=SOON_S)
        assert (first, second.partition(b"|")[2]) == (b"rpc-server|1", b"2")
        calls = [(slow.address, b"1"), (fine.address, b"2"), (deaf.address, b"3")]
        silent, *replies = ways.request(calls, timeout_s=6.0)
        assert entered.is_set()
        assert isinstance(silent, RpcTimeout)
        assert [reply.partition(b"|")[2] for reply in replies] == [b"2", b"3"]
    finally:
        go.set()
        impostor.close()
        for server in (deaf, fine, slow):
            server.close()


def test_what_is_too_long_for_a_stopped_one_is_not_half_handled(servers, ways):
    """Its socket is full: of the incomplete frame nothing is handled, ZeroMQ brings it whole."""
    go, heard = threading.Event(), []

    def stall(identity: str, request: bytes) -> bytes:
        heard.append(len(request))
        if len(heard) == 1:
            assert go.wait(SOON_S)
        return b"%d" % len(request)

    slow = RpcServer(SECRET, stall, host="127.0.0.1")
    slow.open()
    first = threading.Thread(target=lambda: ways.request([(slow.address, b"x")], timeout_s=SOON_S))
    first.start()
    while not heard:
        time.sleep(0.001)
    freeing = threading.Timer(0.3, go.set)
    freeing.start()
    nbytes = 20 << 20
    found = ways.request([(slow.address, bytes(nbytes)), (servers[0].address, b"y")],
                         timeout_s=SOON_S)  # fmt: skip
    assert [reply.partition(b"|")[2] or reply for reply in found] == [b"%d" % nbytes, b"y"]
    first.join()
    freeing.join()
    slow.close()
    assert heard == [1, nbytes]


def test_one_that_dies_under_a_request_says_so_at_once(ways, all_are_taken):
    server = open_server()
    assert ways.request([(server.address, b"1")], timeout_s=SOON_S) == [b"rpc-local|1"]

    def die(identity: str, request: bytes) -> bytes:
        caller = next(iter(server._local._callers.values()))
        caller.socket.shutdown(socket.SHUT_RDWR)
        return request

    server._handler = die
    begin = time.monotonic()
    (found,) = ways.request([(server.address, b"2")], timeout_s=SOON_S)
    assert isinstance(found, ControlError)
    assert not isinstance(found, RpcTimeout)
    assert time.monotonic() - begin < SOON_S / 2
    server.close()


def test_one_that_starts_again_is_found_and_nothing_is_left(ways, all_are_taken):
    ways.request([("127.0.0.1:9", b"x")], timeout_s=0.1)  # its thread is there from now on
    before = num_descriptors()
    server = open_server()
    assert ways.request([(server.address, b"1")], timeout_s=SOON_S) == [b"rpc-local|1"]
    server.close()
    again = open_server(int(server.address.rpartition(":")[2]))
    assert ways.request([(again.address, b"2")], timeout_s=SOON_S) == [b"rpc-local|2"]
    ways.forget(again.address)
    assert ways.request([(again.address, b"3")], timeout_s=SOON_S) == [b"rpc-local|3"]
    ways.close()
    again.close()
    assert num_descriptors() <= before
    with pytest.raises(ControlError):
        ways.request([(again.address, b"4")], timeout_s=SOON_S)
