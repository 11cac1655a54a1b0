"""Descriptors that a server lends to callers of its host: they arrive, work, and none is left."""

from __future__ import annotations

import os
import random
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.support.engines import SECRET
from tests.support.waits import eventually
from transfer import ControlError, RpcTimeout, native
from transfer.control import ClientClosed, RpcClient, RpcServer
from transfer.local_board import LENT_MAX, LOAN, WAKE
from transfer.local_rpc import MAC_BYTES, NONCE_BYTES, Line, LineBroken, frame, mac, socket_name

pytestmark = pytest.mark.skipif(native.compiled is None, reason="both ends are compiled")

SOON_S = 60.0
LENT = 3
MEMORY_BYTES = 4096
# Who is to "sleep" says so, and does until it is let go.
BEGUN, LET_GO = threading.Event(), threading.Event()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


class Lender:
    """What a server lends: memory that says to whom, and how often somebody had it."""

    def __init__(self) -> None:
        self.lent: dict[int, str] = {}
        self.ended: list[int] = []
        self.memory: dict[int, list[int]] = {}
        self.refuses = self.fails = False
        self.hangs = threading.Event()
        self.hangs.set()

    def lend(self, identity: str, number: int) -> list[int]:
        assert self.hangs.wait(SOON_S)
        if self.refuses:
            return []
        if self.fails:
            raise OSError("no descriptors")
        self.lent[number] = identity
        made = [os.memfd_create("moe-runtime-loan") for _ in range(LENT)]
        for i, descriptor in enumerate(made):
            os.write(descriptor, f"{identity} {number} {i}".encode().ljust(MEMORY_BYTES))
        self.memory[number] = made
        return made

    def end(self, number: int) -> None:
        self.ended.append(number)
        for descriptor in self.memory.pop(number):
            os.close(descriptor)

    def living(self) -> list[int]:
        return sorted(set(self.lent) - set(self.ended))


def answer(identity: str, request: bytes) -> bytes:
    if request == b"sleep":
        BEGUN.set()
        assert LET_GO.wait(SOON_S)
    return identity.encode() + b"|" + request


@pytest.fixture
def lender() -> Lender:
    return Lender()


@pytest.fixture
def server(lender: Lender) -> Iterator[RpcServer]:
    before = descriptors()
    server = RpcServer(SECRET, answer, host="127.0.0.1", lend=lender.lend, ended=lender.end)
    server.open()
    yield server
    server.close()
    assert not lender.living(), "a loan ends with its server"
    assert sorted(lender.ended) == sorted(lender.lent), "each once"
    eventually(lambda: descriptors() == before, "no descriptor is left")


@pytest.fixture
def connect(server: RpcServer) -> Iterator[Callable[[str], RpcClient]]:
    made: list[RpcClient] = []

    def connect(identity: str) -> RpcClient:
        made.append(RpcClient(server.address, SECRET, identity=identity))
        return made[-1]

    yield connect
    for client in made:
        client.close()


def taken(lent: list[int]) -> list[str]:
    """What the memory says; closes it."""
    said = [os.pread(descriptor, MEMORY_BYTES, 0).rstrip().decode() for descriptor in lent]
    for descriptor in lent:
        assert not os.get_inheritable(descriptor)
        os.close(descriptor)
    return said


def test_what_is_lent_arrives_and_is_shared(connect, lender):
    client = connect("ann")
    lent = client.borrow(timeout_s=SOON_S)
    assert len(lent) == LENT
    ((number, who),) = lender.lent.items()
    assert who == "ann"
    word = secrets.token_bytes(16)
    os.pwrite(lent[1], word, 100)
    assert os.pread(lender.memory[number][1], 16, 100) == word, "it is one memory"
    os.pwrite(lent[1], b" " * 16, 100)
    assert taken(lent) == [f"ann {number} {i}" for i in range(LENT)]
    assert client.request(b"next", timeout_s=SOON_S) == b"ann|next"


@pytest.mark.parametrize("asked", [False, True])
def test_an_earlier_loan_ends_with_the_next(connect, lender, asked):
    client, before = connect("ann"), None
    for turn in range(4):
        if asked:
            assert client.request(b"x" * turn, timeout_s=SOON_S) == b"ann|" + b"x" * turn
        said = taken(client.borrow(timeout_s=SOON_S))
        (number,) = lender.living()
        assert said == [f"ann {number} {i}" for i in range(LENT)]
        assert number != before
        assert len(lender.ended) == turn
        before = number
    client.close()
    eventually(lambda: not lender.living(), "who hung up has nothing")


