"""Puts of one compiled call and one request: bytes, notes and requests are those of the others."""

from __future__ import annotations

import random
import secrets
import time

import numpy as np
import pytest
import xxhash

from kvstore import (
    Fenced,
    MasterUnavailable,
    Pin,
    PutOptions,
    PutOutcome,
    RegionPiece,
    copying,
    mailbox,
)
from kvstore.client import reserved_places
from kvstore.values import place_supply
from kvstore.values.plain_puts import _ends
from kvstore.wire import messages as m
from kvstore.wire.left_notes import write_row
from tests.support.short_puts import SIZE, STORED, Requests, check_empty, value, warm
from tests.support.store_pool import Pool
from tests.support.waits import eventually
from transfer import allocate

EXISTS, CONFLICT = PutOutcome.EXISTS, PutOutcome.CONFLICT
compiled = pytest.mark.skipif(not copying.COMPILED, reason="the call is compiled")


@pytest.fixture
def patient(monkeypatch):
    """Places are not given back while a test looks."""
    monkeypatch.setattr(reserved_places, "IDLE_S", 60.0)
    monkeypatch.setattr(place_supply, "AHEAD_MAX", 6)


class Encoded(Requests):
    """Which of the requests were encoded with the copy."""

    def __init__(self, store, monkeypatch):
        super().__init__(store, monkeypatch)
        self.encoded = []

    def _listen_to_bytes(self, payload, **options):
        self.encoded.append(m.decode_request(payload))
        return super()._listen_to_bytes(payload, **options)


def number(rng):
    """Of any width, the borders of MessagePack among them."""
    edges = [0, 127, 128, 255, 256, 65535, 65536, (1 << 32) - 1, 1 << 32]
    return rng.choice([*edges, rng.getrandbits(rng.randrange(1, 63))])


def new_box():
    memory = np.zeros(mailbox.MAILBOX_BYTES + 64, dtype=np.uint8)
    start = -memory.ctypes.data % 64
    return memory, memory.ctypes.data + start, mailbox.MAILBOX_BYTES


@compiled
def test_the_request_and_the_note_are_those_of_the_other_ways():
    seed = time.time_ns()
    rng = random.Random(seed)
    memory, box, box_bytes = new_box()
    tail = 0
    for _ in range(300):
        client = secrets.token_hex(rng.randrange(1, 40))
        head, end = _ends(client)
        nbytes = rng.choice([241, 255, 256, 65535, 65536, rng.randrange(241, 100_000)])
        source = np.frombuffer(rng.randbytes(nbytes + 9), dtype=np.uint8)
        target = np.zeros(nbytes + 300, dtype=np.uint8)
        first, start, segment = rng.randrange(9), rng.randrange(300), rng.getrandbits(31)
        key, batch, following = rng.randbytes(16), number(rng), number(rng)
        payload = copying.compiled.put_block(
            target, start, source, first, nbytes, rng.choice([0, 1 << 40]), box, box_bytes,
            segment, key, batch, following, head, end, None, 0,
        )  # fmt: skip
        wanted = source[first : first + nbytes].tobytes()
        checksum = xxhash.xxh3_64_intdigest(wanted)
        assert target.tobytes() == bytes(start) + wanted + bytes(300 - start), seed
        assert payload == m.encode(m.Store(client, batch, key, nbytes, checksum, following)), seed
        tail, notes = copying.compiled.mailbox_take(box, box_bytes, tail, (1 << 64) - 1)
        row = (start, nbytes, key, checksum, False, 0, "", "", 0)
        assert [note for _, note in notes] == [write_row(segment, row)], seed
    del memory


@compiled
def test_what_cannot_be_noted_is_copied_all_the_same():
    memory, box, box_bytes = new_box()
    copying.compiled.mailbox_close(box, box_bytes)
    source, target = np.frombuffer(secrets.token_bytes(SIZE), np.uint8), np.zeros(SIZE, np.uint8)
    found = copying.compiled.put_block(
        target, 0, source, 0, SIZE, 1 << 40, box, box_bytes, 1, bytes(16), 1, 2, b"", b"", None, 0,
    )  # fmt: skip
    assert found == xxhash.xxh3_64_intdigest(source.tobytes())
    assert target.tobytes() == source.tobytes()
    del memory


@compiled
@pytest.mark.parametrize(
    ("position", "wrong"),
    [(9, bytes(15)), (9, None), (8, -1), (8, 1 << 32), (10, -1), (10, 1 << 64), (11, -1), (1, -1),
     (1, 1), (3, 1), (4, 240), (4, SIZE + 1), (6, 8), (7, 64), (12, ""), (13, None),
     (14, 0), (14, b"box")],
)  # fmt: skip
def test_arguments_that_would_write_elsewhere_are_refused(position, wrong):
    memory, box, box_bytes = new_box()
    source, target = np.zeros(SIZE, np.uint8), np.zeros(SIZE, np.uint8)
    arguments = [
        target, 0, source, 0, SIZE, 1 << 40, box, box_bytes, 1, bytes(16), 1, 2, b"", b"", None, 0,
    ]  # fmt: skip
    arguments[position] = wrong
    with pytest.raises((TypeError, ValueError, OverflowError)):
        copying.compiled.put_block(*arguments)
    assert copying.compiled.mailbox_take(box, box_bytes, 0, (1 << 64) - 1) == (0, [])
    del memory


