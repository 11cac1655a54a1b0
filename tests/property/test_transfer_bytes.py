"""Parsers take any bytes and either understand or refuse; scattered copies match a naive model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.engines import BACKENDS, engine_pair, offer
from transfer import HandshakeRefused, ProtocolViolation, RegionKey, allocate
from transfer.connections.handshake import AcceptorHandshake, Facts
from transfer.pieces import Pieces, copy_pieces, join_neighbours, make_pieces, out_of_bounds
from transfer.rails.slices import cut
from transfer.wire import (
    REPLY,
    REQUEST,
    ControlKind,
    ControlParser,
    encode_control,
    encode_pieces,
    parse_pieces,
    parse_reply,
    parse_request,
)

SMALL = 4096
FACTS = Facts(address="a:1", host="h", local_socket="l", shared_memory=True, tcp=True)


@given(st.binary(min_size=REQUEST.size, max_size=REQUEST.size))
@settings(deadline=None)
def test_any_request_is_understood_or_refused(data: bytes) -> None:
    for candidate in (data, b"\x54\x4d\x01\x00" + data[4:]):
        try:
            request = parse_request(candidate)
        except ProtocolViolation:
            continue
        assert parse_request(request.encode()) == request


@given(st.binary(min_size=REPLY.size, max_size=REPLY.size))
@settings(deadline=None)
def test_any_reply_is_understood_or_refused(data: bytes) -> None:
    for candidate in (data, b"\x54\x4d\x00\x00" + data[4:]):
        try:
            reply = parse_reply(candidate)
        except ProtocolViolation:
            continue
        assert parse_reply(reply.encode()) == reply


@given(st.integers(0, 50).flatmap(lambda n: st.binary(min_size=16 * n, max_size=16 * n)),
       st.integers(0, 2**64))  # fmt: skip
@settings(deadline=None)
def test_any_table_of_pieces_is_understood_or_refused(data: bytes, nbytes: int) -> None:
    try:
        offsets, lengths = parse_pieces(data, nbytes)
    except ProtocolViolation:
        return
    assert encode_pieces(offsets, lengths) == data
    assert sum(lengths.tolist()) == nbytes


@given(st.binary(max_size=200))
@settings(deadline=None)
def test_any_key_is_understood_or_refused(data: bytes) -> None:
    try:
        key = RegionKey.decode(data)
    except ProtocolViolation:
        return
    assert RegionKey.decode(key.encode()) == key


@given(st.lists(st.binary(max_size=300), max_size=20))
@settings(deadline=None)
def test_any_bytes_in_a_handshake_are_refused(portions: list[bytes]) -> None:
    machine = AcceptorHandshake(
        secret=b"s", name="a", facts=FACTS, admit=lambda *_: None, sessions=lambda _: None
    )
    try:
        for portion in portions:
            data = portion
            while data:
                needed = machine.needed
                machine.feed(data[:needed])
                data = data[needed:]
    except (ProtocolViolation, HandshakeRefused):
        pass
    assert not machine.done


frames = st.lists(st.tuples(st.sampled_from(list(ControlKind)), st.binary(max_size=100)))


@given(frames, st.lists(st.integers(1, 60), min_size=1))
@settings(deadline=None)
def test_control_frames_survive_any_fragmentation(
    sent: list[tuple[ControlKind, bytes]], cuts: list[int]
) -> None:
    stream = b"".join(b"".join(encode_control(kind, content)) for kind, content in sent)
    parser = ControlParser(100)
    got: list[tuple[ControlKind, bytes]] = []
    i = 0
    while stream:
        size = cuts[i % len(cuts)]
        got += parser.feed(stream[:size])
        stream, i = stream[size:], i + 1
    assert got == sent


@given(st.binary(max_size=2000))
@settings(deadline=None)
def test_any_control_bytes_are_understood_or_refused(data: bytes) -> None:
    parser = ControlParser(64)
    try:
        for kind, content in parser.feed(data):
            assert kind in ControlKind
            assert len(content) <= 64
    except ProtocolViolation:
        pass


@st.composite
def scattered(draw: st.DrawFn, *, size: int = SMALL) -> Pieces:
    """Pieces whose targets do not overlap; sources may."""
    count = draw(st.integers(0, 60))
    equal = draw(st.booleans())
    longest = max(1, size // max(count, 1))
    if equal:
        lengths = [draw(st.integers(1, longest))] * count
    else:
        lengths = [draw(st.integers(0, longest)) for _ in range(count)]
    gaps = draw(st.permutations(range(count))) if draw(st.booleans()) else list(range(count))
    targets = [gaps[i] * longest for i in range(count)]
    if draw(st.booleans()):  # packed targets: a message
        targets = [int(x) for x in np.cumsum([0, *lengths])[:-1]]
    sources = [draw(st.integers(0, size - n)) for n in lengths]
    if draw(st.booleans()) and sum(lengths) <= size:
        sources = [int(x) for x in np.cumsum([0, *lengths])[:-1]]
    as_array = lambda values: np.array(values, dtype=np.int64)  # noqa: E731
    return make_pieces(as_array(sources), as_array(targets), as_array(lengths))


def model(target: np.ndarray, source: np.ndarray, pieces: Pieces) -> np.ndarray:
    expected = target.copy()
    for s, t, n in zip(pieces.source_offsets, pieces.target_offsets, pieces.lengths, strict=True):
        expected[t : t + n] = source[s : s + n]
    return expected


def random_bytes(seed: int, size: int = SMALL) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


@given(scattered(), st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_scattered_copies_match_the_model(pieces: Pieces, seed: int) -> None:
    source, target = random_bytes(seed), random_bytes(seed + 1)
    expected = model(target, source, pieces)
    copy_pieces(target, source, pieces)
    assert np.array_equal(target, expected)


@given(scattered(), st.integers(0, 2**32), st.integers(1, 700), st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_slices_are_the_same_pieces(
    pieces: Pieces, seed: int, slice_bytes: int, slice_pieces: int
) -> None:
    source, target = random_bytes(seed), random_bytes(seed + 1)
    expected = model(target, source, pieces)
    slices = cut(pieces, slice_bytes=slice_bytes, slice_pieces=slice_pieces)
    for part in slices:
        assert 0 < part.nbytes <= slice_bytes
        assert 0 < len(part) <= slice_pieces
        target = model(target, source, part)
    assert np.array_equal(target, expected)
    assert sum(part.nbytes for part in slices) == pieces.nbytes


@given(scattered())
@settings(deadline=None)
def test_joined_pieces_are_the_same_bytes(pieces: Pieces) -> None:
    joined = join_neighbours(pieces)
    source, target = random_bytes(1), random_bytes(2)
    assert np.array_equal(model(target, source, joined), model(target, source, pieces))
    assert len(joined) <= len(pieces)
    assert len(join_neighbours(joined)) == len(joined)


int64 = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(st.tuples(int64, st.integers(0, 2**63 - 1)), max_size=6), st.integers(0, 2**40))
@settings(deadline=None)
def test_bounds_are_exact_and_do_not_overflow(pairs: list[tuple[int, int]], nbytes: int) -> None:
    offsets = np.array([o for o, _ in pairs], dtype=np.int64)
    lengths = np.array([n for _, n in pairs], dtype=np.int64)
    inside = all(o >= 0 and o + n <= nbytes for o, n in pairs)
    assert (out_of_bounds(offsets, lengths, nbytes) is None) == inside


@pytest.mark.parametrize("backend", BACKENDS)
def test_scattered_writes_and_reads_match_the_model(backend: str) -> None:
    with engine_pair(backend) as (a, b):
        mine, theirs = a.register(allocate(SMALL)), b.register(allocate(SMALL))
        plain = b.register(torch.zeros(SMALL, dtype=torch.uint8))
        keys = [(offer(b, region, a), region) for region in (theirs, plain)]
        count = 0

        @given(scattered(), st.integers(0, 2**32), st.sampled_from([0, 1]))
        @settings(max_examples=40, deadline=None)
        def check(pieces: Pieces, seed: int, which: int) -> None:
            nonlocal count
            count += 1
            key, region = keys[which]
            columns = (pieces.source_offsets, pieces.target_offsets, pieces.lengths)
            mine.array[:], region.array[:] = random_bytes(seed), random_bytes(seed + 1)
            expected = model(region.array, mine.array, pieces)
            a.write(b.name, mine, key, *columns, immediate=count).wait(60.0)
            b.expect({(a.name, count): 1}, timeout_s=60.0)
            assert np.array_equal(region.array, expected)
            expected = model(mine.array, region.array, pieces)
            a.read(b.name, mine, key, pieces.target_offsets, pieces.source_offsets,
                   pieces.lengths).wait(60.0)  # fmt: skip
            assert np.array_equal(mine.array, expected)

        check()
