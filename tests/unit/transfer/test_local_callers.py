"""The server's end of a local control channel, compiled and in Python: frames however they come."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.engines import SECRET
from transfer import native
from transfer.local_exchange import Exchange
from transfer.local_rpc import LENGTH, RECEIVE_BYTES, Line, frame, socket_name

SOON_S = 60.0
ADDRESS = "127.0.0.1:1"
BYTES_MAX = 2 * RECEIVE_BYTES
WAYS = ["python", "compiled"] if native.compiled is not None else ["python"]


@pytest.fixture(params=WAYS)
def exchange(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Exchange]:
    if request.param == "python":
        monkeypatch.setattr(native, "compiled", None)
    # An address of this test alone: the name of the socket is made of it and of the secret.
    server = Exchange(
        f"{ADDRESS}{os.getpid()}", SECRET, lambda who, asked: who.encode() + asked[::-1],
        nbytes_max=BYTES_MAX,
    )  # fmt: skip
    server.open()
    before = len(os.listdir("/proc/self/fd"))
    yield server
    deadline_s = time.monotonic() + SOON_S
    while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/fd")) <= before, "who hung up is forgotten"
    server.close()


def meet(name: str) -> Line:
    found = Line.open(
        socket_name(f"{ADDRESS}{os.getpid()}", SECRET), SECRET, name, time.monotonic() + SOON_S
    )
    assert found is not None
    return found


def proved(name: str) -> socket.socket:
    sock = meet(name).detach()
    sock.settimeout(SOON_S)
    return sock


def received(sock: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes and (more := sock.recv(1 << 20)):
        data += more
    return data


def test_requests_come_in_any_pieces_and_are_answered_in_order(exchange: Exchange) -> None:
    seed = time.time_ns()
    noise = random.Random(seed)
    with proved("ann") as sock:
        for _ in range(60):
            usual = noise.random() < 0.5
            nbytes = noise.randrange(200) if usual else noise.randrange(BYTES_MAX + 1)
            asked = noise.randbytes(nbytes)
            whole = frame(asked)
            cuts = sorted(noise.randrange(len(whole) + 1) for _ in range(noise.randrange(4)))
            for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
                sock.sendall(whole[start:end])
                if noise.random() < 0.5:
                    time.sleep(0.001)  # so that the piece is taken alone, as a rule
            expected = frame(b"ann" + asked[::-1])
            assert received(sock, len(expected)) == expected, seed


def test_several_at_once_are_all_answered(exchange: Exchange) -> None:
    asked = [os.urandom(n) for n in (0, 1, 3, 4, 100, 5000)]
    with proved("ann") as sock:
        sock.sendall(b"".join(map(frame, asked)))
        expected = b"".join(frame(b"ann" + one[::-1]) for one in asked)
        assert received(sock, len(expected)) == expected


@pytest.mark.parametrize("nbytes", [BYTES_MAX + 1, 1 << 31])
def test_who_asks_too_much_is_hung_up_on(exchange: Exchange, nbytes: int) -> None:
    with proved("ann") as greedy, proved("bob") as sock:
        greedy.sendall(LENGTH.pack(nbytes) + bytes(100))
        assert received(greedy, 1) == b""
        sock.sendall(frame(b"xy"))
        assert received(sock, 9) == frame(b"bobyx")


def test_a_short_request_that_is_too_long_is_refused_too() -> None:
    address = f"127.0.0.1:2{os.getpid()}"
    server = Exchange(address, SECRET, lambda who, asked: asked, nbytes_max=64)
    server.open()
    try:
        line = Line.open(socket_name(address, SECRET), SECRET, "a", time.monotonic() + SOON_S)
        assert line is not None
        with line.detach() as sock:
            sock.settimeout(SOON_S)
            sock.sendall(frame(bytes(64)))
            assert received(sock, 68) == frame(bytes(64))
            sock.sendall(frame(bytes(65)))
            assert received(sock, 1) == b""
    finally:
        server.close()


def test_a_caller_that_takes_no_reply_keeps_nobody_waiting(exchange: Exchange) -> None:
    asked = os.urandom(BYTES_MAX)
    with proved("slow") as slow, proved("bob") as sock:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.sendall(frame(asked))
        for _ in range(100):
            sock.sendall(frame(b"xy"))
            assert received(sock, 9) == frame(b"bobyx")
        expected = frame(b"slow" + asked[::-1])
        assert received(slow, len(expected)) == expected
        slow.sendall(frame(b"again"))
        assert received(slow, 13) == frame(b"slowniaga")


def test_streams_of_several_callers_get_their_own_answers(exchange: Exchange) -> None:
    seed = time.time_ns()

    def ask(index: int) -> int:
        noise, line = random.Random(seed + index), meet(f"caller {index}")
        for _ in range(300):
            asked = noise.randbytes(noise.randrange(64))
            reply = line.ask(asked, BYTES_MAX, time.monotonic() + SOON_S)
            assert reply == f"caller {index}".encode() + asked[::-1], seed
        line.close()
        return index

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, range(6))) == list(range(6))


def test_nobody_looks_once_a_stream_has_ended(exchange: Exchange) -> None:
    """After the last answer its thread looks once, for microseconds, and then sleeps."""
    line = meet("ann")
    for _ in range(2000):
        assert line.ask(b"x", BYTES_MAX, time.monotonic() + SOON_S) == b"annx"
    time.sleep(0.05)
    (thread,) = [one for one in threading.enumerate() if one.name == "rpc-local"]
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)
    before = time.clock_gettime(clock)
    time.sleep(0.5)
    assert time.clock_gettime(clock) - before < 0.01, "it does not run"
    line.close()
