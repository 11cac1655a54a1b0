"""Encrypted sockets behave like plain ones, and tell what `poll` cannot see."""

from __future__ import annotations

import random
import select
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.certificates import member_tls
from tests.support.data_connections import tcp_pair
from transfer.connections.tls import Credentials
from transfer.connections.tls_socket import TLS_ONLY, TlsSocket
from transfer.errors import HandshakeRefused

SOON_S = 60.0
Pair = tuple[TlsSocket, TlsSocket]


@pytest.fixture(scope="module")
def credentials() -> Credentials:
    found = Credentials.load(member_tls())
    assert found is not None
    return found


def secured(credentials: Credentials) -> Pair:
    plain = tcp_pair()
    pair = (
        TlsSocket(plain[0], credentials, server_side=False),
        TlsSocket(plain[1], credentials, server_side=True),
    )
    while not all(side.secured for side in pair):
        for side in pair:
            patiently(side.secure)
    return pair


def patiently(call: Callable[[], Any]) -> Any:
    """The call's value, or None where it would have to wait."""
    try:
        return call()
    except BlockingIOError:
        return None


@pytest.fixture
def pair(credentials: Credentials) -> Iterator[Pair]:
    made = secured(credentials)
    yield made
    for side in made:
        side.close()


def await_readable(sock: TlsSocket) -> None:
    assert sock.buffered or select.select([sock], [], [], SOON_S)[0]


def test_any_portions_arrive_as_they_were_sent(pair: Pair) -> None:
    seed = random.randrange(2**32)
    generator = random.Random(seed)
    left, right = pair
    sent = generator.randbytes(6 << 20)
    got = bytearray()

    def receive() -> None:
        while len(got) < len(sent):
            await_readable(right)
            sizes = [generator.choice([0, 1, 7, 5000, 300_000]) for _ in range(3)]
            places = [bytearray(size) for size in sizes]
            if not any(sizes):
                continue
            received = patiently(lambda places=places: right.recvmsg_into(places)[0])
            assert received != 0, "not closed"
            got.extend(b"".join(places)[: received or 0])

    thread = threading.Thread(target=receive)
    thread.start()
    writer, rest = random.Random(seed + 1), memoryview(sent)
    while rest.nbytes or left.unsent:
        cuts = sorted(writer.randrange(min(rest.nbytes, 1 << 20) + 1) for _ in range(4))
        parts = [rest[a:b] for a, b in zip([0, *cuts], cuts, strict=False)]
        taken = patiently(lambda parts=parts: left.sendmsg(parts))
        rest = rest[taken or 0 :]
        if taken is None:
            select.select([], [left], [], SOON_S)
        elif not rest.nbytes:
            left.flush()
    thread.join(SOON_S)
    assert not thread.is_alive()
    assert bytes(got) == sent, f"seed {seed}"


def test_what_was_read_ahead_is_told_since_poll_does_not_see_it(pair: Pair) -> None:
    left, right = pair
    left.sendmsg([b"a" * 100, b"b" * 100])
    left.sendmsg([b"c" * 100])
    assert select.select([right], [], [], SOON_S)[0]
    assert not right.buffered, "nothing was read yet"
    assert right.recv(150) == b"a" * 100 + b"b" * 50
    assert right.buffered
    heard = b""
    while len(heard) < 150:
        await_readable(right)
        heard += right.recv(1000)
    assert heard == b"b" * 50 + b"c" * 100
    assert not right.buffered
    with pytest.raises(BlockingIOError):
        right.recv(1)


def test_sending_stops_where_nobody_reads(pair: Pair) -> None:
    left, right = pair
    taken = 0
    while (sent := patiently(lambda: left.send(b"x" * (1 << 20)))) is not None:
        taken += sent
        assert taken < 64 << 20, "the kernel's buffers are not that large"
    assert left.unsent
    received = 0
    while received < taken:
        left.flush()
        await_readable(right)
        received += len(right.recv(1 << 20))
    assert not left.unsent
    assert received == taken


def test_the_end_of_a_stream_is_an_end(pair: Pair) -> None:
    left, right = pair
    left.send(b"last words")
    left.shutdown(socket.SHUT_RDWR)
    await_readable(right)
    assert right.recv(100) == b"last words"
    await_readable(right)
    assert right.recv(100) == b""


def test_bytes_that_were_changed_on_the_way_are_not_delivered(credentials: Credentials) -> None:
    left, right = secured(credentials)
    with left, right:
        socket.socket.send(left, b"\x17\x03\x03\x00\x20" + b"z" * 32)
        await_readable(right)
        with pytest.raises(OSError, match=r"(?i)bad record mac"):
            right.recv(100)


def test_both_ends_of_a_connection_name_it_alike_and_no_other(credentials: Credentials) -> None:
    pairs = [secured(credentials) for _ in range(2)]
    names = [{side.channel() for side in pair} for pair in pairs]
    assert [len(name) for name in names] == [1, 1]
    assert names[0] != names[1]
    for side in (side for pair in pairs for side in pair):
        side.close()


def test_nobody_gets_at_the_bare_descriptor(pair: Pair) -> None:
    with pytest.raises(TypeError):
        pair[0].detach()


def half(credentials: Credentials, *, server_side: bool) -> tuple[TlsSocket, socket.socket]:
    ours, theirs = tcp_pair()
    return TlsSocket(ours, credentials, server_side=server_side), theirs


def secure_within(sock: TlsSocket) -> None:
    while not sock.secured:
        try:
            sock.secure()
        except BlockingIOError:
            assert select.select([sock], [], [], SOON_S)[0]


def test_a_caller_without_tls_is_told_so(credentials: Credentials) -> None:
    sock, caller = half(credentials, server_side=True)
    with sock, caller:
        caller.sendall(b"\0\x20 and so on")
        with pytest.raises(HandshakeRefused, match="speaks no TLS"):
            secure_within(sock)
        assert caller.recv(100) == TLS_ONLY


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 no\r\n\r\n"])
def test_an_owner_without_tls_is_refused(credentials: Credentials, answer: bytes) -> None:
    sock, owner = half(credentials, server_side=False)
    with sock, owner:
        owner.sendall(answer)
        owner.shutdown(socket.SHUT_WR)
        with pytest.raises(HandshakeRefused, match="TLS"):
            secure_within(sock)
