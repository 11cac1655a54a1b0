"""Notes that come with writes: kept once all bytes are in place, exactly once."""

from __future__ import annotations

import os
import random
import socket
import time

import numpy as np
import pytest

from tests.support.data_connections import KINDS, TOKEN, Rig, header, rig, write_bytes
from tests.support.engines import BOTH, TLS, engine_pair, offer
from tests.support.waits import eventually
from transfer import NOTE_BYTES_MAX, Access, AccessRefused, RegionUnknown, TransferEngine, allocate
from transfer.backends.served import CLOSED, NOTES
from transfer.backends.server import NOTES_TOLD
from transfer.wire import (
    HAS_IMMEDIATE,
    HAS_NOTE,
    REPLY,
    REQUEST,
    RequestKind,
    Status,
    encode_pieces,
    parse_reply,
)

pytestmark = pytest.mark.unit

SOON_S = 20.0
NBYTES = 1 << 20


@pytest.fixture(params=KINDS)
def owner(request):
    with rig(request.param, NBYTES) as made:
        yield made


def status_of(sock: socket.socket) -> Status:
    data = b""
    while len(data) < REPLY.size:
        portion = sock.recv(REPLY.size - len(data))
        assert portion, "closed"
        data += portion
    return parse_reply(data).status


def notes_of(owner: Rig) -> list[bytes]:
    return [note for _, _, note in owner.server.take_notes()]


def test_it_is_there_before_the_answer_and_not_before_the_last_byte(owner: Rig) -> None:
    payload, note = os.urandom(1000), os.urandom(200)
    whole = write_bytes(5, payload, note)
    begin = time.monotonic_ns()
    with owner.connect() as sock:
        sock.sendall(whole[:-1])
        eventually(lambda: bytes(owner.memory[5:1005]) == payload, "all but the note has landed")
        assert owner.server.take_notes() == []
        sock.sendall(whole[-1:])
        assert status_of(sock) is Status.OK
        [(name, stamp, got)] = owner.server.take_notes()
        assert (name, got) == ("peer", note)
        assert begin < stamp < time.monotonic_ns()
        assert owner.server.take_notes() == []


def test_a_write_that_comes_again_leaves_no_second_note(owner: Rig) -> None:
    payload, note = os.urandom(100), b"once"
    with owner.connect() as one, owner.connect() as two:
        one.sendall(write_bytes(0, payload, note)[:-2])  # superseded before its end
        eventually(lambda: bytes(owner.memory[:100]) == payload, "landed")
        for sock in (two, two, one):
            sock.sendall(write_bytes(0, payload, note) if sock is two else note[-2:])
            assert status_of(sock) is Status.OK
        assert notes_of(owner) == [note]
        two.sendall(write_bytes(0, payload, b"next", transfer_id=2, oldest=2))
        assert status_of(two) is Status.OK
        one.sendall(write_bytes(0, payload, note))  # of a transfer that has ended
        assert status_of(one) is Status.OK
        assert notes_of(owner) == [b"next"]


def test_every_slice_brings_it_and_the_last_one_leaves_it(owner: Rig) -> None:
    note, order = os.urandom(300), list(range(5))
    random.shuffle(order)
    with owner.connect() as one, owner.connect() as two:
        for count, idx in enumerate(order):
            sock = (one, two)[count % 2]
            assert notes_of(owner) == []
            for _ in range(2):
                sock.sendall(write_bytes(10 * idx, bytes([idx]) * 10, note,
                                         slice_idx=idx, num_slices=5))  # fmt: skip
                assert status_of(sock) is Status.OK
    assert notes_of(owner) == [note]
    assert owner.memory[:50].tolist() == [i for i in range(5) for _ in range(10)]


