"""The owner's server under streams that no correct peer sends: compiled and Python alike.

Each stream is a run of requests, some true, some altered, some noise, sent in random portions.
Around the offered window lie guards that must never change; both servers must answer with the
same bytes and leave the same memory, which makes each the reference of the other.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from transfer import native
from transfer.backends.served import MAP
from transfer.backends.server import PythonServer
from transfer.wire import (
    NOTE_BYTES_MAX,
    PAYLOAD_BYTES_MAX,
    SLICE_PIECES,
    SLICES_MAX,
    Request,
    RequestKind,
    Status,
    encode_pieces,
)

WINDOW, GUARD = 4096, 4096
LIMITS = (PAYLOAD_BYTES_MAX, SLICE_PIECES, SLICES_MAX)
NAME = "peer"
TOKENS = {right: bytes([right]) * 16 for right in (1, 2, 3)}
FOREIGN, UNKNOWN = b"f" * 16, b"u" * 16


def random_request(generator: random.Random, transfer_id: int) -> bytes:
    num_pieces = generator.choice([0, 1, 1, 2, 5, 40])
    lengths = np.array(
        [generator.choice([1, 8, 100, 2000]) for _ in range(num_pieces)], dtype="<i8"
    )
    offsets = np.array([generator.randrange(WINDOW) for _ in range(num_pieces)], dtype="<i8")
    if generator.random() < 0.7 and num_pieces:  # mostly inside
        offsets = np.minimum(offsets, WINDOW - lengths)
    elif num_pieces:
        offsets[generator.randrange(num_pieces)] = generator.choice(
            [-1, WINDOW, 2**63 - 1, -(2**63), WINDOW - 1, 1 << 40]
        )
    kind = generator.choice([RequestKind.WRITE, RequestKind.WRITE, RequestKind.READ])
    num_slices = generator.choice([1, 1, 2, 3, SLICES_MAX])
    nbytes = int(lengths.sum()) if num_pieces else 0
    writes = kind is RequestKind.WRITE
    note = generator.randbytes(generator.choice([0, 0, 1, 50, 9000]) if writes else 0)
    request = Request(
        kind=kind,
        transfer_id=transfer_id,
        oldest=generator.randrange(transfer_id + 1),
        slice_idx=generator.randrange(num_slices),
        num_slices=num_slices,
        num_pieces=num_pieces,
        nbytes=nbytes,
        immediate=None if note else generator.choice([None, generator.randrange(2**32)]),
        token=generator.choice([*TOKENS.values(), TOKENS[3], TOKENS[3], FOREIGN, UNKNOWN]),
        note_bytes=len(note),
    )
    payload = generator.randbytes(nbytes) if writes else b""
    return request.encode() + encode_pieces(offsets, lengths) + payload + note


def _with_a_byte_changed(head: bytearray, generator: random.Random) -> bytearray:
    if head:
        head[generator.randrange(len(head))] = generator.randrange(256)
    return head


def random_stream(generator: random.Random, num_changes: int) -> bytes:
    parts = [random_request(generator, i) for i in range(1, generator.randrange(2, 12))]
    for _ in range(num_changes):
        at = generator.randrange(len(parts))
        changed = bytearray(parts[at])
        what = generator.randrange(4)
        if what == 0:
            changed[:70] = _with_a_byte_changed(changed[:70], generator)
        elif what == 1:
            del changed[generator.randrange(len(changed) + 1) :]
        elif what == 2:
            changed = bytearray(generator.randbytes(generator.randrange(1, 300)))
        else:
            parts.insert(at, bytes(changed))  # a slice that comes twice
        parts[at] = bytes(changed)
    return b"".join(parts)


class Owner:
    """A server with offered windows between guards, and one connection to it."""

    def __init__(self, kind: Callable[..., Any]) -> None:
        self.server = kind(*LIMITS)
        self.memory = np.full(GUARD + WINDOW + GUARD, 7, dtype=np.uint8)
        self.foreign = np.full(WINDOW, 8, dtype=np.uint8)
        start = self.memory.ctypes.data + GUARD
        for right, token in TOKENS.items():
            self.server.add_offer(token, NAME, start, WINDOW, right)
        self.server.add_offer(FOREIGN, "other", self.foreign.ctypes.data, WINDOW, 3)
        self.peer = self.server.open_peer(NAME)

    def send(self, stream: bytes, portions: list[int]) -> bytes:
        """Return what was answered."""
        ours, theirs = socket.socketpair()
        with ours:
            ours.setblocking(False)
            self.server.attach(self.peer, theirs.detach())
            answered = self._converse(ours, stream, portions)
        self.server.run(0.0)
        return answered

    def _converse(self, ours: socket.socket, stream: bytes, portions: list[int]) -> bytes:
        answered, sent, turn = b"", 0, 0
        if not stream:  # all that was left of it is its end
            ours.shutdown(socket.SHUT_WR)
        for _ in range(100_000):
            if sent < len(stream):
                size = portions[turn % len(portions)]
                turn += 1
                try:
                    sent += ours.send(stream[sent : sent + size])
                except BlockingIOError:
                    pass
                except OSError:
                    return answered
                if sent == len(stream):
                    ours.shutdown(socket.SHUT_WR)
            self.server.run(0.0)
            for kind, _, connection, _ in self.server.take_events():
                if kind == MAP:  # Python is asked, and refuses
                    self.server.answer(connection, Status.NO_RIGHT, b"", -1)
            try:
                answer = ours.recv(1 << 20)
            except BlockingIOError:
                continue
            except OSError:
                return answered
            if not answer:
                return answered
            answered += answer
        raise AssertionError("the server neither answers nor hangs up")

    def check_guards(self) -> None:
        assert (self.memory[:GUARD] == 7).all()
        assert (self.memory[-GUARD:] == 7).all()
        assert (self.foreign == 8).all()


KINDS = [pytest.param(PythonServer, id="python")]
if native.compiled is not None:
    KINDS.append(pytest.param(native.compiled.Server, id="compiled"))


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_streams_stay_inside_the_window(kind: Any) -> None:
    seed = random.randrange(2**32)
    generator = random.Random(seed)
    owner = Owner(kind)
    malformed = notes = 0
    for turn in range(400):
        stream = random_stream(generator, generator.choice([0, 0, 1, 2]))
        portions = [generator.randrange(1, 4000) for _ in range(8)]
        try:
            owner.send(stream, portions)
            owner.check_guards()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, stream {turn}") from error
        malformed += owner.server.take_counters()[2]
        for name, _, note in owner.server.take_notes():
            assert name == NAME
            assert 1 <= len(note) <= NOTE_BYTES_MAX
            notes += 1
        if turn % 20 == 0:  # a new life: slices are known per life
            owner.server.close_peer(owner.peer)
            owner.peer = owner.server.open_peer(NAME)
    assert malformed > 5, f"nonsense was sent, seed {seed}"
    assert notes > 5, f"notes were left, seed {seed}"
    owner.server.close()


@pytest.mark.skipif(len(KINDS) < 2, reason="the compiled server is not built")
def test_both_servers_answer_alike() -> None:
    seed = random.randrange(2**32)
    generator = random.Random(seed)
    for turn in range(150):
        num_changes = generator.choice([0, 0, 1])
        stream = random_stream(generator, num_changes)
        portions = [generator.randrange(1, 4000) for _ in range(8)]
        owners = [Owner(kind.values[0]) for kind in KINDS]
        got = [owner.send(stream, portions) for owner in owners]
        context = f"seed {seed}, stream {turn}"
        # How much has landed of a write that was cut off is nobody's promise.
        if not num_changes:
            assert got[0] == got[1], context
            assert np.array_equal(owners[0].memory, owners[1].memory), context
            left = [[note for _, _, note in owner.server.take_notes()] for owner in owners]
            assert left[0] == left[1], context
        # Who hangs up on nonsense may lose answers that were on their way: one starts the other.
        shorter, longer = sorted(got, key=len)
        assert longer.startswith(shorter), context
        for owner in owners:
            owner.check_guards()
            owner.server.close()
