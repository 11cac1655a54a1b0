"""The caller's end of a local control channel, compiled and in Python, against hostile servers."""

from __future__ import annotations

import os
import random
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.support.engines import SECRET
from transfer import ControlError, RpcTimeout, native
from transfer.control import MESSAGE_BYTES_MAX, ClientClosed, RpcClient, RpcServer
from transfer.local_rpc import Line, LineBroken

SOON_S = 60.0
BYTES_MAX = 1 << 20
WAYS = ["python", "compiled"] if native.compiled is not None else ["python"]


@pytest.fixture(params=WAYS, autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "python":
        monkeypatch.setattr(native, "compiled", None)
    return request.param


@pytest.fixture
def ends() -> Iterator[tuple[Line, socket.socket]]:
    """A line, and the socket at its other end."""
    ours, theirs = socket.socketpair()
    theirs.settimeout(SOON_S)
    line = Line(ours)
    yield line, theirs
    line.close()
    theirs.close()


def framed(payload: bytes) -> bytes:
    return struct.pack("<I", len(payload)) + payload


def take(sock: socket.socket) -> bytes:
    """Take one request."""
    data = b""
    while len(data) < 4 or len(data) < 4 + struct.unpack_from("<I", data)[0]:
        more = sock.recv(1 << 20)
        assert more, "hung up"
        data += more
    return data[4:]


class Peer:
    """Does something at the other end while a request is under way; a context manager."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(act,))

    def _run(self, act: Callable[[], None]) -> None:
        try:
            act()
        except BaseException as error:
            self._failure = error
            raise

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exc_info: object) -> None:
        self._thread.join(SOON_S)
        assert not self._thread.is_alive()
        assert self._failure is None


def soon() -> float:
    return time.monotonic() + SOON_S


def test_replies_in_any_pieces(ends: tuple[Line, socket.socket]) -> None:
    line, theirs = ends
    seed = time.time_ns()
    rng = random.Random(seed)
    sizes = [0, 1, 3, 4, 5, 16380, 16383, 16384, 16385, 16388, 16389, 262144, BYTES_MAX]
    sizes += [rng.randrange(40000) for _ in range(20)]
    for nbytes in rng.sample(sizes, len(sizes)):
        request, reply = rng.randbytes(rng.choice([0, 7, 300000])), rng.randbytes(nbytes)
        whole = framed(reply)
        cuts = sorted(rng.sample(range(len(whole) + 1), min(3, len(whole))))
        pauses = [rng.random() * 0.002 for _ in cuts]

        def serve(
            request: bytes = request,
            whole: bytes = whole,
            cuts: list[int] = cuts,
            pauses: list[float] = pauses,
        ) -> None:
            assert take(theirs) == request
            for start, end, pause_s in zip(
                [0, *cuts], [*cuts, len(whole)], [*pauses, 0.0], strict=True
            ):
                theirs.sendall(whole[start:end])
                time.sleep(pause_s)

        with Peer(serve):
            assert line.ask(request, BYTES_MAX, soon()) == reply, (seed, nbytes)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\7",
        struct.pack("<I", 9),
        framed(bytes(20000))[:-1],
        struct.pack("<I", BYTES_MAX + 1) + bytes(64),
        struct.pack("<I", (1 << 32) - 1),
        framed(b"one") + framed(b"two"),
        framed(b"") + b"\0",
    ],
)
def test_who_dies_or_talks_nonsense_in_mid_reply(
    ends: tuple[Line, socket.socket], said: bytes
) -> None:
    line, theirs = ends

    def serve() -> None:
        take(theirs)
        theirs.sendall(said)
        theirs.close()

    with Peer(serve), pytest.raises(LineBroken):
        line.ask(b"x" * 9, BYTES_MAX, soon())


def test_a_reset_ends_the_wait(ends: tuple[Line, socket.socket]) -> None:
    line, theirs = ends

    def serve() -> None:
        theirs.recv(1)  # what is not read when it closes resets the connection
        theirs.close()

    with Peer(serve), pytest.raises(LineBroken):
        line.ask(b"x" * 999, BYTES_MAX, soon())


def test_nothing_is_sent_to_who_is_gone(ends: tuple[Line, socket.socket]) -> None:
    line, theirs = ends
    theirs.close()
    assert line.ask(b"x", BYTES_MAX, soon()) is None
    assert line.ask(bytes(BYTES_MAX), BYTES_MAX, soon()) is None


def test_who_goes_while_it_is_sent_has_handled_nothing(ends: tuple[Line, socket.socket]) -> None:
    line, theirs = ends

    def serve() -> None:
        theirs.recv(1 << 10)
        theirs.close()

    with Peer(serve):
        assert line.ask(bytes(32 << 20), BYTES_MAX, soon()) is None


@pytest.mark.parametrize("timeout_s", [0.0, 0.001, 0.03, 0.7])
@pytest.mark.parametrize("part", [b"", b"\1\0", framed(b"abc")[:-1], framed(bytes(40000))[:-9]])
def test_a_reply_that_does_not_come_costs_the_deadline(
    ends: tuple[Line, socket.socket], timeout_s: float, part: bytes
) -> None:
    line, theirs = ends
    theirs.sendall(part)
    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        line.ask(b"x", BYTES_MAX, begin + timeout_s)
    assert timeout_s <= time.monotonic() - begin < SOON_S


def test_a_request_that_is_not_taken_costs_the_deadline(
    ends: tuple[Line, socket.socket],
) -> None:
    line, _ = ends
    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        line.ask(bytes(32 << 20), BYTES_MAX, begin + 0.3)
    assert 0.3 <= time.monotonic() - begin < SOON_S


def test_a_wait_that_outlasts_many_pauses_is_answered(ends: tuple[Line, socket.socket]) -> None:
    line, theirs = ends

    def serve() -> None:
        take(theirs)
        time.sleep(1.3)
        theirs.sendall(framed(b"late, yet in time"))

    with Peer(serve):
        assert line.ask(b"x", BYTES_MAX, soon()) == b"late, yet in time"


class Interrupted(Exception):
    pass


@pytest.fixture
def ticking() -> Iterator[list[int]]:
    """Signals all the while; each is entered here."""
    seen: list[int] = []
    previous = signal.signal(signal.SIGALRM, lambda number, frame: seen.append(number))
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    yield seen
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, previous)


def test_signals_do_not_move_the_deadline(
    ends: tuple[Line, socket.socket], ticking: list[int]
) -> None:
    line, _ = ends
    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        line.ask(b"x", BYTES_MAX, begin + 0.5)
    assert 0.5 <= time.monotonic() - begin < SOON_S
    with pytest.raises(TimeoutError):
        line.ask(bytes(32 << 20), BYTES_MAX, time.monotonic() + 0.3)
    while len(ticking) <= 5:  # those that a stopped process misses come once
        with pytest.raises(TimeoutError):
            line.ask(b"x", BYTES_MAX, time.monotonic() + 0.1)


def answer(identity: str, request: bytes) -> bytes:
    if request == b"sleep":
        time.sleep(0.4)
    return request


def ask_until_stopped(client: RpcClient) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    client.request(b"sleep", timeout_s=SOON_S)


def test_a_request_that_a_signal_s_handler_ended_leaves_no_reply_behind() -> None:
    def stop(number: int, frame: object) -> None:
        raise Interrupted

    server = RpcServer(SECRET, answer, host="127.0.0.1")
    server.open()
    client = RpcClient(server.address, SECRET, identity="a")
    assert client.request(b"warm", timeout_s=SOON_S) == b"warm"
    previous = signal.signal(signal.SIGALRM, stop)
    try:
        with pytest.raises(Interrupted):
            ask_until_stopped(client)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)
    assert client.request(b"next", timeout_s=SOON_S) == b"next"
    client.close()
    server.close()


def test_a_retired_client_ends_what_is_under_way_and_begins_nothing() -> None:
    begun, go = threading.Event(), threading.Event()

    def wait(identity: str, request: bytes) -> bytes:
        begun.set()
        return request if go.wait(SOON_S) else b"nobody let go"

    with ExitStack() as stack:
        server = RpcServer(SECRET, wait, host="127.0.0.1")
        server.open()
        stack.callback(server.close)
        before = len(os.listdir("/proc/self/fd"))
        client = RpcClient(server.address, SECRET, identity="a")
        replies: list[bytes] = []
        asking = threading.Thread(
            target=lambda: replies.append(client.request(b"slow", timeout_s=SOON_S))
        )
        asking.start()
        assert begun.wait(SOON_S)
        client.retire()
        go.set()
        with pytest.raises(ClientClosed):
            client.request(b"next", timeout_s=SOON_S)
        asking.join(SOON_S)
        assert replies == [b"slow"]
        deadline = soon()
        while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(os.listdir("/proc/self/fd")) <= before


def test_a_request_that_no_server_takes_is_the_caller_s_mistake() -> None:
    client = RpcClient("127.0.0.1:1", SECRET, identity="a")
    with pytest.raises(ControlError, match="bytes"):
        client.request(bytes(MESSAGE_BYTES_MAX + 1), timeout_s=SOON_S)
    client.close()


def test_a_slow_caller_holds_up_nobody() -> None:
    """It asks for more than its socket holds, and takes it byte by byte, or not at all."""
    server = RpcServer(SECRET, lambda identity, request: bytes(4 << 20), host="127.0.0.1")
    server.open()
    with ExitStack() as stack:
        stack.callback(server.close)
        slow = RpcClient(server.address, SECRET, identity="slow")
        stack.callback(slow.close)
        slow.request(b"warm", timeout_s=SOON_S)
        line = slow._line
        assert line is not None
        line._socket.sendall(framed(b"x"))
        quick = RpcClient(server.address, SECRET, identity="quick")
        stack.callback(quick.close)
        for _ in range(20):
            assert len(quick.request(b"y", timeout_s=SOON_S)) == 4 << 20
            assert len(line._socket.recv(1)) == 1
        line._socket.sendall(framed(b"asks on without taking the reply"))
        assert len(quick.request(b"y", timeout_s=SOON_S)) == 4 << 20
        line._socket.settimeout(SOON_S)
        taken = 0
        while data := line._socket.recv(1 << 20):  # what the kernel held; then it is hung up on
            taken += len(data)
        assert taken < 4 << 20
        with pytest.raises(RpcTimeout):
            slow.request(b"z", timeout_s=0.0)