def test_what_is_refused_leaves_none(owner: Rig) -> None:
    with owner.connect() as sock:
        for offset, token, status in (
            (NBYTES - 5, TOKEN, Status.OUT_OF_BOUNDS), (0, b"x" * 16, Status.UNKNOWN),
        ):  # fmt: skip
            sock.sendall(write_bytes(offset, b"6 byte", b"note", token=token))
            assert status_of(sock) is status
        assert notes_of(owner) == []
        sock.sendall(header(note_bytes=4) + b"none")  # of no bytes at all
        assert status_of(sock) is Status.OK
        assert notes_of(owner) == [b"none"]
        whole = write_bytes(0, bytes(64), b"note", transfer_id=2, oldest=2)
        sock.sendall(whole[:-3])
        owner.server.withdraw_offer(TOKEN)
        sock.sendall(whole[-3:])
        assert status_of(sock) is Status.UNKNOWN
        assert notes_of(owner) == []


def test_of_any_size_with_any_pieces_cut_anywhere(owner: Rig) -> None:
    rng = random.Random()
    left: list[bytes] = []
    with owner.connect() as sock:
        for number in range(1, 40):
            count = rng.choice([0, 1, 2, 30])
            lengths = np.array([rng.randrange(1, 3000) for _ in range(count)], dtype=np.int64)
            offsets = np.cumsum(lengths) - lengths
            payload = rng.randbytes(int(lengths.sum()))
            note = rng.randbytes(rng.choice([1, 47, 60, 8191, 8192, NOTE_BYTES_MAX]))
            stream = header(num_pieces=count, nbytes=len(payload), note_bytes=len(note),
                            transfer_id=number, oldest=number)  # fmt: skip
            stream += encode_pieces(offsets, lengths) + payload + note
            while stream:
                size = rng.choice([len(stream), rng.randrange(1, len(stream) + 1)])
                sock.sendall(stream[:size])
                stream = stream[size:]
            assert status_of(sock) is Status.OK
            assert bytes(owner.memory[: len(payload)]) == payload
            left.append(note)
    taken = owner.server.take_notes()
    assert [note for _, _, note in taken] == left
    assert sorted(stamp for _, stamp, _ in taken) == [stamp for _, stamp, _ in taken]


def test_a_note_that_makes_no_sense_ends_the_connection(owner: Rig) -> None:
    def broken(kind: int, flags: int, last: int) -> bytes:
        return REQUEST.pack(0x4D54, kind, flags, 0, 1, 0, last, 0, 1, 1, TOKEN)

    write = int(RequestKind.WRITE)
    cases = [(write, HAS_NOTE, 0), (write, HAS_NOTE, NOTE_BYTES_MAX + 1),
             (write, HAS_NOTE, 2**32 - 1), (write, HAS_NOTE | HAS_IMMEDIATE, 4),
             (int(RequestKind.READ), HAS_NOTE, 4), (int(RequestKind.MAP), HAS_NOTE, 4),
             (write, 4, 0)]  # fmt: skip
    for case in cases:
        with owner.connect() as sock:
            sock.sendall(broken(*case) + bytes(100))
            with pytest.raises((AssertionError, ConnectionResetError)):
                status_of(sock)
    eventually(lambda: len(owner.told(CLOSED)) == len(cases), "all are told")
    assert all(malformed for _, malformed in owner.told(CLOSED))
    assert owner.server.take_notes() == []


def test_python_is_told_of_many(owner: Rig) -> None:
    with owner.connect() as sock:
        for number in range(1, NOTES_TOLD):
            sock.sendall(header(note_bytes=1, transfer_id=number, oldest=number) + b"x")
        for _ in range(1, NOTES_TOLD):
            assert status_of(sock) is Status.OK
        assert owner.told(NOTES) == []
        sock.sendall(header(note_bytes=1, transfer_id=NOTES_TOLD, oldest=NOTES_TOLD) + b"y")
        assert status_of(sock) is Status.OK
    eventually(lambda: owner.told(NOTES) == [None], "told once")
    assert notes_of(owner) == [b"x"] * (NOTES_TOLD - 1) + [b"y"]


def test_a_server_may_end_with_notes_that_nobody_took(owner: Rig) -> None:
    with owner.connect() as sock:
        sock.sendall(write_bytes(0, b"x", bytes(1000)))
        assert status_of(sock) is Status.OK


