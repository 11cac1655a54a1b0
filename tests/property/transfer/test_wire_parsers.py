"""Every parser of the wire: what was encoded comes back, everything else is one kind of error."""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer.connections.handshake import Facts, parse_message
from transfer.control import _parse_failure
from transfer.errors import ControlError, ProtocolViolation
from transfer.memory.region import TOKEN_BYTES, RegionKey
from transfer.wire import (
    NOTE_BYTES_MAX,
    PAYLOAD_BYTES_MAX,
    REPLY,
    REQUEST,
    SLICE_PIECES,
    SLICES_MAX,
    ControlKind,
    ControlParser,
    Reply,
    Request,
    RequestKind,
    Status,
    encode_control,
    encode_pieces,
    parse_pieces,
    parse_reply,
    parse_request,
)

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
FRAME_MAX = 1000


@st.composite
def requests(draw: Any) -> Request:
    num_slices = draw(st.integers(1, SLICES_MAX))
    num_pieces = draw(st.integers(0, SLICE_PIECES))
    transfer_id = draw(U64)
    kind = draw(st.sampled_from(RequestKind))
    noted = kind is RequestKind.WRITE and draw(st.booleans())
    return Request(
        kind=kind,
        transfer_id=transfer_id,
        oldest=draw(st.integers(0, transfer_id)),
        slice_idx=draw(st.integers(0, num_slices - 1)),
        num_slices=num_slices,
        num_pieces=num_pieces,
        nbytes=draw(st.integers(1, PAYLOAD_BYTES_MAX)) if num_pieces else 0,
        immediate=None if noted else draw(st.none() | U32),
        token=draw(st.binary(min_size=TOKEN_BYTES, max_size=TOKEN_BYTES)),
        note_bytes=draw(st.integers(1, NOTE_BYTES_MAX)) if noted else 0,
    )


@given(requests())
def test_requests_come_back(request: Request) -> None:
    assert parse_request(request.encode()) == request


@given(
    st.sampled_from(Status), U64, U32, st.integers(0, PAYLOAD_BYTES_MAX)
)  # fmt: skip
def test_replies_come_back(status: Status, transfer_id: int, slice_idx: int, nbytes: int) -> None:
    reply = Reply(status=status, transfer_id=transfer_id, slice_idx=slice_idx, nbytes=nbytes)
    assert parse_reply(reply.encode()) == reply


@given(st.binary(min_size=REQUEST.size, max_size=REQUEST.size), requests(), st.data())
def test_no_other_bytes_make_a_request(noise: bytes, request: Request, data: Any) -> None:
    """Noise, and a true header with a few bytes changed: an error, or a header within bounds."""
    changed = bytearray(request.encode())
    for at in data.draw(st.lists(st.integers(0, REQUEST.size - 1), max_size=4)):
        changed[at] = noise[at]
    for header in (noise, bytes(changed)):
        with contextlib.suppress(ProtocolViolation):
            parsed = parse_request(header)
            assert parsed.slice_idx < parsed.num_slices <= SLICES_MAX
            assert parsed.nbytes <= PAYLOAD_BYTES_MAX
            assert parsed.num_pieces <= SLICE_PIECES
            assert (parsed.num_pieces == 0) == (parsed.nbytes == 0)
            assert parsed.oldest <= parsed.transfer_id
            assert 0 <= parsed.note_bytes <= NOTE_BYTES_MAX
            assert not parsed.note_bytes or parsed.kind is RequestKind.WRITE
            assert not parsed.note_bytes or parsed.immediate is None


@given(st.binary(min_size=REPLY.size, max_size=REPLY.size))
def test_no_other_bytes_make_a_reply(noise: bytes) -> None:
    for header in (noise, struct.pack("<H", 0x4D54) + noise[2:]):
        with contextlib.suppress(ProtocolViolation):
            parsed = parse_reply(header)
            assert parsed.nbytes <= PAYLOAD_BYTES_MAX
            assert parsed.encode() == header


@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(1, 1024)), max_size=64))
def test_tables_of_pieces_come_back(pieces: list[tuple[int, int]]) -> None:
    offsets = np.array([offset for offset, _ in pieces], dtype=np.int64)
    lengths = np.array([length for _, length in pieces], dtype=np.int64)
    got = parse_pieces(encode_pieces(offsets, lengths), int(lengths.sum()))
    assert np.array_equal(got[0], offsets)
    assert np.array_equal(got[1], lengths)
    with pytest.raises(ProtocolViolation):
        parse_pieces(encode_pieces(offsets, lengths), int(lengths.sum()) + 1)


