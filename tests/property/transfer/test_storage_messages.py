"""Asks and answers about storages: what comes back out, and what hostile bytes do to an owner."""

from __future__ import annotations

import secrets
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs.schema import FileConfig
from tests.support.engines import (
    engine_pair,
    offer,
)
from tests.support.waits import eventually
from transfer import Memory, ProtocolViolation, RegionKey, allocate
from transfer.backends.file import FileSlab
from transfer.storage.bounce import BUFFER_BYTES
from transfer.storage.messages import (
    Answer,
    AnswerKind,
    Ask,
    AskKind,
    encode,
    parse_answer,
    parse_ask,
)
from transfer.wire import ControlKind, encode_control

TOKEN = bytes(range(16))
SLAB_BYTES = 1 << 20


def ask(kind: AskKind, **fields: object) -> Ask:
    given = {"token": TOKEN, "key": b"", "offsets": b"", "lengths": b"", "immediate": 0,
             "timeout_s": 1.0}  # fmt: skip
    return Ask(id=1, kind=kind, **{**given, **fields})


def table(*numbers: int) -> bytes:
    return np.array(numbers, dtype="<i8").tobytes()


@settings(deadline=None)
@given(
    kind=st.sampled_from(AskKind),
    pieces=st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(1, 200)), min_size=1),
    immediate=st.integers(0, 2**32 - 1),
)
def test_an_ask_comes_back(kind: AskKind, pieces: list[tuple[int, int]], immediate: int) -> None:
    offsets, lengths = zip(*pieces, strict=True)
    sent = ask(kind, offsets=table(*offsets), lengths=table(*lengths), immediate=immediate)
    taken = parse_ask(encode(sent))
    assert taken == sent
    found = taken.pieces(BUFFER_BYTES)
    assert [part.tolist() for part in found] == [list(offsets), list(lengths)]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    assert taken.buffer_places(found[1]).tolist() == starts
    elsewhere = ask(kind, offsets=b"", lengths=table(*lengths), places=table(*offsets))
    assert parse_ask(encode(elsewhere)).buffer_places(found[1]).tolist() == list(offsets)