def test_each_of_many_callers_has_its_own(connect, lender, seed):
    rng, names = random.Random(seed), [secrets.token_hex(4) for _ in range(6)]
    clients = {name: connect(name) for name in names}
    living: dict[str, int] = {}
    problems: list[str] = []

    def use(name: str, noise: random.Random) -> None:
        client = clients[name]
        for _ in range(30):
            payload = noise.randbytes(noise.choice([1, 50, 5000]))
            if client.request(payload, timeout_s=SOON_S) != name.encode() + b"|" + payload:
                problems.append(f"{name}: another's reply")
            if noise.random() < 0.3:
                said = taken(client.borrow(timeout_s=SOON_S))
                number = living[name] = int(said[0].split()[1])
                if said != [f"{name} {number} {i}" for i in range(LENT)]:
                    problems.append(f"{name} has {said}")

    threads = [
        threading.Thread(target=use, args=(name, random.Random(rng.random()))) for name in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)
    assert not problems
    assert lender.living() == sorted(living.values())


def test_a_server_that_refuses_lends_nothing(connect, lender):
    client = connect("ann")
    lender.refuses = True
    assert client.borrow(timeout_s=SOON_S) == []
    assert client.request(b"x", timeout_s=SOON_S) == b"ann|x"
    lender.refuses = False
    taken(client.borrow(timeout_s=SOON_S))
    lender.refuses = True
    assert client.borrow(timeout_s=SOON_S) == []
    assert len(lender.ended) == 1, "what it had is over all the same"


def test_a_server_without_anything_to_lend():
    server = RpcServer(SECRET, answer, host="127.0.0.1")
    server.open()
    client = RpcClient(server.address, SECRET, identity="ann")
    for _ in range(3):
        assert client.borrow(timeout_s=SOON_S) == []
        assert client.request(b"x", timeout_s=SOON_S) == b"ann|x"
    client.close()
    server.close()


def test_a_lender_that_fails_lends_nothing(connect, lender):
    client = connect("ann")
    lender.fails = True
    assert client.borrow(timeout_s=SOON_S) == []
    lender.fails = False
    assert client.request(b"x", timeout_s=SOON_S) == b"ann|x"
    assert len(taken(client.borrow(timeout_s=SOON_S))) == LENT


def test_who_shares_no_board_gets_nothing(server, lender):
    name = socket_name(server.address, SECRET)
    line = Line.open(name, SECRET, "ann", time.monotonic() + SOON_S)
    assert line is not None
    assert line.borrow(time.monotonic() + SOON_S) == []
    assert not lender.lent, "the server was not even asked"
    assert line.ask(b"x", 1 << 20, time.monotonic() + SOON_S)
    line.close()
    # Who asks all the same says a length that no frame has.
    line = Line.open(name, SECRET, "bob", time.monotonic() + SOON_S)
    assert line is not None
    sock = line.detach()
    sock.setblocking(True)
    sock.settimeout(SOON_S)
    sock.sendall(struct.pack("<I", LOAN))
    with pytest.raises(ConnectionError):
        _whole(sock, 4)
    assert not lender.lent
    sock.close()


def test_who_is_not_of_this_host_gets_nothing(monkeypatch, connect, lender):
    monkeypatch.setattr("transfer.control.find_line", lambda *_, **__: None)
    client = connect("ann")
    assert client.borrow(timeout_s=SOON_S) == []
    assert not lender.lent


def test_who_is_closed_borrows_nothing(connect):
    client = connect("ann")
    client.close()
    with pytest.raises(ClientClosed):
        client.borrow(timeout_s=SOON_S)


def test_a_server_that_hangs_is_not_waited_for_longer(connect, lender):
    client = connect("ann")
    client.request(b"warm", timeout_s=SOON_S)
    lender.hangs.clear()
    before = descriptors()
    with pytest.raises(RpcTimeout):
        client.borrow(timeout_s=0.1)
    lender.hangs.set()
    eventually(lambda: len(lender.ended) == 1, "its connection is over, and the loan with it")
    eventually(lambda: descriptors() <= before, "what came late is closed")
    assert client.request(b"next", timeout_s=SOON_S) == b"ann|next"
    assert len(taken(client.borrow(timeout_s=SOON_S))) == LENT


@pytest.mark.parametrize("is_same", [False, True], ids=["not even accepted", "behind its own"])
def test_a_server_that_handles_another_request_is_waited_for_so_long(connect, is_same):
    client = connect("ann")
    busy = client if is_same else connect("bob")
    BEGUN.clear()
    LET_GO.clear()
    asker = threading.Thread(target=lambda: busy.request(b"sleep", timeout_s=SOON_S))
    asker.start()
    assert BEGUN.wait(SOON_S)
    with pytest.raises(RpcTimeout):
        client.borrow(timeout_s=0.1)
    LET_GO.set()
    asker.join()
    assert len(taken(client.borrow(timeout_s=SOON_S))) == LENT


