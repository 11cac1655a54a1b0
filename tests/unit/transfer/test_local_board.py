"""Requests by the memory that both ends of a local control channel share: see board.c."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import random
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.engines import SECRET
from tests.support.waits import eventually
from transfer import local_rpc, native
from transfer.local_board import BOARD_BYTES, WAKE, new_board
from transfer.local_exchange import Exchange
from transfer.local_rpc import Line, LineBroken, frame, socket_name

pytestmark = pytest.mark.skipif(native.compiled is None, reason="both ends are compiled")

SOON_S = 20.0
BYTES_MAX = 1 << 20
ADDRESS = f"127.0.0.1:3{os.getpid()}"
ASKED, ASKED_BYTES, ANSWERED, ANSWERED_BYTES, TAKEN = 0, 4, 64, 68, 72
SERVER_SLEEPS, CALLER_SLEEPS, REQUEST, REPLY = 128, 192, 256, 4096
REQUEST_BYTES, REPLY_BYTES = REPLY - REQUEST, BOARD_BYTES - REPLY


def soon() -> float:
    return time.monotonic() + SOON_S


def answer(who: str, asked: bytes) -> bytes:
    """The request backwards; its first bytes may say how much more, and when."""
    if asked[:1] == b"+":
        more, pause_us = struct.unpack_from("<II", asked, 1)
        time.sleep(pause_us * 1e-6)
        return asked[::-1] + bytes(more)
    return asked[::-1]


@pytest.fixture
def exchange() -> Iterator[Exchange]:
    server = Exchange(ADDRESS, SECRET, answer, nbytes_max=BYTES_MAX)
    server.open()
    before = len(os.listdir("/proc/self/fd"))
    yield server

    def nothing_is_left() -> bool:
        return len(os.listdir("/proc/self/fd")) == before and not boards_mapped()

    eventually(nothing_is_left, "who hung up is forgotten, and its memory")
    server.close()


def boards_mapped() -> int:
    with open("/proc/self/maps") as maps:
        return sum("moe-runtime-board" in line for line in maps)


class Board:
    """What a test sees of the memory; closed with it."""

    def __init__(self, descriptor: int) -> None:
        self.memory = mmap.mmap(descriptor, BOARD_BYTES)

    def word(self, at: int) -> int:
        (value,) = struct.unpack_from("<I", self.memory, at)
        return int(value)

    def set(self, at: int, value: int) -> None:
        struct.pack_into("<I", self.memory, at, value)


@pytest.fixture
def boards(monkeypatch: pytest.MonkeyPatch, exchange: Exchange) -> Iterator[list[Board]]:
    """The boards of the lines that are opened, in their order."""
    found: list[Board] = []

    def seen() -> int:
        descriptor = new_board()
        found.append(Board(descriptor))
        return descriptor

    monkeypatch.setattr(local_rpc, "new_board", seen)
    yield found
    for board in found:
        board.memory.close()


def meet(name: str = "ann", *, shares: bool = True) -> Line:
    line = Line.open(socket_name(ADDRESS, SECRET), SECRET, name, soon(), shares_memory=shares)
    assert line is not None
    return line


def warm(line: Line) -> None:
    """Ask once: from the reply on the server has the board."""
    assert line.ask(b"ab", BYTES_MAX, soon()) == b"ba"


def test_requests_and_replies_of_all_sizes(boards: list[Board]) -> None:
    seed = time.time_ns()
    rng = random.Random(seed)
    line = meet()
    warm(line)
    by_board, before = 0, boards[0].word(ASKED)
    edges = [1, 2, 4, REQUEST_BYTES - 1, REQUEST_BYTES, REQUEST_BYTES + 1, REPLY_BYTES, 300_000]
    for _ in range(400):
        nbytes = max(9, rng.choice(edges) if rng.random() < 0.3 else rng.randrange(500))
        more = rng.choice([0, 0, 0, REPLY_BYTES - nbytes, REPLY_BYTES - nbytes + 1, 200_000])
        pause_us = rng.choice([0, 0, 0, 30, 100, 2000])
        head = b"+" + struct.pack("<II", max(0, more), pause_us)
        asked = head + rng.randbytes(nbytes - len(head))
        assert line.ask(asked, BYTES_MAX, soon()) == asked[::-1] + bytes(max(0, more)), seed
        by_board += len(asked) <= REQUEST_BYTES
        if rng.random() < 0.1:
            time.sleep(rng.choice([0.0001, 0.003]))  # the server goes to sleep, or looks yet
    assert line.ask(b"", BYTES_MAX, soon()) == b""
    line.close()
    assert boards[0].word(ASKED) - before == by_board + 1, "what fits goes by the board"


def test_streams_of_several_callers_with_boards_and_without(boards: list[Board]) -> None:
    seed = time.time_ns()

    def ask(index: int) -> None:
        rng, line = random.Random(seed + index), meet(f"caller {index}", shares=index % 3 != 2)
        for turn in range(400):
            asked = b"+" + struct.pack("<II", 0, 0) + rng.randbytes(rng.randrange(3000))
            reply = line.ask(asked, BYTES_MAX, soon())
            assert reply == asked[::-1], (seed, index, turn)
        line.close()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(ask, range(6)))
    assert len(boards) == 4
    assert all(board.word(ASKED) for board in boards)


def test_more_callers_than_there_are_boards(exchange: Exchange) -> None:
    lines = [meet(f"caller {index}") for index in range(80)]
    for turn in range(3):
        for index, line in enumerate(lines):
            asked = b"%d of %d" % (index, turn)
            assert line.ask(asked, BYTES_MAX, soon()) == asked[::-1]
    for line in lines:
        line.close()


def unsealed() -> int:
    descriptor = os.memfd_create("moe-runtime-board", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, BOARD_BYTES)
    return descriptor


def long() -> int:
    descriptor = unsealed()
    os.ftruncate(descriptor, 2 * BOARD_BYTES)
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


@pytest.mark.parametrize("make", [unsealed, long])
def test_memory_that_may_become_shorter_is_not_taken(
    exchange: Exchange, monkeypatch: pytest.MonkeyPatch, make: Callable[[], int]
) -> None:
    kept = make()
    monkeypatch.setattr(local_rpc, "new_board", lambda: os.dup(kept))
    line = meet()
    warm(line)
    warm(line)
    board = Board(kept)
    os.close(kept)
    assert (board.word(TAKEN), board.word(ASKED)) == (0, 0), "all went by the socket"
    line.close()
    board.memory.close()


def test_descriptors_of_strangers_are_closed(exchange: Exchange) -> None:
    """Of who never proves itself, and of a kind that nobody wants."""
    reader, writer = os.pipe()
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(SOON_S)
        stranger.connect(socket_name(ADDRESS, SECRET))
        socket.send_fds(stranger, [frame(bytes(32), b"ann")], [writer, writer])
        assert stranger.recv(1 << 10)
        socket.send_fds(stranger, [frame(bytes(32))], [writer])  # the mac is wrong
        assert stranger.recv(1) == b""
    os.close(writer)
    assert os.read(reader, 1) == b"", "nobody has the other end of the pipe"
    os.close(reader)


def test_a_caller_that_writes_nonsense_is_hung_up_on(boards: list[Board]) -> None:
    bad, good = meet("bad"), meet("good")
    warm(bad)
    warm(good)
    sock = bad.detach()
    sock.settimeout(SOON_S)
    boards[0].set(ASKED_BYTES, REQUEST_BYTES + 1)
    boards[0].set(ASKED, 77)
    sock.sendall(struct.pack("<I", WAKE))
    with contextlib.suppress(ConnectionResetError):  # what woke it was not read any more
        assert sock.recv(64) == b"", "hung up"
    warm(good)
    good.close()
    sock.close()


def test_the_word_that_wakes_is_a_frame_for_who_has_no_board(exchange: Exchange) -> None:
    line = meet(shares=False)
    sock = line.detach()
    sock.settimeout(SOON_S)
    sock.sendall(struct.pack("<I", WAKE))
    assert sock.recv(64) == b"", "it is too long"
    sock.close()


def test_both_sleep_and_are_woken(boards: list[Board]) -> None:
    line = meet()
    warm(line)
    for _ in range(20):
        eventually(lambda: boards[0].word(SERVER_SLEEPS) == 1, "the server sleeps")
        asked = b"+" + struct.pack("<II", 0, 5000)
        saw: list[int] = []

        def watch(saw: list[int] = saw) -> None:
            while not saw:
                if boards[0].word(CALLER_SLEEPS):
                    saw.append(1)
                time.sleep(0.0002)

        watcher = threading.Thread(target=watch)
        watcher.start()
        assert line.ask(asked, BYTES_MAX, soon()) == asked[::-1]
        saw.append(0)
        watcher.join()
        if saw[0]:
            break
    assert saw[0], "the caller has slept"
    line.close()


# -- a server of the test: hostile, or gone -----------------------------------------------------


class Server:
    """The other end of a line, at the test's command."""

    def __init__(self) -> None:
        ours, self.socket = socket.socketpair()
        descriptor = new_board()
        self.board = Board(descriptor)
        self.line = Line(ours, descriptor)
        os.close(descriptor)
        self.socket.settimeout(SOON_S)
        self.board.set(TAKEN, 1)

    def await_request(self) -> bytes:
        number = self.board.word(ANSWERED)
        eventually(lambda: self.board.word(ASKED) != number, "a request is there")
        nbytes = self.board.word(ASKED_BYTES)
        return bytes(self.board.memory[REQUEST : REQUEST + nbytes])

    def say(self, nbytes: int, content: bytes = b"") -> None:
        self.board.memory[REPLY : REPLY + len(content)] = content
        self.board.set(ANSWERED_BYTES, nbytes)
        self.board.set(ANSWERED, self.board.word(ASKED))
        self.wake()

    def wake(self) -> None:
        if self.board.word(CALLER_SLEEPS):
            self.board.set(CALLER_SLEEPS, 0)
            self.socket.sendall(struct.pack("<I", WAKE))

    def beside(self, act: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            self.await_request()
            time.sleep(0.01)  # the caller sleeps by now, as a rule
            act()

        thread = threading.Thread(target=run)
        thread.start()
        return thread


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.line.close()
    found.socket.close()
    found.board.memory.close()


@pytest.mark.parametrize("nbytes", [REPLY_BYTES + 1, (1 << 32) - 2, 101])
def test_a_reply_that_is_too_long_breaks_the_line(server: Server, nbytes: int) -> None:
    thread = server.beside(lambda: server.say(nbytes))
    with pytest.raises(LineBroken, match="a reply of"):
        server.line.ask(b"x", 100, soon())
    thread.join()


@pytest.mark.parametrize("whole", [True, False])
def test_a_reply_by_the_socket(server: Server, whole: bool) -> None:
    reply = random.randbytes(20_000)

    def act() -> None:
        server.say(WAKE)
        server.socket.sendall(frame(reply)[: None if whole else 999])
        server.socket.close()

    thread = server.beside(act)
    if whole:
        assert server.line.ask(b"x", BYTES_MAX, soon()) == reply
    else:
        with pytest.raises(LineBroken, match="closed before"):
            server.line.ask(b"x", BYTES_MAX, soon())
    thread.join()


def test_a_reply_on_the_board_and_by_the_socket_is_one_too_many(server: Server) -> None:
    thread = server.beside(lambda: server.socket.sendall(frame(b"y") + frame(b"z")))
    with pytest.raises(LineBroken, match="more than one"):
        server.line.ask(b"x", BYTES_MAX, soon())
    thread.join()


def test_a_server_that_ends_before_it_answers(server: Server) -> None:
    thread = server.beside(server.socket.close)
    with pytest.raises(LineBroken, match="closed before"):
        server.line.ask(b"x", BYTES_MAX, soon())
    thread.join()


def test_a_server_that_ends_once_it_has_answered(server: Server) -> None:
    def act() -> None:
        server.say(3, b"yes")
        server.socket.close()

    thread = server.beside(act)
    assert server.line.ask(b"x", BYTES_MAX, soon()) == b"yes"
    thread.join()


def test_nothing_is_asked_of_who_is_gone(server: Server) -> None:
    thread = server.beside(lambda: server.say(1, b"y"))
    assert server.line.ask(b"x", BYTES_MAX, soon()) == b"y"
    thread.join()
    server.socket.close()
    time.sleep(0.01)  # for longer a server is not taken to be there unasked
    asked = server.board.word(ASKED)
    assert server.line.ask(b"x", BYTES_MAX, soon()) is None
    assert server.board.word(ASKED) == asked


def test_a_late_reply_is_waited_for_no_longer(server: Server) -> None:
    with pytest.raises(TimeoutError):
        server.line.ask(b"x", BYTES_MAX, time.monotonic() + 0.05)
    assert server.await_request() == b"x"


def test_wake_ups_that_nobody_waited_for_do_no_harm(server: Server) -> None:
    for turn in range(30):
        server.socket.sendall(struct.pack("<I", WAKE) * (turn % 4))
        thread = server.beside(lambda: server.say(2, b"ok"))
        assert server.line.ask(b"x", BYTES_MAX, soon()) == b"ok"
        thread.join()
    assert server.line.send(b"by socket", soon())
    server.socket.sendall(struct.pack("<I", WAKE) + frame(b"so"))
    assert server.line.receive(BYTES_MAX, soon()) == b"so"


def test_a_signal_is_handled_while_the_reply_is_waited_for(server: Server) -> None:
    class Interrupted(Exception):
        pass

    def stop(number: int, stack: object) -> None:
        raise Interrupted

    previous = signal.signal(signal.SIGUSR1, stop)
    try:
        ours = threading.main_thread().ident
        assert ours is not None
        thread = server.beside(lambda: signal.pthread_kill(ours, signal.SIGUSR1))
        with pytest.raises(Interrupted):
            server.line.ask(b"x", BYTES_MAX, soon())
        thread.join()
    finally:
        signal.signal(signal.SIGUSR1, previous)
