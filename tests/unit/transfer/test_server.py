"""The owner's server, compiled and in Python: what lands, what is dropped, what is told."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time

import numpy as np
import pytest

from tests.support.data_connections import (
    KINDS,
    SOON_S,
    TOKEN,
    header,
    make_server,
    rig,
    tcp_pair,
    write_bytes,
)
from tests.support.waits import eventually
from transfer.backends.served import CLOSED, IMMEDIATE
from transfer.wire import (
    PAYLOAD_BYTES_MAX,
    REPLY,
    SLICE_BYTES,
    SLICE_PIECES,
    TRANSFERS_AHEAD_MAX,
    RequestKind,
    Status,
    encode_pieces,
    parse_reply,
)

pytestmark = pytest.mark.unit


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


def read_reply(sock: socket.socket) -> Status:
    data = b""
    while len(data) < REPLY.size:
        portion = sock.recv(REPLY.size - len(data))
        if not portion:
            raise ConnectionError("closed")
        data += portion
    return parse_reply(data).status


def is_closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_an_immediate_is_told_once_all_slices_are_in_place(kind: str) -> None:
    with rig(kind) as owner, owner.connect() as one, owner.connect() as two:
        fields = {"num_slices": 3, "immediate": 9}
        for sock, i in [(one, 2), (two, 0)]:
            sock.sendall(write_bytes(i, b"x", slice_idx=i, **fields))
            assert read_reply(sock) is Status.OK
        assert owner.told(IMMEDIATE) == []
        one.sendall(write_bytes(1, b"y", slice_idx=1, **fields))
        assert read_reply(one) is Status.OK
        for sock in (one, two):  # again, as after a reset
            for i in range(3):
                sock.sendall(write_bytes(i, b"z", slice_idx=i, **fields))
                assert read_reply(sock) is Status.OK
        eventually(lambda: owner.told(IMMEDIATE) == [9], "told once")
        assert owner.memory[:3].tobytes() == b"xyx"


def test_a_slice_that_comes_again_takes_over(kind: str) -> None:
    with rig(kind) as owner, owner.connect() as one, owner.connect() as two:
        whole = write_bytes(0, b"A" * 100, num_slices=2, immediate=1)
        again = write_bytes(0, b"B" * 100, num_slices=2, immediate=1)
        one.sendall(whole[:-50])
        eventually(lambda: int((owner.memory == ord("A")).sum()) == 50, "half has landed")
        two.sendall(again[:-20])
        eventually(lambda: int((owner.memory == ord("B")).sum()) == 80, "most has landed")
        # It is not in place yet, so the first may neither write it nor hear that it is.
        one.sendall(whole[-50:])
        assert is_closed(one)
        two.sendall(again[-20:])
        assert read_reply(two) is Status.OK
        assert owner.memory[:100].tobytes() == b"B" * 100


def test_a_slice_in_place_is_confirmed_to_whoever_was_overtaken(kind: str) -> None:
    with rig(kind) as owner, owner.connect() as one, owner.connect() as two:
        one.sendall(write_bytes(0, b"A" * 100)[:-50])
        eventually(lambda: int((owner.memory == ord("A")).sum()) == 50, "half has landed")
        two.sendall(write_bytes(0, b"B" * 100))
        assert read_reply(two) is Status.OK
        one.sendall(b"C" * 50)
        assert read_reply(one) is Status.OK
        assert owner.memory[:100].tobytes() == b"B" * 100


def test_what_was_given_up_does_not_land(kind: str) -> None:
    with rig(kind) as owner, owner.connect() as one, owner.connect() as two:
        one.sendall(write_bytes(0, b"A" * 100, transfer_id=1)[:-50])
        eventually(lambda: int(owner.memory.sum()) == 50 * ord("A"), "half has landed")
        two.sendall(write_bytes(200, b"B", transfer_id=5, oldest=5))
        assert read_reply(two) is Status.OK
        one.sendall(b"A" * 50)
        assert read_reply(one) is Status.OK
        one.sendall(write_bytes(0, b"D" * 100, transfer_id=3, oldest=3, immediate=4))
        assert read_reply(one) is Status.OK
        assert int((owner.memory == ord("A")).sum()) == 50
        assert int((owner.memory == ord("D")).sum()) == 0
    assert owner.told(IMMEDIATE) == []


@pytest.mark.parametrize("how", ["withdraw", "close_peer", "detach"])
def test_nothing_lands_after_the_return(kind: str, how: str) -> None:
    """A sender at full speed, while the owner takes the memory back at a random moment."""
    size = SLICE_BYTES
    for attempt in range(8):
        with rig(kind, size) as owner, owner.connect() as sock:
            slices = [write_bytes(0, bytes([i]) * size, transfer_id=i, oldest=1)
                      for i in range(1, 30)]  # fmt: skip

            sender = threading.Thread(target=_send_all, args=(sock, slices))
            sender.start()
            eventually(lambda: owner.memory[0] > 0, "it flows")
            time.sleep(0.0003 * attempt)
            if how == "withdraw":
                owner.server.withdraw_offer(TOKEN)
            elif how == "detach":
                for connection in owner.server.connections(owner.peer):
                    owner.server.detach(connection)
            else:
                owner.server.close_peer(owner.peer)
            owner.memory[:] = 255
            time.sleep(0.03)
            assert (owner.memory == 255).all()
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sender.join(SOON_S)
            assert not sender.is_alive()


def _send_all(sock: socket.socket, parts: list[bytes]) -> None:
    with contextlib.suppress(OSError):
        for part in parts:
            sock.sendall(part)


def test_a_withdrawn_key_refuses_what_was_landing(kind: str) -> None:
    with rig(kind) as owner, owner.connect() as sock:
        data = write_bytes(0, b"A" * 100)
        sock.sendall(data[:-50])
        eventually(lambda: int(owner.memory.sum()) > 0, "half has landed")
        owner.server.withdraw_offer(TOKEN)
        sock.sendall(data[-50:])
        assert read_reply(sock) is Status.UNKNOWN
        sock.sendall(write_bytes(0, b"B", transfer_id=2))
        assert read_reply(sock) is Status.UNKNOWN
        assert int((owner.memory == ord("A")).sum()) == 50


def test_a_withdrawn_key_ends_what_was_being_read(kind: str) -> None:
    with rig(kind, SLICE_BYTES) as owner, owner.connect() as sock:
        numbers = np.array([0]), np.array([SLICE_BYTES])
        request = header(RequestKind.READ, num_pieces=1, nbytes=SLICE_BYTES)
        for _i in range(8):
            sock.sendall(request + encode_pieces(*numbers))
        assert read_reply(sock) is Status.OK
        owner.server.withdraw_offer(TOKEN)
        received = 0
        try:
            while portion := sock.recv(1 << 20):
                received += len(portion)
        except ConnectionResetError:
            pass
        assert received < 8 * SLICE_BYTES
    [(evidence, malformed)] = owner.told(CLOSED)
    assert "withdrawn" in evidence
    assert not malformed


HOSTILE = {
    "noise": b"\xaa" * 60,
    "kind": header()[:2] + b"\x09" + header()[3:],
    "flags": header()[:3] + b"\x02" + header()[4:],
    "slice beyond": header(slice_idx=5, num_slices=5),
    "no slices": header(num_slices=0),
    "many slices": header(num_slices=(1 << 24) + 1),
    "many pieces": header(num_pieces=SLICE_PIECES + 1, nbytes=SLICE_PIECES + 1),
    "many bytes": header(num_pieces=1, nbytes=PAYLOAD_BYTES_MAX + 1),
    "bytes of nothing": header(num_pieces=0, nbytes=1),
    "huge": header(num_pieces=1, nbytes=2**64 - 1),
    "older than oldest": header(transfer_id=1, oldest=2),
    "far ahead": header(transfer_id=2 + TRANSFERS_AHEAD_MAX),
    "sum": header(num_pieces=1, nbytes=9) + encode_pieces(np.array([0]), np.array([8])),
    "no length": header(num_pieces=1, nbytes=9) + encode_pieces(np.array([0]), np.array([0])),
    "negative": header(num_pieces=2, nbytes=9)
    + encode_pieces(np.array([0, 0]), np.array([18, -9])),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_nonsense_closes_the_connection_and_is_counted(kind: str, name: str) -> None:
    with rig(kind) as owner, owner.connect() as sock, owner.connect() as other:
        sock.sendall(HOSTILE[name])
        assert is_closed(sock)
        other.sendall(write_bytes(0, b"well"))
        assert read_reply(other) is Status.OK
        assert owner.server.take_counters() == (4, 0, 1)
    assert [malformed for _, malformed in owner.told(CLOSED)].count(True) == 1


def test_slices_that_differ_in_number_are_nonsense(kind: str) -> None:
    with rig(kind) as owner, owner.connect() as sock:
        sock.sendall(write_bytes(0, b"a", num_slices=3))
        assert read_reply(sock) is Status.OK
        sock.sendall(write_bytes(0, b"a", num_slices=4, slice_idx=1))
        assert is_closed(sock)
        assert owner.server.take_counters()[2] == 1


def test_open_writes_are_bounded(kind: str) -> None:
    with rig(kind) as owner, owner.connect() as sock:
        batch = b"".join(write_bytes(0, b"a", transfer_id=i, num_slices=2) for i in range(1, 4200))
        thread = threading.Thread(target=lambda: _swallow(sock))
        thread.start()
        with contextlib.suppress(OSError):
            sock.sendall(batch)
        thread.join(SOON_S)
        assert owner.server.take_counters()[2] == 1


def _swallow(sock: socket.socket) -> None:
    try:
        while sock.recv(1 << 16):
            pass
    except OSError:
        pass


def test_bookkeeping_of_sparse_slices_is_bounded(kind: str) -> None:
    """Each open write costs memory in proportion to its highest slice, up to a bound."""
    before = _resident_bytes()
    with rig(kind) as owner, owner.connect() as sock:
        last = (1 << 24) - 1
        for i in range(1, 80):
            try:
                sock.sendall(
                    write_bytes(0, b"a", transfer_id=i, num_slices=1 << 24, slice_idx=last)
                )
                read_reply(sock)
            except OSError:
                break
        assert _resident_bytes() - before < 200 << 20


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_a_peer_that_reads_no_answers_is_not_served_without_end(kind: str) -> None:
    with rig(kind, SLICE_BYTES) as owner, owner.connect() as sock, owner.connect() as other:
        request = header(RequestKind.READ, num_pieces=1, nbytes=SLICE_BYTES)
        request += encode_pieces(np.array([0]), np.array([SLICE_BYTES]))
        sock.setblocking(False)
        sent = 0
        end = time.monotonic() + 1.0
        while time.monotonic() < end and sent < 16 << 20:
            try:
                sent += sock.send(request * 100)
            except BlockingIOError:
                time.sleep(0.01)
        other.sendall(write_bytes(0, b"well"))
        assert read_reply(other) is Status.OK
        served, _, _ = owner.server.take_counters()
        assert served < 64 << 20


def test_tokens_and_peers_are_checked(kind: str) -> None:
    server = make_server(kind)
    memory = np.zeros(8, dtype=np.uint8)
    server.add_offer(TOKEN, "peer", memory.ctypes.data, 8, 3)
    with pytest.raises(ValueError, match="in use"):
        server.add_offer(TOKEN, "peer", memory.ctypes.data, 8, 3)
    server.withdraw_offer(TOKEN)
    server.withdraw_offer(TOKEN)
    server.add_offer(TOKEN, "peer", memory.ctypes.data, 8, 3)
    ours, theirs = tcp_pair()
    with pytest.raises(OSError):
        server.attach(99, theirs.detach())
    assert is_closed(ours)
    ours.close()
    server.close_peer(99)
    server.detach(12345678901)
    assert server.connections(99) == []
    server.close()
    server.close()


def test_what_is_offered_to_another_is_unknown(kind: str) -> None:
    with rig(kind) as owner:
        stranger = owner.server.open_peer("stranger")
        ours, theirs = tcp_pair()
        owner.server.attach(stranger, theirs.detach())
        with ours:
            ours.sendall(write_bytes(0, b"secret"))
            assert read_reply(ours) is Status.UNKNOWN
        assert not owner.memory.any()


def test_ten_thousand_small_writes_in_one_stream(kind: str) -> None:
    with rig(kind) as owner, owner.connect() as sock:
        batch = b"".join(
            write_bytes(i, bytes([i % 251]), transfer_id=i + 1, immediate=i) for i in range(10_000)
        )
        sender = threading.Thread(target=sock.sendall, args=(batch,))
        sender.start()
        for _ in range(10_000):
            assert read_reply(sock) is Status.OK
        sender.join(SOON_S)
        eventually(lambda: len(owner.told(IMMEDIATE)) == 10_000, "all are told")
        assert owner.told(IMMEDIATE) == list(range(10_000))
        assert (owner.memory[:10_000] == np.arange(10_000) % 251).all()


def test_connections_leave_nothing_behind(kind: str) -> None:
    with rig(kind) as owner:
        before = len(os.listdir("/proc/self/fd"))
        for i in range(1000):
            ours, theirs = socket.socketpair()
            owner.server.attach(owner.peer, theirs.detach())
            if i % 3 == 0:
                ours.sendall(write_bytes(0, b"x", transfer_id=i + 1, oldest=i + 1)[: i % 80])
            ours.close()
        eventually(lambda: owner.server.connections(owner.peer) == [], "all have ended")
        eventually(lambda: len(os.listdir("/proc/self/fd")) <= before, "descriptors are closed")


def test_a_fork_closes_its_copies(kind: str) -> None:
    with rig(kind) as owner, owner.connect() as sock:
        pid = os.fork()
        if pid == 0:
            owner.server.abandon()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        sock.sendall(write_bytes(0, b"well"))
        assert read_reply(sock) is Status.OK
