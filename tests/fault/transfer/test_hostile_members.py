"""Who knows the secret and is broken or evil: lies, garbage, stolen names, silence."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import secrets
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engines import (
    BACKENDS,
    SECRET,
    engine_pair,
    new_engine,
    new_name,
    offer,
)
from tests.support.ranks import Board, run_ranks
from tests.support.raw_member import exactly, shake_hands
from tests.support.waits import eventually
from transfer import (
    Access,
    EngineClosed,
    HandshakeRefused,
    PeerLost,
    PeerUnreachable,
    RegionKey,
    TransferEngine,
    TransferError,
    allocate,
)
from transfer.connections.handshake import AcceptorHandshake, DialerHandshake, Facts, Purpose

SOON_S = 60.0
both_backends = pytest.mark.parametrize("backend", BACKENDS)


def greet(engine: TransferEngine, purpose: Purpose, name: str, facts: Facts,
          told: bytes | None = None) -> socket.socket:  # fmt: skip
    """Authenticate as a member with whatever facts, and what it was told as `name` before."""
    host, port = engine.address.split(":")
    sock = socket.create_connection((host, int(port)), timeout=SOON_S)
    session = engine._table.session(name) if told is None else told
    machine = DialerHandshake(
        secret=SECRET, name=name, facts=facts, admit=lambda *_: None, sessions=lambda _: session
    )
    return shake_hands(sock, machine, purpose)


def facts_like(engine: TransferEngine, **lies: Any) -> Facts:
    true = engine._rendezvous.facts
    fields = {name: getattr(true, name) for name in true.__struct_fields__}
    return Facts(**{**fields, **lies})


def check_usable(engine: TransferEngine, backend: str) -> None:
    with new_engine(backend) as other:
        other.connect(engine.address)
        mine, theirs = other.register(torch.ones(64).byte()), engine.register(allocate(64))
        key = offer(engine, theirs, other)
        other.write(engine.name, mine, key, 0, 0, 64).wait(SOON_S)
        assert theirs.tensor.tolist() == [1] * 64


LIES: list[dict[str, Any]] = [
    {"local_socket": "x" * 500}, {"local_socket": ""}, {"local_socket": "nobody"},
    {"address": "nonsense"}, {"address": "not.a.number:1"}, {"address": "127.0.0.1:1"},
    {"address": "a\0b:1"}, {"address": "9" * 200 + ":1"}, {"address": "127.0.0.1:" + "9" * 300},
]  # fmt: skip


@both_backends
@pytest.mark.parametrize("lies", LIES, ids=str)
def test_lies_about_addresses_cost_the_liar_only(backend: str, lies: dict[str, Any]) -> None:
    """We dial what a member told us: whatever that is, the engine's thread survives it."""
    with new_engine(backend, operation_timeout_s=0.5) as engine:
        name = new_name()
        facts = facts_like(engine, **({"local_socket": "nobody"} | lies))
        with greet(engine, Purpose.CONTROL, name, facts):
            source = engine.register(torch.zeros(8).byte())
            key = RegionKey(name, b"t" * 16, 8, 3, True)
            started = time.monotonic()
            with pytest.raises(TransferError):
                engine.write(name, source, key, 0, 0, 8).wait()
            assert time.monotonic() - started < SOON_S / 2
        check_usable(engine, backend)


class EvilOwner(threading.Thread):
    """Accepts like an engine, then answers every request with bytes of its own."""

    def __init__(self, name: str, generator: random.Random) -> None:
        super().__init__(name="evil-owner", daemon=True)
        self.owner, self.generator = name, generator
        self.answered = 0
        self.session = b""
        self.stopping = False
        self.kept: list[socket.socket] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(0.05)
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"

    def run(self) -> None:
        while not self.stopping:
            with contextlib.suppress(OSError, TransferError):
                sock, _ = self.listener.accept()
                sock.settimeout(2.0)
                self.kept.append(sock)
                if self._greet(sock) is Purpose.DATA:
                    self._answer(sock)
        for sock in [*self.kept, self.listener]:
            sock.close()

    def _greet(self, sock: socket.socket) -> Purpose:
        facts = Facts(
            address=self.address, host="elsewhere", local_socket="x", shared_memory=False, tcp=True
        )
        machine = AcceptorHandshake(
            secret=SECRET, name=self.owner, facts=facts, admit=lambda *_: None,
            sessions=lambda _: self.session,
        )  # fmt: skip
        while not machine.done:
            sock.sendall(machine.feed(exactly(sock, machine.needed)))
        sock.sendall(machine.ready())
        if machine.purpose is Purpose.CONTROL:
            self.session = machine.session
        return machine.purpose

    def _answer(self, sock: socket.socket) -> None:
        request = sock.recv(1 << 16)
        if request:
            self.answered += 1
            noise = self.generator.randbytes(self.generator.randrange(1, 200))
            true_start = b"\x54\x4d" + bytes([self.generator.randrange(5)]) + b"\0"
            sock.sendall(noise if self.generator.random() < 0.5 else true_start + noise)


