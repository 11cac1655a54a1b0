"""TLS between engines under attack: silence, floods, and a member's certificate in the middle."""

from __future__ import annotations

import contextlib
import gc
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from configs.schema import TransferTls
from tests.support.certificates import Authority, member_tls
from tests.support.engines import (
    TLS,
    engine_pair,
    new_engine,
    offer,
    open_descriptors,
)
from tests.support.waits import eventually
from transfer import HandshakeRefused, TransferEngine
from transfer.connections import rendezvous as rendezvous_module

SOON_S = 60.0


def call(engine: TransferEngine) -> socket.socket:
    host, port = engine.address.split(":")
    return socket.create_connection((host, int(port)), timeout=SOON_S)


def client(tls: TransferTls) -> ssl.SSLContext:
    assert tls.certificate is not None
    context = ssl.create_default_context(cafile=str(tls.authority))
    context.check_hostname = False
    context.load_cert_chain(tls.certificate, tls.private_key)
    return context


def says_nothing(sock: socket.socket) -> socket.socket:
    return sock


def says_half_a_hello(sock: socket.socket) -> socket.socket:
    sock.sendall(b"\x16\x03\x01\x02\x00\x01\x00")
    return sock


def shows_its_certificate_and_is_silent(sock: socket.socket) -> socket.socket:
    return client(member_tls()).wrap_socket(sock)


@pytest.mark.parametrize(
    "begin", [says_nothing, says_half_a_hello, shows_its_certificate_and_is_silent]
)
def test_who_falls_silent_is_cut_off(begin: Callable[[socket.socket], socket.socket]) -> None:
    with new_engine(TLS, handshake_timeout_s=5.0) as engine:  # two of them begin well
        started = time.monotonic()
        with begin(call(engine)) as sock:
            with contextlib.suppress(OSError):  # a reset is an end too
                while sock.recv(1000):
                    pass
            assert 0.3 < time.monotonic() - started < SOON_S / 2
        eventually(lambda: engine.statistics().refused_handshakes >= 1, "counted")


def test_an_owner_that_falls_silent_in_the_tls_handshake_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, new_engine(TLS) as engine:
        started = time.monotonic()
        with pytest.raises(HandshakeRefused):
            engine.connect("{}:{}".format(*silent.getsockname()), timeout_s=0.5)
        assert time.monotonic() - started < SOON_S / 2


def test_silent_callers_lock_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_module, "NEGOTIATIONS_MAX", 8)
    with new_engine(TLS, handshake_timeout_s=SOON_S) as engine, contextlib.ExitStack() as stack:
        for i in range(24):
            begin = shows_its_certificate_and_is_silent if i % 2 else says_half_a_hello
            stack.enter_context(begin(call(engine)))
        assert len(engine._rendezvous._negotiations) <= 8
        with new_engine(TLS) as member:
            assert member.connect(engine.address, timeout_s=SOON_S).alive


def test_garbage_at_every_stage_leaves_nothing_behind() -> None:
    seed = random.randrange(2**32)
    generator = random.Random(seed)
    with new_engine(TLS, handshake_timeout_s=4.0) as engine:
        before = open_descriptors()
        for turn in range(60):
            with call(engine) as sock, contextlib.suppress(OSError):
                if turn % 3 == 0:
                    sock = shows_its_certificate_and_is_silent(sock)
                start = b"\x16\x03\x01" if turn % 3 == 1 else b""
                sock.sendall(start + generator.randbytes(generator.randrange(1, 3000)))
                if turn % 2:
                    sock.recv(1000)
                sock.close()
        eventually(lambda: engine.statistics().refused_handshakes >= 60, f"refused, seed {seed}")
        eventually(lambda: open_descriptors() <= before, f"closed, seed {seed}")
        with new_engine(TLS) as member:
            assert member.connect(engine.address, timeout_s=SOON_S).alive


class Middle(threading.Thread):
    """Has a certificate of the same authority, and reads what it passes on."""

    def __init__(self, target: str, tls: TransferTls) -> None:
        super().__init__(name="middle")
        host, port = target.split(":")
        self.target, self.tls = (host, int(port)), tls
        self.read = b""
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = "{}:{}".format(*self.listener.getsockname())

    def run(self) -> None:
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        assert self.tls.certificate is not None
        server.load_cert_chain(self.tls.certificate, self.tls.private_key)
        server.load_verify_locations(self.tls.authority)
        server.verify_mode = ssl.CERT_REQUIRED
        with self.listener, contextlib.suppress(OSError):
            plain, _ = self.listener.accept()
            caller = server.wrap_socket(plain, server_side=True)
            called = client(self.tls).wrap_socket(socket.create_connection(self.target, SOON_S))
            with caller, called:
                caller.settimeout(SOON_S)
                source, sink = caller, called
                # Word by word, in turns: that is how a handshake goes.
                while portion := source.recv(4096):
                    self.read += portion
                    sink.sendall(portion)
                    source, sink = sink, source


@pytest.mark.parametrize("stolen", [False, True], ids=["another certificate", "the very same"])
def test_who_sits_in_the_middle_with_a_certificate_is_found_out(
    stolen: bool, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    owner, own = authority.member("owner"), authority.member("caller")
    with new_engine(TLS, tls=owner) as called, new_engine(TLS, tls=own) as caller:
        middle = Middle(called.address, owner if stolen else authority.member("middle"))
        middle.start()
        with pytest.raises(HandshakeRefused):
            caller.connect(middle.address, timeout_s=SOON_S)
        middle.join(SOON_S)
        assert not middle.is_alive()
        for name in (caller.name, called.name):
            assert name.encode() in middle.read, "it did sit in the middle"
        for private in (caller._rendezvous.facts.local_socket, called.address):
            assert private.encode() not in middle.read
        eventually(lambda: called.statistics().refused_handshakes >= 1, "refused")
        assert caller.peers() == called.peers() == ()


def test_engines_come_and_go_and_nothing_is_left() -> None:
    with engine_pair(TLS):
        pass  # what is opened once per process is open now
    gc.collect()
    before = open_descriptors(), threading.active_count()
    for i in range(30):
        with engine_pair(TLS) as (a, b):
            source = a.register(torch.full((5000,), i).byte())
            target = b.register(torch.zeros(5000).byte())
            a.write(b.name, source, offer(b, target, a), 0, 0, 5000).wait(SOON_S)
            assert target.tensor.tolist() == [i] * 5000
    gc.collect()
    eventually(lambda: open_descriptors() <= before[0], "descriptors are closed")
    eventually(lambda: threading.active_count() <= before[1], "threads have ended")