def test_a_server_that_has_ended_is_an_error_of_ours(server, connect, lender):
    client = connect("ann")
    taken(client.borrow(timeout_s=SOON_S))
    server.close()
    with pytest.raises(ControlError):
        client.borrow(timeout_s=0.2)
    assert client.borrow(timeout_s=0.2) == [], "there is nobody of this host any more"


class Impostor:
    """The server's end of one connection, by hand."""

    def __init__(self, says: Callable[[socket.socket], None]) -> None:
        self.name = b"\0moe-runtime-rpc-test-" + secrets.token_hex(8).encode()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.name)
        self._listener.listen()
        self._says = says
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        sock, _ = self._listener.accept()
        with sock:
            hello = _whole(sock, 4 + NONCE_BYTES + len("ann"))[4:]
            nonce, me = hello[:NONCE_BYTES], hello[NONCE_BYTES:]
            ours = secrets.token_bytes(NONCE_BYTES)
            sock.sendall(frame(ours, mac(SECRET, b"server", nonce + ours + me)))
            _whole(sock, 4 + MAC_BYTES)
            assert struct.unpack("<I", _whole(sock, 4)) == (LOAN,)
            self._says(sock)

    def end(self) -> None:
        self._thread.join(SOON_S)
        self._listener.close()

    def meet(self) -> Line:
        line = Line.open(self.name, SECRET, "ann", time.monotonic() + SOON_S, shares_memory=True)
        assert line is not None
        return line


def _whole(sock: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        more = sock.recv(nbytes - len(data))
        if not more:
            raise ConnectionError("it hung up")
        data += more
    return data


def send_lent(sock: socket.socket, data: bytes, count: int) -> None:
    made = [os.memfd_create("moe-runtime-loan") for _ in range(count)]
    socket.send_fds(sock, [data], made)
    for descriptor in made:
        os.close(descriptor)


def test_wake_words_before_the_loan_are_passed_over():
    wake, loan = struct.pack("<I", WAKE), struct.pack("<I", LOAN)

    def say(sock: socket.socket) -> None:
        sock.sendall(wake * 2 + wake[:3])
        time.sleep(0.05)
        sock.sendall(wake[3:])
        send_lent(sock, loan, LENT_MAX)

    before = descriptors()
    impostor = Impostor(say)
    line = impostor.meet()
    lent = line.borrow(time.monotonic() + SOON_S)
    assert len(lent) == LENT_MAX
    for descriptor in lent:
        os.close(descriptor)
    line.close()
    impostor.end()
    assert descriptors() == before


@pytest.mark.parametrize("fault", ["hangs up", "hangs up with some", "half a word", "another word"])
def test_a_server_that_breaks_off_in_the_middle(fault):
    def say(sock: socket.socket) -> None:
        if fault == "hangs up with some":
            send_lent(sock, struct.pack("<I", LOAN)[:2], 3)
        elif fault == "half a word":
            sock.sendall(struct.pack("<I", LOAN)[:3])
        elif fault == "another word":
            send_lent(sock, struct.pack("<I", 5), 2)

    before = descriptors()
    impostor = Impostor(say)
    line = impostor.meet()
    with pytest.raises(LineBroken):
        line.borrow(time.monotonic() + SOON_S)
    line.close()
    impostor.end()
    assert descriptors() == before, "what had come is closed"


def test_descriptors_of_half_a_loan_are_closed_at_the_deadline():
    go = threading.Event()

    def say(sock: socket.socket) -> None:
        send_lent(sock, struct.pack("<I", LOAN)[:2], 3)
        assert go.wait(SOON_S)

    before = descriptors()
    impostor = Impostor(say)
    line = impostor.meet()
    with pytest.raises(TimeoutError):
        line.borrow(time.monotonic() + 0.2)
    line.close()
    go.set()
    impostor.end()
    assert descriptors() == before


def test_who_hangs_up_before_its_loan_leaves_none(server, lender):
    name = socket_name(server.address, SECRET)
    for _ in range(5):
        line = Line.open(name, SECRET, "ann", time.monotonic() + SOON_S, shares_memory=True)
        assert line is not None
        sock = line.detach()
        sock.sendall(struct.pack("<I", LOAN))
        sock.close()
    eventually(lambda: len(lender.ended) == 5, "each was lent, and is over")


def test_a_loan_between_requests_by_the_board(connect, lender, seed):
    """Requests before and behind a loan are answered in their order, woken or not."""
    rng, client = random.Random(seed), connect("ann")
    for _ in range(60):
        for _ in range(rng.randrange(4)):
            payload = rng.randbytes(rng.choice([1, 100, 10_000]))
            assert client.request(payload, timeout_s=SOON_S) == b"ann|" + payload
        if rng.random() < 0.3:
            time.sleep(rng.choice([0.0005, 0.005]))  # the server goes to sleep
        assert len(taken(client.borrow(timeout_s=SOON_S))) == LENT
    assert len(lender.lent) == 60
