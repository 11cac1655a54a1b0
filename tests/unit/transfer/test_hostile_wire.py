"""Strangers and broken peers: what they send is refused, counted, and harms nobody."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Iterator

import pytest
import torch

from tests.support.engines import (
    SECRET,
    engine_pair,
    new_engine,
    new_name,
    offer,
)
from tests.support.raw_member import exactly, shake_hands
from tests.support.waits import eventually
from transfer import Access, HandshakeRefused, TransferEngine, allocate
from transfer.connections.handshake import DialerHandshake, Facts, Purpose
from transfer.wire import REPLY, Request, RequestKind, Status, encode_pieces, parse_reply

SOON_S = 60.0


def call(engine: TransferEngine, *, local: bool = False) -> socket.socket:
    if local:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect("\0" + engine._rendezvous.facts.local_socket)
    else:
        host, port = engine.address.split(":")
        sock = socket.create_connection((host, int(port)))
    sock.settimeout(SOON_S)
    return sock


def greet(engine: TransferEngine, purpose: Purpose, name: str, secret: bytes = SECRET,
          *, local: bool = False) -> socket.socket:  # fmt: skip
    """Authenticate as a peer that knows the secret, with a socket of our own."""
    # What this peer was told when its control connection was made.
    session = engine._table.session(name)
    sock = call(engine, local=local)
    facts = Facts(address="127.0.0.1:9", host="x", local_socket="x", shared_memory=False, tcp=True)
    machine = DialerHandshake(
        secret=secret, name=name, facts=facts, admit=lambda *_: None, sessions=lambda _: session
    )
    return shake_hands(sock, machine, purpose)


@pytest.fixture
def engine() -> Iterator[TransferEngine]:
    # Who is silent is cut off then; who is not has said all by then, on a busy machine too.
    with new_engine("tcp", handshake_timeout_s=4.0) as engine:
        yield engine


@pytest.mark.parametrize("local", [False, True], ids=["tcp", "unix"])
def test_garbage_and_silence_are_refused_and_counted(engine: TransferEngine, local: bool) -> None:
    garbage = [secrets.token_bytes(200), b"GET / HTTP/1.1\r\n\r\n", b"\xff\xff", b"\0\0", b""]
    socks = [call(engine, local=local) for _ in garbage]
    for sock, data in zip(socks, garbage, strict=True):
        sock.sendall(data)
    for sock in socks:
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1000) == b""
        sock.close()
    eventually(lambda: engine.statistics().refused_handshakes >= len(garbage), "counted")
    assert engine.peers() == ()
    with new_engine("tcp") as other:
        assert other.connect(engine.address).alive, "it still serves"


def test_without_the_secret_nothing_is_learnt(engine: TransferEngine) -> None:
    sock = call(engine)
    facts = Facts(address="x:1", host="x", local_socket="x", shared_memory=True, tcp=True)
    machine = DialerHandshake(
        secret=b"guess", name="spy", facts=facts, admit=lambda *_: None, sessions=lambda _: None
    )
    sock.sendall(machine.start(Purpose.CONTROL))
    heard = b""
    while portion := sock.recv(1000):
        heard += portion
        for i in range(len(portion)):
            sock.sendall(machine.feed(portion[i : i + 1]))
    sock.close()
    for told in (engine.address, engine._rendezvous.facts.local_socket, "shared"):
        assert told.encode() not in heard
    assert len(heard) < 100, "a name and a nonce"
    eventually(lambda: engine.statistics().refused_handshakes >= 1, "counted")


def test_engines_of_two_clusters_do_not_meet(engine: TransferEngine) -> None:
    with new_engine("tcp", secret=b"another cluster") as other:
        with pytest.raises(HandshakeRefused):
            other.connect(engine.address)
        with pytest.raises(HandshakeRefused):
            engine.connect(other.address)
        assert other.peers() == engine.peers() == ()


@pytest.mark.parametrize("purpose", [Purpose.DATA, Purpose.SIGNAL])
def test_data_needs_a_control_connection_first(engine: TransferEngine, purpose: Purpose) -> None:
    with pytest.raises((ConnectionError, HandshakeRefused)):
        greet(engine, purpose, new_name())


def test_nonsense_on_a_control_connection_loses_the_peer(engine: TransferEngine) -> None:
    lost: list[str] = []
    engine.on_peer_lost(lambda name, evidence: lost.append(evidence))
    for data in (
        b"\xff\xff\xff\xff\x01",
        b"\x00\x00\x00\x00\x01",
        b"\x02\x00\x00\x00\xeex",
        b"\x02\x00\x00\x00\x09x",
    ):
        name = new_name()
        with greet(engine, Purpose.CONTROL, name) as sock:
            sock.sendall(data)
            eventually(lambda: len(lost) > 0, "lost")
        assert "nonsense" in lost.pop()
    assert engine.statistics().malformed == 4


def request(kind: RequestKind = RequestKind.WRITE, **changes: object) -> Request:
    values: dict[str, object] = {
        "kind": kind, "transfer_id": 1, "oldest": 1, "slice_idx": 0, "num_slices": 1,
        "num_pieces": 1, "nbytes": 8, "immediate": None, "token": b"t" * 16, **changes,
    }  # fmt: skip
    return Request(**values)  # type: ignore[arg-type]


def pieces(*lengths: int) -> bytes:
    table = torch.tensor(lengths, dtype=torch.int64).numpy()
    return encode_pieces(table * 0, table)


@pytest.mark.parametrize(
    "data",
    [
        secrets.token_bytes(200),
        request(num_pieces=1 << 20).encode(),
        request(nbytes=1 << 40).encode(),
        request(slice_idx=5).encode(),
        request(oldest=7).encode(),
        request().encode() + pieces(9),
        request(num_pieces=2).encode() + pieces(16, -8),
        request(num_pieces=2).encode() + pieces(2**62, 2**62 + 8),
    ],
)
def test_nonsense_on_a_data_connection_closes_it_only(engine: TransferEngine, data: bytes) -> None:
    name = new_name()
    with greet(engine, Purpose.CONTROL, name), greet(engine, Purpose.DATA, name) as sock:
        sock.sendall(data)
        with pytest.raises((ConnectionError, TimeoutError)):
            exactly(sock, 1)
        eventually(lambda: engine.statistics().malformed == 1, "counted")
        assert engine.peer(name).alive


def test_a_peer_without_a_key_reaches_nothing(engine: TransferEngine) -> None:
    name = new_name()
    target = engine.register(torch.zeros(64, dtype=torch.uint8))
    for_another = engine.offer(target, to=new_name(), access=Access.READ | Access.WRITE)
    read_only = engine.offer(target, to=name, access=Access.READ)
    with greet(engine, Purpose.CONTROL, name), greet(engine, Purpose.DATA, name) as sock:
        for i, (token, kind, status) in enumerate([
            (secrets.token_bytes(16), RequestKind.WRITE, Status.UNKNOWN),
            (for_another.token, RequestKind.WRITE, Status.UNKNOWN),
            (for_another.token, RequestKind.READ, Status.UNKNOWN),
            (read_only.token, RequestKind.WRITE, Status.NO_RIGHT),
            (read_only.token, RequestKind.MAP, Status.NO_RIGHT),
        ]):  # fmt: skip
            header = request(kind, token=token, transfer_id=i + 1)
            payload = b"EVILEVIL" if kind is RequestKind.WRITE else b""
            sock.sendall(header.encode() + pieces(8) + payload)
            reply = parse_reply(exactly(sock, REPLY.size))
            assert (reply.status, reply.transfer_id, reply.nbytes) == (status, i + 1, 0)
        assert not target.tensor.any()
        assert engine.statistics().backends["tcp"].refused == 5


def test_bytes_stop_landing_when_the_key_is_withdrawn(engine: TransferEngine) -> None:
    name = new_name()
    target = engine.register(torch.zeros(1 << 16, dtype=torch.uint8))
    key = engine.offer(target, to=name, access=Access.WRITE)
    with greet(engine, Purpose.CONTROL, name), greet(engine, Purpose.DATA, name) as sock:
        header = request(token=key.token, nbytes=1 << 16, immediate=5)
        sock.sendall(header.encode() + pieces(1 << 16) + b"a" * 1000)
        eventually(lambda: int(target.tensor.count_nonzero()) == 1000, "the first part lands")
        engine.withdraw(key)
        sock.sendall(b"b" * ((1 << 16) - 1000))
        assert parse_reply(exactly(sock, REPLY.size)).status is Status.UNKNOWN
        assert int(target.tensor.count_nonzero()) == 1000
        assert not engine.arrived({(name, 5): 1})


def test_a_slice_that_comes_twice_counts_once_and_lands_once(engine: TransferEngine) -> None:
    name = new_name()
    target = engine.register(torch.zeros(16, dtype=torch.uint8))
    key = engine.offer(target, to=name, access=Access.WRITE)
    first = request(token=key.token, immediate=5, num_slices=2)
    second = request(token=key.token, immediate=5, num_slices=2, slice_idx=1)
    with (
        greet(engine, Purpose.CONTROL, name),
        greet(engine, Purpose.DATA, name) as one,
        greet(engine, Purpose.DATA, name) as two,
    ):
        one.sendall(first.encode() + pieces(8) + b"half")
        eventually(lambda: int(target.tensor.count_nonzero()) == 4, "a part lands")
        two.sendall(first.encode() + pieces(8) + b"complete")
        assert parse_reply(exactly(two, REPLY.size)).status is Status.OK
        one.sendall(b"LATE")  # of the first sender, overtaken by the second
        assert parse_reply(exactly(one, REPLY.size)).status is Status.OK
        assert bytes(target.array[:8]) == b"complete"
        assert not engine.arrived({(name, 5): 1})
        for sock in (one, two):
            sock.sendall(second.encode() + pieces(8) + b"complete")
            assert parse_reply(exactly(sock, REPLY.size)).status is Status.OK
        assert engine.arrived({(name, 5): 1})
        assert not engine.arrived({(name, 5): 2})


def test_a_data_connection_that_breaks_is_replaced() -> None:
    with engine_pair("tcp", tcp_connections=1) as (a, b):
        nbytes, quarter = 256 << 20, 64 << 20
        source = allocate(nbytes)
        source.tensor.random_()
        source.tensor[::quarter] = 1  # seen at the target, they say how far the bytes are
        mine, theirs = a.register(source), b.register(allocate(nbytes))
        key = offer(b, theirs, a)
        transfer = a.write(b.name, mine, key, 0, 0, nbytes, immediate=1)
        link = b._table.ready(a.name)
        cuts = 0
        while cuts < 3 and not transfer.done():
            if theirs.array[cuts * quarter]:
                for connection_id in b._links.service.connections(link.served_id):
                    b._links.service.reset(connection_id)
                    cuts += 1
            time.sleep(0.0005)
        transfer.wait(SOON_S)
        b.expect({(a.name, 1): 1}, timeout_s=SOON_S)
        assert torch.equal(mine.tensor, theirs.tensor)
        assert cuts, "the fault was injected"
        assert a.statistics().backends["tcp"].resends > 0
        assert transfer.attempts > 1
        assert transfer.bytes_moved == nbytes
        assert not b.arrived({(a.name, 1): 1})