WORDS = st.sampled_from(
    [0, 1, -1, 2**62, 2**63 - 1, -(2**63), PAYLOAD_BYTES_MAX, PAYLOAD_BYTES_MAX + 1]
)


@given(st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=SLICE_PIECES), U64)
def test_lengths_that_overflow_are_no_table(words: list[tuple[int, int]], nbytes: int) -> None:
    table = encode_pieces(
        *(np.array(column, dtype=np.int64) for column in zip(*words, strict=True))
    )
    lengths = [length for _, length in words]
    fits = all(0 < n <= PAYLOAD_BYTES_MAX for n in lengths)
    with contextlib.suppress(ProtocolViolation):
        parse_pieces(table, sum(lengths) % 2**64)
        assert fits
    with contextlib.suppress(ProtocolViolation):
        parse_pieces(table, nbytes)
        assert fits
        assert sum(lengths) == nbytes


FRAMES = st.lists(st.tuples(st.sampled_from(ControlKind), st.binary(max_size=FRAME_MAX)))


@given(FRAMES, st.data())
def test_control_frames_come_back_however_they_are_cut(frames: Any, data: Any) -> None:
    stream = b"".join(b"".join(encode_control(kind, content)) for kind, content in frames)
    parser = ControlParser(FRAME_MAX)
    got = []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        got += parser.feed(stream[:size])
        stream = stream[size:]
    assert got == frames


@given(st.lists(st.binary(max_size=64), max_size=8))
def test_other_control_bytes_end_it_and_are_bounded(portions: list[bytes]) -> None:
    parser = ControlParser(FRAME_MAX)
    with contextlib.suppress(ProtocolViolation):
        for portion in portions:
            for kind, content in parser.feed(portion):
                assert kind in ControlKind
                assert len(content) <= FRAME_MAX
            assert len(parser._buffer) <= FRAME_MAX + 5


KEYS = st.builds(
    RegionKey,
    owner=st.text(max_size=64),
    token=st.binary(min_size=TOKEN_BYTES, max_size=TOKEN_BYTES),
    nbytes=st.integers(0, 2**63 - 1),
    rights=st.integers(1, 3),
    shareable=st.booleans(),
)


@given(KEYS)
def test_keys_come_back(key: RegionKey) -> None:
    assert RegionKey.decode(key.encode()) == key


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text()
    | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)  # fmt: skip
NEST = b"\x91" * 100_000


@given(ANYTHING | st.lists(ANYTHING, min_size=3, max_size=7), st.binary(max_size=80))
def test_other_values_are_no_key_no_message_no_failure(value: Any, noise: bytes) -> None:
    """Whatever else msgpack can say, and what it cannot: the parsers' own errors, nothing else."""
    for data in (msgspec.msgpack.encode(value), noise, msgspec.msgpack.encode(value) + noise):
        with contextlib.suppress(ProtocolViolation):
            key = RegionKey.decode(data)
            assert len(key.token) == TOKEN_BYTES
            assert 0 <= key.nbytes < 2**63
            assert key.rights in (1, 2, 3)
        with contextlib.suppress(ProtocolViolation):
            parse_message(data)
        with contextlib.suppress(ControlError):
            _parse_failure(data)


@given(KEYS, st.data())
def test_a_key_with_changed_bytes_is_a_key_or_an_error(key: RegionKey, data: Any) -> None:
    changed = bytearray(key.encode())
    at = data.draw(st.integers(0, len(changed) - 1))
    changed[at] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ProtocolViolation):
        assert isinstance(RegionKey.decode(bytes(changed)), RegionKey)


@settings(max_examples=20)
@given(KEYS, st.integers(1, 100_000))
def test_deep_nesting_is_refused_like_anything_else(key: RegionKey, depth: int) -> None:
    """A decoder that skips what it does not know recurses, and its error is another one."""
    longer = bytes([key.encode()[0] + 1]) + key.encode()[1:] + NEST[:depth] + b"\xc0"
    for parse in (RegionKey.decode, parse_message, _parse_failure):
        for data in (longer, NEST[:depth], b"\x93\xa5Hello" + NEST[:depth]):
            with pytest.raises((ProtocolViolation, ControlError)):
                parse(data)
    assert Facts.__struct_config__.forbid_unknown_fields
