"""A peer's address is taken over: by its next life, by its own name, by somebody else."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import pytest
import torch

from tests.support.engines import (
    BACKENDS,
    BOTH,
    engine_pair,
    new_engine,
    offer,
)
from tests.support.ranks import Board, run_ranks
from tests.support.waits import eventually
from transfer import (
    HandshakeRefused,
    ImmediateTimeout,
    PeerLost,
    PeerUnreachable,
    RegionKey,
    TransferEngine,
    TransferError,
    allocate,
)
from transfer.connections.rendezvous import Rendezvous

SOON_S = 30.0
NBYTES = 1 << 16
FIRST, SECOND = "first-life", "second-life"
both_backends = pytest.mark.parametrize("backend", BACKENDS)


def engine_at(backend: str, port: int, name: str) -> TransferEngine:
    """An engine at a port of our choice (0: any), as chance may choose it."""

    def listen_there(rendezvous: Rendezvous, host: str) -> str:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        rendezvous._listeners.append(listener)
        listener.bind((host, port))
        return "{}:{}".format(*listener.getsockname())

    Rendezvous._listen_on = listen_there  # type: ignore[method-assign]
    return new_engine(backend, name=name)


def be_first(board: Board, engine: TransferEngine) -> None:
    """Meet the survivor, write to it, and wait for the end."""
    memory = engine.register(allocate(NBYTES))
    board.post("first", (engine.address, engine.offer(memory, to="survivor", access=BOTH).encode()))
    key = RegionKey.decode(board.read("window"))
    source = engine.register(torch.full((NBYTES,), 1, dtype=torch.uint8))
    for _ in range(3):
        engine.write("survivor", source, key, 0, 0, NBYTES, immediate=7).wait(SOON_S)
    board.post("written", os.getpid())
    time.sleep(10 * SOON_S)


def be_second(board: Board, backend: str, name: str) -> dict[str, Any]:
    """Take the address; use what the first life was given, if it comes to that."""
    address, _ = board.read("first", timeout_s=SOON_S)
    old = RegionKey.decode(board.read("window"))
    board.read("ended", timeout_s=SOON_S)
    told: dict[str, Any] = {}
    with engine_at(backend, int(address.rpartition(":")[2]), name) as engine:
        memory = engine.register(allocate(NBYTES))
        key = engine.offer(memory, to="survivor", access=BOTH)
        board.post("second", (engine.address, key.encode()))
        met = board.read("met", timeout_s=SOON_S)
        if met:
            source = engine.register(torch.full((NBYTES,), 2, dtype=torch.uint8))
            try:
                engine.write("survivor", source, old, 0, 0, NBYTES, timeout_s=SOON_S).wait()
                told["old key"] = "worked"
            except TransferError as error:
                told["old key"] = type(error).__name__
            board.read("used", timeout_s=SOON_S)
            told["landed"] = sorted(set(memory.tensor.tolist()))
        board.exchange("over", None, [0, 2])
    return told


def survive(board: Board, backend: str, name: str) -> dict[str, Any]:
    told: dict[str, Any] = {}
    with new_engine(backend, name="survivor", handshake_timeout_s=SOON_S) as engine:
        address, first_key = board.read("first", timeout_s=SOON_S)
        engine.connect(address)
        window = engine.register(allocate(NBYTES))
        board.post("window", engine.offer(window, to=FIRST, access=BOTH).encode())
        pid = board.read("written", timeout_s=SOON_S)
        engine.expect({(FIRST, 7): 1}, timeout_s=SOON_S)
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: not engine.peers(), "its death is seen", SOON_S)
        if name == "fenced":
            engine.disconnect(FIRST, reason="it was killed")
        board.post("ended")
        there, key = board.read("second", timeout_s=SOON_S)
        assert there == address, "the address was taken over"
        try:
            told["peer"] = engine.connect(address).name
        except HandshakeRefused as error:
            told["peer"] = error.reason
        board.post("met", "fenced" not in told["peer"])
        source = engine.register(torch.full((NBYTES,), 3, dtype=torch.uint8))
        told["old key"] = outcome(
            lambda: engine.write(
                FIRST, source, RegionKey.decode(first_key), 0, 0, NBYTES, timeout_s=SOON_S
            ).wait()
        )
        told["old immediates"] = outcome(lambda: engine.expect({(FIRST, 7): 1}, timeout_s=0.2))
        if "fenced" not in told["peer"]:
            key = RegionKey.decode(key)
            told["new key"] = outcome(
                lambda: engine.write(key.owner, source, key, 0, 0, NBYTES, immediate=1).wait(SOON_S)
            )
        board.post("used")
        board.exchange("over", None, [0, 2])
        told["window"] = sorted(set(window.tensor.tolist()))
    return told


def outcome(call: Any) -> str:
    try:
        call()
    except TransferError as error:
        return type(error).__name__
    return "worked"


def live_twice(board: Board, backend: str, name: str) -> dict[str, Any]:
    if board.rank == 0:
        return survive(board, backend, name)
    if board.rank == 1:
        with engine_at(backend, 0, FIRST) as engine:
            be_first(board, engine)
    return be_second(board, backend, FIRST if name in ("same", "fenced") else name)


@both_backends
def test_a_new_life_under_the_same_address(backend: str) -> None:
    """It is another peer: nothing that the first was given, or had done, is the second's."""
    survivor, _, second = run_ranks(3, live_twice, str(backend), SECOND, exits={1: -9})
    assert survivor["peer"] == SECOND
    assert survivor["old key"] == "PeerLost"
    assert survivor["old immediates"] in ("worked", "PeerLost"), "of what it did before its end"
    assert survivor["new key"] == "worked"
    assert survivor["window"] == [1]
    assert second["landed"] == [3]
    assert second["old key"] == "RegionUnknown"


