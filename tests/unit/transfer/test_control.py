"""Requests and replies, deadlines, restarts; and callers that are no members."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest
import zmq
import zmq.asyncio

from tests.support.engines import (
    SECRET,
    open_descriptors,
)
from tests.support.waits import eventually
from transfer import ControlError, RemoteError, RpcTimeout
from transfer.control import RpcClient, RpcServer, secure_client, secure_server
from transfer.curve import _key_pair

SOON_S = 60.0
LET_GO = threading.Event()  # who is to "sleep" does until then


def answer(identity: str, request: bytes) -> bytes:
    if request == b"fail":
        raise KeyError("no such block")
    if request == b"sleep":
        assert LET_GO.wait(SOON_S)
    return identity.encode() + b":" + request


@pytest.fixture
def server() -> Iterator[RpcServer]:
    server = RpcServer(SECRET, answer, host="127.0.0.1")
    server.open()
    yield server
    server.close()
    server.close()


@pytest.fixture
def client(server: RpcServer) -> Iterator[RpcClient]:
    client = RpcClient(server.address, SECRET, identity="worker-1")
    yield client
    client.close()
    client.close()


def test_requests_are_answered(client: RpcClient) -> None:
    for payload in (b"", b"x", b"y" * (4 << 20)):
        assert client.request(payload, timeout_s=SOON_S) == b"worker-1:" + payload


def test_a_handler_s_error_is_the_caller_s(client: RpcClient) -> None:
    with pytest.raises(RemoteError) as caught:
        client.request(b"fail", timeout_s=SOON_S)
    assert caught.value.kind == "KeyError"
    assert "no such block" in caught.value.detail
    assert client.request(b"next", timeout_s=SOON_S) == b"worker-1:next"


def test_a_late_reply_is_not_taken_for_the_next(client: RpcClient) -> None:
    assert client.request(b"warm", timeout_s=SOON_S) == b"worker-1:warm"
    LET_GO.clear()
    with pytest.raises(RpcTimeout) as caught:
        client.request(b"sleep", timeout_s=0.05)
    LET_GO.set()
    assert caught.value.retryable
    assert client.request(b"next", timeout_s=SOON_S) == b"worker-1:next"


def test_many_threads_share_a_client(client: RpcClient) -> None:
    got: list[bytes] = []

    def ask(i: int) -> None:
        for j in range(20):
            payload = b"%d-%d" % (i, j)
            reply = client.request(payload, timeout_s=SOON_S)
            if reply == b"worker-1:" + payload:
                got.append(reply)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)
    assert len(got) == 80


def test_a_client_survives_a_restarted_server() -> None:
    first = RpcServer(SECRET, answer, host="127.0.0.1")
    first.open()
    host, port = first.address.split(":")
    client = RpcClient(first.address, SECRET, identity="c")
    assert client.request(b"1", timeout_s=SOON_S) == b"c:1"
    first.close()
    with pytest.raises(RpcTimeout):
        client.request(b"2", timeout_s=0.1)
    second = RpcServer(SECRET, answer, host=host, port=int(port))
    second.open()
    assert client.request(b"3", timeout_s=SOON_S) == b"c:3"
    client.close()
    second.close()
    with pytest.raises(ControlError, match="closed"):
        client.request(b"4", timeout_s=1.0)


def test_an_address_in_use_is_an_error(server: RpcServer) -> None:
    second = RpcServer(SECRET, answer, host="127.0.0.1", port=int(server.address.split(":")[1]))
    with pytest.raises(ControlError, match="bind"):
        second.open()
    second.close()


def plain(socket: zmq.Socket[bytes]) -> None:
    """No security at all."""


def wrong_secret(socket: zmq.Socket[bytes]) -> None:
    secure_client(socket, b"guess", identity="spy")


def wrong_client_key(socket: zmq.Socket[bytes]) -> None:
    """Knows the server's public key, and yet is no member."""
    secure_client(socket, SECRET, identity="spy")
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()


@pytest.mark.parametrize("secure", [plain, wrong_secret, wrong_client_key])
def test_strangers_get_nothing(
    server: RpcServer, client: RpcClient, secure: Callable[[zmq.Socket[bytes]], None]
) -> None:
    heard: list[bytes] = []

    def listen(identity: str, request: bytes) -> bytes:
        heard.append(request)
        return b""

    server._handler = listen
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        secure(socket)
        socket.connect(f"tcp://{server.address}")
        socket.send_multipart([b"1", b"let me in"])
        assert not socket.poll(500)
    client.request(b"member", timeout_s=SOON_S)
    assert heard == [b"member"]


def test_asyncio_sockets_can_be_secured() -> None:
    async def main() -> list[bytes]:
        with zmq.asyncio.Context() as context:
            server, client = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
            server.linger = client.linger = 0
            secure_server(server, SECRET)
            port = server.bind_to_random_port("tcp://127.0.0.1")
            secure_client(client, SECRET, identity="async")
            client.connect(f"tcp://127.0.0.1:{port}")
            await client.send(b"hello")
            got = await asyncio.wait_for(server.recv_multipart(), SOON_S)
            server.close()
            client.close()
        return got

    assert asyncio.run(main()) == [b"async", b"hello"]


def test_two_clusters_in_one_context_stay_apart() -> None:
    with zmq.Context() as context:
        sockets = {}
        for secret in (b"one", b"two"):
            server, client = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
            secure_server(server, secret)
            port = server.bind_to_random_port("tcp://127.0.0.1")
            secure_client(client, secret, identity=secret.decode())
            client.connect(f"tcp://127.0.0.1:{port}")
            client.send(secret)
            sockets[secret] = (server, client)
        for secret, (server, client) in sockets.items():
            assert server.poll(SOON_S * 1000)
            assert server.recv_multipart() == [secret, secret]
            server.close(0)
            client.close(0)


def test_the_keys_of_the_roles_differ() -> None:
    pairs = {_key_pair(secret, role) for secret in (b"a", b"b") for role in (b"server", b"client")}
    assert len(pairs) == 4


@pytest.mark.parametrize("port", [-5, 65536])
def test_what_is_no_port_is_refused(port: int) -> None:
    with pytest.raises(ValueError, match="a port is in"):
        RpcServer(SECRET, answer, host="127.0.0.1", port=port)


def test_nothing_is_left_behind() -> None:
    def cycle() -> None:
        server = RpcServer(SECRET, answer, host="127.0.0.1")
        server.open()
        client = RpcClient(server.address, SECRET, identity="c")
        client.request(b"x", timeout_s=SOON_S)
        client.close()
        server.close()

    cycle()
    before = open_descriptors()
    for _ in range(3):
        cycle()
    eventually(lambda: open_descriptors() <= before, "descriptors are closed")


def test_an_address_that_is_none_is_an_error_and_holds_up_nothing() -> None:
    client = RpcClient("nonsense", SECRET, identity="worker-1")
    for _ in range(2):
        with pytest.raises(ControlError, match="'nonsense' cannot be called"):
            client.request(b"", timeout_s=SOON_S)
    closing = threading.Thread(target=client.close, daemon=True)
    closing.start()
    closing.join(SOON_S)
    assert not closing.is_alive()