@pytest.mark.parametrize("backend", ["tcp", TLS])
def test_between_engines(backend: str) -> None:
    rng = random.Random()
    with engine_pair(backend) as (a, b):
        size = 9 << 20
        mine, theirs = a.register(allocate(size)), b.register(allocate(size))
        key = offer(b, theirs, a)
        mine.tensor.random_()
        for nbytes in (0, 1, 64 << 10, NBYTES, size, 0, 1, rng.randrange(size)):
            note = rng.randbytes(rng.choice([1, 50, NOTE_BYTES_MAX]))
            transfer = a.write_with_note(b.name, mine, key, 0, 0, nbytes, note)
            assert transfer is not None
            transfer.wait(SOON_S)
            [(name, _, got)] = b.take_notes()
            assert (name, got) == (a.name, note)
            assert (mine.array[:nbytes] == theirs.array[:nbytes]).all()
        assert b.statistics().malformed == 0


def test_where_none_go_with_writes_nothing_is_written() -> None:
    with engine_pair("shared_memory") as (a, b):
        mine, theirs = a.register(allocate(64)), b.register(allocate(64))
        mine.tensor.fill_(1)
        assert a.write_with_note(b.name, mine, offer(b, theirs, a), 0, 0, 64, b"x") is None
        own = a.offer(mine, to=a.name, access=BOTH)
        assert a.write_with_note(a.name, mine, own, 0, 0, 64, b"x") is None
        assert not theirs.array.any()
        assert a.take_notes() == b.take_notes() == []


def test_bounds_rights_and_withdrawn_keys() -> None:
    with engine_pair("tcp") as (a, b):
        mine, theirs = a.register(allocate(64)), b.register(allocate(64))
        reads = offer(b, theirs, a, Access.READ)
        for key, offset in ((reads, 0), (offer(b, theirs, a), 1)):
            with pytest.raises(AccessRefused):
                a.write_with_note(b.name, mine, key, 0, offset, 64, b"x")
        gone = offer(b, theirs, a)
        assert b.withdraw(gone)
        for nbytes in (0, 1):
            transfer = a.write_with_note(b.name, mine, gone, 0, 0, nbytes, b"x")
            assert transfer is not None
            with pytest.raises(RegionUnknown):
                transfer.wait(SOON_S)
        assert b.take_notes() == []


def test_connections_that_break_lose_none_and_double_none() -> None:
    with engine_pair("tcp") as (a, b):
        _write_while_connections_break(a, b)


def _write_while_connections_break(a: TransferEngine, b: TransferEngine) -> None:
    rng, size = random.Random(), 4 << 20
    mine, theirs = a.register(allocate(size)), b.register(allocate(size))
    key = offer(b, theirs, a)
    left = []
    for number in range(60):
        nbytes = rng.choice([0, 1000, 64 << 10, NBYTES, size])
        note = number.to_bytes(4) + rng.randbytes(rng.randrange(200))
        transfer = a.write_with_note(b.name, mine, key, 0, 0, nbytes, note)
        assert transfer is not None
        if number % 3 == 1:
            service = b._links.service
            for connection in service.connections(b._table.get(a.name).served_id):
                service.reset(connection)
        transfer.wait(SOON_S)
        left.append(note)
    assert [note for _, _, note in b.take_notes()] == left
    resends = sum(rail.failures + rail.retries for rail in a.statistics().rails)
    assert resends, "no connection broke while something was under way"


def test_a_handler_takes_many_and_without_one_they_are_dropped() -> None:
    with engine_pair("tcp") as (a, b):
        mine, theirs = a.register(allocate(64)), b.register(allocate(64))
        key = offer(b, theirs, a)

        def leave(count: int) -> None:
            for number in range(count):
                transfer = a.write_with_note(b.name, mine, key, 0, 0, 0, number.to_bytes(4))
                assert transfer is not None
                transfer.wait(SOON_S)

        leave(NOTES_TOLD)
        eventually(lambda: b.take_notes() == [], "dropped")
        taken: list[bytes] = []
        b.on_notes(lambda: taken.extend(note for _, _, note in b.take_notes()))
        leave(NOTES_TOLD + 5)
        eventually(lambda: len(taken) >= NOTES_TOLD, "taken")
        taken += [note for _, _, note in b.take_notes()]
        assert taken == [number.to_bytes(4) for number in range(NOTES_TOLD + 5)]