@both_backends
def test_a_fenced_name_does_not_come_back_to_its_address(backend: str) -> None:
    survivor, _, second = run_ranks(3, live_twice, str(backend), "fenced", exits={1: -9})
    assert "fenced: it was killed" in survivor["peer"]
    assert survivor["old key"] == survivor["old immediates"] == "PeerLost"
    assert survivor["window"] == [1]
    assert second == {}


@both_backends
def test_a_name_that_is_used_twice_finds_nothing_of_its_first_life(backend: str) -> None:
    """Names are unique per life. One that is not, and that nobody has fenced, begins anew."""
    survivor, _, second = run_ranks(3, live_twice, str(backend), "same", exits={1: -9})
    assert survivor["peer"] == FIRST
    assert survivor["old key"] == "RegionUnknown", "its memory is gone with its first life"
    assert survivor["old immediates"] == "ImmediateTimeout"
    assert survivor["new key"] == "worked"
    assert second["landed"] == [3]


@both_backends
def test_a_name_that_stands_is_not_given_to_another(backend: str) -> None:
    with engine_pair(backend, handshake_timeout_s=4.0) as (a, b):
        key = offer(a, a.register(allocate(64)), b)
        with new_engine(backend, name=b.name, handshake_timeout_s=4.0) as impostor:
            with pytest.raises((HandshakeRefused, TimeoutError)):
                impostor.connect(a.address, timeout_s=4.0)
            with pytest.raises(HandshakeRefused):
                impostor.connect(b.address, timeout_s=4.0)
            assert impostor.peers() == ()
        source = b.register(torch.ones(64, dtype=torch.uint8))
        b.write(a.name, source, key, 0, 0, 64, immediate=1).wait(SOON_S)
        a.expect({(b.name, 1): 1}, timeout_s=SOON_S)


@contextmanager
def stranger(answer: bytes | None) -> Iterator[str]:
    """Another program at an address: silent, or it says this to whoever calls."""
    listener = socket.create_server(("127.0.0.1", 0))
    callers: list[socket.socket] = []

    def accept() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            callers.append(sock)
            if answer is not None:
                with suppress(OSError):  # it may hang up at the first wrong byte
                    sock.sendall(answer)
                    sock.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield "{}:{}".format(*listener.getsockname())
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(SOON_S)
        for sock in callers:
            sock.close()


@both_backends
@pytest.mark.parametrize("answer", [None, b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0" * 5000])
def test_another_program_at_the_address(backend: str, answer: bytes | None) -> None:
    # Only who never answers is found by the deadline.
    patience_s = 0.5 if answer is None else SOON_S
    with stranger(answer) as address, new_engine(backend) as engine:
        started = time.monotonic()
        with pytest.raises(PeerUnreachable if answer is None else HandshakeRefused):
            engine.connect(address, timeout_s=patience_s)
        assert time.monotonic() - started < SOON_S / 2
        assert engine.peers() == ()
        with new_engine(backend) as other:
            engine.connect(other.address)


def test_data_connections_go_to_the_peer_or_nowhere() -> None:
    """The address that a peer has told is somebody else's, who knows the secret too."""
    with new_engine("tcp") as a, new_engine("tcp") as b, new_engine("tcp") as c:
        address = b.address
        b._rendezvous.facts = msgspec.structs.replace(b._rendezvous.facts, address=c.address)
        a.connect(address)
        theirs = b.register(allocate(64))
        key = offer(b, theirs, a)
        source = a.register(torch.ones(64, dtype=torch.uint8))
        with pytest.raises((PeerLost, TimeoutError)):
            a.write(b.name, source, key, 0, 0, 64, immediate=1, timeout_s=0.5).wait()
        assert c.peers() == ()
        assert c.statistics().immediates_received == 0
        with pytest.raises(ImmediateTimeout):
            b.expect({(a.name, 1): 1}, timeout_s=0.1)
        assert not theirs.tensor.any()