@settings(deadline=None, max_examples=400)
@given(data=st.binary(max_size=300), flips=st.lists(st.integers(0, 10_000), max_size=4))
def test_nonsense_is_refused_and_nothing_else_happens(data: bytes, flips: list[int]) -> None:
    good = bytearray(encode(ask(AskKind.READ, offsets=table(1), lengths=table(2))))
    for flip in flips:
        good[flip % len(good)] ^= 1 << (flip % 8)
    for parse in (parse_ask, parse_answer):
        for content in (data, bytes(good), bytes(good[: len(good) // 2])):
            try:
                message = parse(content)
                if isinstance(message, Ask):
                    offsets, lengths = message.pieces(BUFFER_BYTES)
                    assert 0 < int(lengths.sum()) <= BUFFER_BYTES
                    assert len(offsets) == len(lengths)
                    assert len(message.buffer_places(lengths)) == len(lengths)
                    message.buffer_key("somebody")
            except ProtocolViolation:
                continue


@pytest.mark.parametrize(
    ("offsets", "lengths"),
    [
        (b"", b""),
        (table(1), b""),
        (table(1), table(0)),
        (table(1), table(-1)),
        (table(1, 2), table(1)),
        (table(1)[:7], table(1)[:7]),
        (table(0, 0), table(BUFFER_BYTES, 1)),
        (table(0, 0, 0), table(2**63 - 1, 2**63 - 1, 3)),
    ],
)
def test_pieces_that_make_no_sense(offsets: bytes, lengths: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        ask(AskKind.READ, offsets=offsets, lengths=lengths).pieces(BUFFER_BYTES)


@pytest.mark.parametrize("places", [table(1), table(1, 2, 3), table(1, 2)[:15]])
def test_places_of_other_pieces(places: bytes) -> None:
    sent = ask(AskKind.READ, offsets=table(1, 2), lengths=table(5, 6), places=places)
    with pytest.raises(ProtocolViolation):
        sent.buffer_places(sent.pieces(BUFFER_BYTES)[1])


def test_a_buffer_of_somebody_else_is_refused() -> None:
    for owner, kind in (("other", "host"), ("asker", "file")):
        key = RegionKey(owner, TOKEN, 10, 3, True, kind).encode()
        with pytest.raises(ProtocolViolation):
            ask(AskKind.READ, key=key).buffer_key("asker")
    with pytest.raises(ProtocolViolation):
        ask(AskKind.READ, key=b"nonsense").buffer_key("asker")


@pytest.fixture
def slab(tmp_path: Path) -> FileSlab:
    return FileSlab(tmp_path / "slab", SLAB_BYTES, FileConfig(threads=1))


@settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    offset=st.integers(-10, 8200) | st.integers(-(2**62), 2**62),
    length=st.integers(1, 9000) | st.integers(1, BUFFER_BYTES),
    kind=st.sampled_from([AskKind.READ, AskKind.WRITE]),
)
def test_a_hostile_ask_never_leaves_its_window(
    slab: FileSlab, offset: int, length: int, kind: AskKind
) -> None:
    """What any requester may send, whatever its own engine would have refused."""
    with slab, engine_pair("tcp") as (a, b):
        window = offer(b, b.register(slab), a, offset=4096, nbytes=8192)
        before = torch.zeros(SLAB_BYTES, dtype=torch.uint8)
        slab.read(before, 0, 0, SLAB_BYTES)
        buffer = a.register(torch.randint(1, 256, (BUFFER_BYTES,), dtype=torch.uint8))
        key = offer(a, buffer, b)
        link = a._table.ready(b.name)
        answers: list[Answer] = []
        a._staging._asking.on_answer = lambda peer, content: answers.append(parse_answer(content))
        message = Ask(5, kind, window.token, key.encode(), table(offset), table(length), 0, 5.0)
        link.control.send(encode_control(ControlKind.STORAGE_ASK, encode(message)))
        eventually(lambda: bool(answers), "an answer comes")
        inside = offset >= 0 and offset + length <= 8192
        assert (answers[0].kind is AnswerKind.DONE) == inside
        after = torch.zeros(SLAB_BYTES, dtype=torch.uint8)
        slab.read(after, 0, 0, SLAB_BYTES)
        assert torch.equal(after[:4096], before[:4096])
        assert torch.equal(after[12_288:], before[12_288:])


def test_nonsense_ends_the_connection_and_is_counted(slab: FileSlab) -> None:
    with slab, engine_pair("tcp") as (a, b):
        link = a._table.ready(b.name)
        link.control.send(encode_control(ControlKind.STORAGE_ASK, secrets.token_bytes(50)))
        eventually(lambda: not link.alive, "the connection is closed")
        assert b.statistics().malformed == 1


@pytest.mark.parametrize("shareable", [True, False], ids=["memory", "tensor"])
@pytest.mark.parametrize("kind", [AskKind.READ, AskKind.WRITE])
@given(place=st.integers(-10, 8200) | st.integers(-(2**62), 2**62), length=st.integers(1, 4096))
@settings(
    deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_an_ask_never_leaves_the_buffer_that_it_names(
    slab: FileSlab, kind: AskKind, shareable: bool, place: int, length: int
) -> None:
    with slab, engine_pair("shared_memory") as (a, b):
        window = offer(b, b.register(slab), a)
        memory = allocate(16_384) if shareable else torch.zeros(16_384, dtype=torch.uint8)
        buffer = a.register(memory)
        buffer.tensor[:] = torch.randint(1, 256, (16_384,), dtype=torch.uint8)
        before = buffer.tensor.clone()
        content = torch.randint(0, 256, (length,), dtype=torch.uint8)
        slab.write(content, 0, 0, length)
        key = offer(a, buffer, b, offset=4096, nbytes=8192)
        answers: list[Answer] = []
        a._staging._asking.on_answer = lambda peer, content: answers.append(parse_answer(content))
        fields = {"key": key.encode(), "offsets": table(0), "lengths": table(length)}
        message = ask(kind, **{**fields, "token": window.token, "places": table(place)})
        link = a._table.ready(b.name)
        link.control.send(encode_control(ControlKind.STORAGE_ASK, encode(message)))
        eventually(lambda: bool(answers), "an answer comes")
        inside = place >= 0 and place + length <= 8192
        assert (answers[0].kind is AnswerKind.DONE) == inside
        held = torch.zeros(length, dtype=torch.uint8)
        slab.read(held, 0, 0, length)
        start = 4096 + place
        if inside and kind is AskKind.READ:
            before[start : start + length] = content
        elif inside:
            content = before[start : start + length]
        assert torch.equal(held, content)
        assert torch.equal(buffer.tensor, before)
        if isinstance(memory, Memory):
            memory.close()