def test_replies_of_garbage_end_in_an_error_and_land_nowhere() -> None:
    seed = random.randrange(2**32)
    with new_engine("tcp") as engine:
        owner = EvilOwner(new_name(), random.Random(seed))
        owner.start()
        try:
            engine.connect(owner.address)
            key = RegionKey(owner.owner, b"t" * 16, 64, 3, False)
            target = engine.register(torch.full((192,), 9, dtype=torch.uint8))
            for _ in range(4):
                with pytest.raises(TransferError):
                    engine.read(owner.owner, target, key, 64, 0, 64, timeout_s=0.6).wait()
                with pytest.raises(TransferError):
                    engine.write(owner.owner, target, key, 0, 0, 64, timeout_s=0.6).wait()
        finally:
            owner.stopping = True
            owner.join(SOON_S)
        assert owner.answered > 2, f"garbage was sent, seed {seed}"
        around = target.tensor[:64].tolist() + target.tensor[128:].tolist()
        assert around == [9] * 128, f"seed {seed}"
        check_usable(engine, "tcp")


def test_garbage_on_every_kind_of_connection_at_any_time() -> None:
    seed = random.randrange(2**32)
    generator = random.Random(seed)
    with new_engine("tcp") as engine:
        facts = facts_like(engine, host="elsewhere", shared_memory=False)
        target = engine.register(torch.full((64,), 3, dtype=torch.uint8))
        for turn in range(60):
            name = new_name()
            engine.offer(target, to=name, access=Access.WRITE)
            with greet(engine, Purpose.CONTROL, name, facts) as control:
                sock = control
                if turn % 3:
                    sock = greet(engine, Purpose.DATA, name, facts)
                start = b"\x54\x4d\x01\0" if turn % 2 else b""
                with contextlib.suppress(OSError):
                    for _ in range(generator.randrange(1, 4)):
                        sock.sendall(start + generator.randbytes(generator.randrange(1, 300)))
                sock.close()
        eventually(lambda: not engine.peers(), f"all gone, seed {seed}")
        assert engine.statistics().malformed > 5, f"the garbage arrived, seed {seed}"
        assert target.tensor.tolist() == [3] * 64, f"seed {seed}"
        check_usable(engine, "tcp")


def test_a_second_member_with_a_stolen_key_gets_nothing() -> None:
    for backend in BACKENDS:
        with engine_pair(backend) as (a, b), new_engine(backend) as thief:
            thief.connect(b.address)
            theirs = b.register(allocate(64))
            key = offer(b, theirs, a)
            loot = thief.register(torch.ones(64).byte())
            for call in (thief.write, thief.read):
                with pytest.raises(TransferError):
                    call(b.name, loot, key, 0, 0, 64).wait(SOON_S)
            assert not theirs.tensor.any()
            assert loot.tensor.all()


@both_backends
@pytest.mark.parametrize("purpose", [p for p in Purpose if p is not Purpose.CONTROL])
def test_a_member_opens_nothing_under_the_name_of_another(backend: str, purpose: Purpose) -> None:
    """With the secret, a control connection of its own, and the session key of that."""
    with engine_pair(backend) as (hub, anna):
        mallory = new_name()
        with greet(hub, Purpose.CONTROL, mallory, facts_like(anna, local_socket="none")):
            known = [hub._table.session(mallory), b"", secrets.token_bytes(32)]
            assert known[0]
            for session in known:
                with pytest.raises((ConnectionError, HandshakeRefused)):
                    greet(hub, purpose, anna.name, facts_like(anna), told=session)
        eventually(lambda: hub.statistics().refused_handshakes >= len(known), "counted")
        source, target = anna.register(torch.ones(64).byte()), hub.register(allocate(64))
        anna.write(hub.name, source, offer(hub, target, anna), 0, 0, 64).wait(SOON_S)
        assert target.tensor.tolist() == [1] * 64