@pytest.mark.parametrize("posts", [True, False], ids=["posted", "asked"])
def test_a_stream_of_values_of_all_kinds(stack, monkeypatch, patient, posts):
    pool = Pool(stack, posts=posts, segment_bytes=64 << 20)
    store, rng = pool.store, random.Random(time.time_ns())
    requests = Encoded(store, monkeypatch)
    region = store.register(allocate(1 << 20))
    region.array[:] = np.frombuffer(secrets.token_bytes(1 << 20), dtype=np.uint8)
    stored = {}
    for nbytes in (64, 241, 4096, 65536, 300_001):
        for _ in range(40):
            key = secrets.token_bytes(16)
            if rng.random() < 0.5:
                first = rng.randrange((1 << 20) - nbytes)
                put = RegionPiece(region, first, nbytes)
                stored[key] = region.array[first : first + nbytes].tobytes()
            else:
                put = stored[key] = value(nbytes)
            options = PutOptions(pin=Pin.HARD) if rng.random() < 0.1 else PutOptions()
            plain = {"options": options} if rng.random() < 0.2 else {}
            assert store.put(key, put, **plain) is STORED
    for key, wanted in stored.items():
        assert store.get(key) == wanted
    assert store.client.statistics().stored_blocks == len(stored)
    if copying.COMPILED and not posts:
        assert requests.encoded, "some places leave others behind"
        assert {len(one.more) + len(one.soon) for one in requests.encoded} == {0}
    elif copying.COMPILED:
        names = requests.take()
        assert names.count("Store") + names.count("Allocate") < len(stored), "some were posted"
    known = {key for segment in pool.nodes[0]._segments for key in segment.held().keys}
    assert known >= set(stored), "the node was told of each"
    store.remove_batch(list(stored))
    store.close()
    check_empty(pool)


@pytest.mark.parametrize("posts", [True, False], ids=["posted", "asked"])
def test_names_that_are_taken_in_the_middle_of_a_stream(stack, monkeypatch, patient, posts):
    pool = Pool(stack, posts=posts)
    store = pool.store
    requests = Encoded(store, monkeypatch)
    seen = set()
    for _ in range(12):
        name, first = secrets.token_hex(8), value()
        warm(store)
        assert store.put(name, first) is STORED
        assert store.put(name, first) is EXISTS
        warm(store)
        seen.update(one.key for one in requests.encoded)
        assert store.put(name, value()) is CONFLICT
        assert store.get(name) == first
    pool.master.check_invariants()
    assert not copying.COMPILED or posts or seen, "some went the plain way"
    store.close()
    check_no_place_is_open(pool)


def check_no_place_is_open(pool):
    def settled():
        pool.master.check_invariants()
        return pool.master.statistics().open_bytes == 0

    eventually(settled, "no place is open")


def come_before_a_plain_put(store, requests):
    """Put until places have just come, and the first of them is used."""
    was_plain = True
    for _ in range(200):
        before = len(requests.encoded)
        assert store.put(secrets.token_bytes(16), value()) is STORED
        is_plain = len(requests.encoded) > before
        if is_plain and not was_plain:
            return
        was_plain = is_plain
    pytest.fail("no put is plain")


@compiled
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_request_or_a_reply_that_is_lost(stack, monkeypatch, patient, when):
    pool = Pool(stack, posts=False)
    store, keys, failed = pool.store, [], []
    requests = Encoded(store, monkeypatch)

    def lose(request):
        if isinstance(request, m.Store) and request.key == keys[-1] and not failed:
            failed.append(request)
            raise MasterUnavailable(operation="Store", address="", problem="a test")

    for _ in range(20):  # a place may have become too old
        come_before_a_plain_put(store, requests)
        failed.clear()
        keys.append(secrets.token_bytes(16))
        setattr(requests, when, lose)
        content = value()
        with pytest.raises(MasterUnavailable):
            store.put(keys[-1], content)
        assert failed, "the fault has happened"
        setattr(requests, when, None)
        assert store.put(keys[-1], content) is (STORED if when == "before" else EXISTS)
        assert store.get(keys[-1]) == content
        if failed[0] in requests.encoded:
            break
    else:
        pytest.fail("none of them was plain")
    store.close()
    check_no_place_is_open(pool)


@compiled
def test_a_note_that_finds_no_room_is_sent(stack, monkeypatch, patient):
    pool = Pool(stack, posts=False)
    store = pool.store
    requests = Encoded(store, monkeypatch)
    come_before_a_plain_put(store, requests)
    (box,) = store.quick_writes._segments._outboxes.values()
    copying.compiled.mailbox_close(box.address, box.nbytes)
    requests.encoded.clear()
    stored = {secrets.token_bytes(16): value() for _ in range(8)}
    for key, content in stored.items():
        assert store.put(key, content) is STORED
    assert not requests.encoded, "the note could not be left"
    assert {key: store.get(key) for key in stored} == stored


@compiled
def test_who_is_fenced_hears_of_it(stack, monkeypatch, patient):
    pool = Pool(stack, posts=False)
    store = pool.store
    requests = Encoded(store, monkeypatch)
    come_before_a_plain_put(store, requests)
    pool.master.fence([store.client.core.record.name])
    with pytest.raises(Fenced):
        store.put(secrets.token_bytes(16), value())
