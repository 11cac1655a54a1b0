"""Requests within a host go by a unix socket, which strangers cannot use or pretend to be."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from tests.support.engines import SECRET
from transfer import ControlError, RpcTimeout
from transfer.control import RpcClient, RpcServer
from transfer.local_rpc import Line, is_ours, socket_name

SOON_S = 60.0
# Who is to "sleep" says so, and does until it is let go.
BEGUN, LET_GO = threading.Event(), threading.Event()


def answer(identity: str, request: bytes) -> bytes:
    if request == b"sleep":
        BEGUN.set()
        assert LET_GO.wait(SOON_S)
    return threading.current_thread().name.encode() + b"|" + request


@pytest.fixture
def server() -> Iterator[RpcServer]:
    server = RpcServer(SECRET, answer, host="127.0.0.1")
    server.open()
    yield server
    server.close()


def connect(server: RpcServer) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(SOON_S)
    sock.connect(socket_name(server.address, SECRET))
    return sock


def ended(sock: socket.socket) -> bool:
    try:
        return sock.recv(1 << 16) == b""
    except ConnectionError:
        return True


def test_a_host_s_own_requests_go_by_the_unix_socket(server: RpcServer) -> None:
    client = RpcClient(server.address, SECRET, identity="a")
    seed = time.time_ns()
    noise = random.Random(seed)
    for nbytes in (0, 1, 4, 1 << 18, (1 << 18) + 1, 9 << 20):
        payload = noise.randbytes(nbytes)
        assert client.request(payload, timeout_s=SOON_S) == b"rpc-local|" + payload, seed
    client.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
def test_a_server_on_all_addresses_is_found_by_any(host: str) -> None:
    server = RpcServer(SECRET, answer, host=host)
    server.open()
    port = server.address.rpartition(":")[2]
    client = RpcClient(f"127.0.0.1:{port}", SECRET, identity="a")
    assert client.request(b"x", timeout_s=SOON_S) == b"rpc-local|x"
    client.close()
    server.close()


def test_a_server_that_is_taken_away_is_looked_for_again(server: RpcServer) -> None:
    client = RpcClient(server.address, SECRET, identity="a")
    assert client.request(b"1", timeout_s=SOON_S) == b"rpc-local|1"
    server.close()
    with pytest.raises(RpcTimeout):
        client.request(b"2", timeout_s=0.1)
    host, port = server.address.split(":")
    again = RpcServer(SECRET, answer, host=host, port=int(port))
    again.open()
    assert client.request(b"3", timeout_s=SOON_S).endswith(b"|3")
    client.close()
    again.close()


def test_a_server_that_ends_answers_what_it_has_begun(server: RpcServer) -> None:
    client = RpcClient(server.address, SECRET, identity="a")
    client.request(b"warm", timeout_s=SOON_S)
    BEGUN.clear()
    LET_GO.clear()

    def end() -> None:
        assert BEGUN.wait(SOON_S)
        threading.Timer(0.2, LET_GO.set).start()
        server.close()

    ender = threading.Thread(target=end)
    ender.start()
    assert client.request(b"sleep", timeout_s=SOON_S) == b"rpc-local|sleep"
    ender.join()
    with pytest.raises(ControlError):
        client.request(b"next", timeout_s=0.2)
    client.close()


def test_a_late_reply_is_not_taken_for_the_next(server: RpcServer) -> None:
    client = RpcClient(server.address, SECRET, identity="a")
    client.request(b"warm", timeout_s=SOON_S)
    LET_GO.clear()
    with pytest.raises(RpcTimeout):
        client.request(b"sleep", timeout_s=0.05)
    LET_GO.set()
    assert client.request(b"next", timeout_s=SOON_S) == b"rpc-local|next"
    client.close()


@pytest.mark.parametrize(
    "said",
    [
        b"",
        struct.pack("<I", 0),
        struct.pack("<I", 1 << 31),
        struct.pack("<I", 33) + bytes(33) + struct.pack("<I", 32) + bytes(32),
        struct.pack("<I", 33) + bytes(33) + struct.pack("<I", 3) + b"abc",
    ],
)
def test_strangers_are_hung_up_on(server: RpcServer, said: bytes) -> None:
    heard: list[bytes] = []

    def listen(identity: str, request: bytes) -> bytes:
        heard.append(request)
        return b""

    server._handler = listen
    with connect(server) as sock:
        sock.sendall(said)
        sock.shutdown(socket.SHUT_WR)
        while not ended(sock):
            pass
    assert heard == []


def test_who_pretends_to_be_the_server_learns_nothing() -> None:
    name = b"\0moe-runtime-rpc-test-" + str(time.time_ns()).encode()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name)
        listener.listen()
        listener.settimeout(SOON_S)

        def pretend() -> None:
            with listener.accept()[0] as sock:
                sock.recv(1 << 16)
                sock.sendall(struct.pack("<I", 64) + bytes(64))
                told.append(sock.recv(1 << 16))

        told: list[bytes] = []
        thread = threading.Thread(target=pretend)
        thread.start()
        assert Line.open(name, SECRET, "a", time.monotonic() + SOON_S) is None
        thread.join(SOON_S)
        assert told == [b""]


def test_only_addresses_of_this_host_are_ours() -> None:
    assert is_ours("127.0.0.1")
    assert not is_ours("192.0.2.1")
    assert not is_ours("no such host")


def test_a_server_without_descriptors_serves_those_it_has(server: RpcServer) -> None:
    client = RpcClient(server.address, SECRET, identity="a")
    client.request(b"warm", timeout_s=SOON_S)
    held = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        with socket.socket(socket.AF_UNIX) as late:
            late.settimeout(SOON_S)
            number = os.open(os.devnull, os.O_RDONLY)
            held.append(number)
            resource.setrlimit(resource.RLIMIT_NOFILE, (number + 1, hard))
            with contextlib.suppress(OSError):
                while True:
                    held.append(os.open(os.devnull, os.O_RDONLY))
            late.connect(socket_name(server.address, SECRET))
            begin = time.process_time()
            time.sleep(0.5)
            assert time.process_time() - begin < 0.25, "nobody spins"
            assert client.request(b"x", timeout_s=SOON_S) == b"rpc-local|x"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for number in held:
            os.close(number)
    other = RpcClient(server.address, SECRET, identity="b")
    assert other.request(b"y", timeout_s=SOON_S).endswith(b"|y")
    other.close()
    client.close()