def test_two_engines_of_one_name() -> None:
    with new_engine() as hub, new_engine() as first, new_engine(name=first.name) as second:
        first.connect(hub.address)
        started = time.monotonic()
        with pytest.raises((PeerUnreachable, HandshakeRefused)):
            second.connect(hub.address, timeout_s=1.0)
        assert time.monotonic() - started < SOON_S / 2
        assert hub.peer(first.name).alive
        assert second.peers() == ()


@both_backends
def test_closed_by_another_thread_in_the_middle(backend: str) -> None:
    with new_engine(backend) as b:
        a = new_engine(backend).open()
        a.connect(b.address)
        source, target = a.register(allocate(1 << 20)), b.register(allocate(1 << 20))
        key = offer(b, target, a)
        started, ended = threading.Event(), []

        def write_without_end() -> None:
            try:
                while True:
                    a.write(b.name, source, key, 0, 0, 1 << 20, timeout_s=SOON_S).wait()
                    started.set()
            except TransferError as error:
                ended.append(type(error))

        thread = threading.Thread(target=write_without_end)
        thread.start()
        assert started.wait(SOON_S)
        a.close()
        thread.join(SOON_S)
        assert not thread.is_alive()
        assert ended[0] in (EngineClosed, PeerLost)
        check_usable(b, backend)


def test_closed_while_connecting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        engine = new_engine(handshake_timeout_s=30.0).open()
        timer = threading.Timer(0.2, engine.close)
        timer.start()
        with pytest.raises(TransferError):
            engine.connect(f"127.0.0.1:{silent.getsockname()[1]}")
        timer.join()


def test_the_secret_shows_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    secret = secrets.token_hex(16).encode()
    seen = []
    with new_engine(secret=secret) as a, new_engine() as b:
        with pytest.raises(HandshakeRefused) as caught:
            a.connect(b.address)
        seen += [repr(a), str(a), repr(caught.value), repr(caught.value.__dict__), caplog.text]
        with pytest.raises((TypeError, pickle.PicklingError)):
            pickle.dumps(a)
    assert not any(secret.decode() in text or secret.hex() in text for text in seen)


def is_stopped(pid: int) -> bool:
    """The signal reaches one thread after the other."""
    return all(state_of(task) in "TXZ" for task in Path(f"/proc/{pid}/task").iterdir())


def state_of(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"  # it ended meanwhile


def frozen(board: Board, backend: str, what: str) -> str:
    """Rank 1 is stopped while something of rank 0 needs it, and woken after the withdrawal."""
    with new_engine(backend, name=f"rank{board.rank}") as engine:
        addresses = board.exchange("address", engine.address)
        memory = allocate(8 << 20)
        region = engine.register(memory)
        other = f"rank{1 - board.rank}"
        if board.rank == 0:
            engine.connect(addresses[1])
        board.exchange("connected", os.getpid())
        key = engine.offer(region, to=other, access=Access.READ | Access.WRITE)
        theirs = RegionKey.decode(board.exchange("key", key.encode())[1 - board.rank])
        if board.rank == 1:
            memory.tensor.fill_(66)
            board.post("ready")
            with contextlib.suppress(TransferError):
                while what == "writing":
                    engine.write(other, region, theirs, 0, 0, 8 << 20, timeout_s=5.0).wait()
            board.read("over")
            return ""
        board.read("ready")
        pid = board.read("connected.1")
        if what == "writing":
            eventually(lambda: bool(memory.tensor.any()), "it writes")
        os.kill(pid, signal.SIGSTOP)
        eventually(lambda: is_stopped(pid), "all its threads have stopped")
        ended = ""
        try:
            if what == "mapping":
                started = time.monotonic()
                with pytest.raises(TransferError) as caught:
                    engine.write(other, region, theirs, 0, 0, 64, timeout_s=0.5).wait()
                assert time.monotonic() - started < SOON_S / 2
                ended = type(caught.value).__name__
            engine.withdraw(key)
            memory.tensor.zero_()
        finally:
            os.kill(pid, signal.SIGCONT)
        time.sleep(0.3)
        assert not memory.tensor.any(), "nothing lands after the withdrawal"
        board.post("over")
        return ended


def test_nothing_lands_over_a_socket_after_the_withdrawal() -> None:
    run_ranks(2, frozen, "tcp", "writing")


@both_backends
def test_an_owner_that_hangs_while_it_is_asked_to_map_or_take(backend: str) -> None:
    assert run_ranks(2, frozen, str(backend), "mapping")[0] == "TransferTimeout"
