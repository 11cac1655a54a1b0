"""Notes that clients leave in a node's memory: all of them, in their order, and only those."""

from __future__ import annotations

import random
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest

from configs.schema import TransferBackend, TransferConfig
from kvstore import copying, mailbox
from kvstore.client import reserved_places
from kvstore.master import opening
from kvstore.node import mailboxes
from kvstore.node.indexed_block import blocks_of
from kvstore.node.mailboxes import RECENT_BLOCKS_MAX, Mailboxes
from kvstore.wire.left_notes import NoteMalformed, columns_of_rows, read_note, write_note
from kvstore.wire.messages import HeldBlocks, NodeAddress
from kvstore.wire.peer_messages import Unwritten, Written
from tests.support.store_pool import Pool
from tests.support.told_notes import (
    SIZE,
    STORED,
    fill,
    fill_in_both_ways,
    restart,
    sent_notes,
)
from tests.support.waits import eventually
from transfer import allocate

FOREVER = (1 << 63) - 1

pytestmark = pytest.mark.skipif(not mailbox.is_available(), reason="needs the compiled part")


class Box:
    """Memory of a mailbox, and both ends of it."""

    def __init__(self, stack, nbytes):
        memory = allocate(nbytes, huge_pages=False)
        stack.callback(memory.close)
        self.array = memory.tensor.numpy()
        self.place = self.array.ctypes.data, nbytes
        self.tail = 0

    def leave(self, note):
        return copying.compiled.mailbox_leave(*self.place, note)

    def take(self, until_ns=FOREVER):
        self.tail, notes = copying.compiled.mailbox_take(*self.place, self.tail, until_ns)
        return notes


def test_what_is_left_is_taken_once_and_in_order(stack):
    rng = random.Random()
    box = Box(stack, 4096)
    waiting, refused, taken = [], 0, 0
    for _ in range(5000):  # around the ring's end again and again
        note = secrets.token_bytes(rng.randrange(700))
        used = sum(16 + -(-len(each) // 8) * 8 for each in waiting)
        fits = used + 16 + -(-len(note) // 8) * 8 <= 4096 - 192
        assert box.leave(note) is fits
        if fits:
            waiting.append(note)
        else:
            refused += 1
        if rng.random() < 0.2:
            notes = box.take()
            assert [payload for _, payload in notes] == waiting
            stamps = [stamp for stamp, _ in notes]
            assert stamps == sorted(stamps)
            taken, waiting = taken + len(waiting), []
    assert refused
    assert taken > 1000


def test_only_what_was_left_before_a_time_is_taken(stack):
    box = Box(stack, 4096)
    assert box.leave(b"early")
    between = time.monotonic_ns()
    assert box.leave(b"late")
    assert [payload for _, payload in box.take(between)] == [b"early"]
    assert box.take(between) == []
    ((stamp, payload),) = box.take()
    assert payload == b"late"
    assert between < stamp <= time.monotonic_ns()


def test_a_closed_mailbox_takes_nothing_and_loses_nothing(stack):
    box = Box(stack, 4096)
    assert box.leave(b"before")
    copying.compiled.mailbox_close(*box.place)
    assert box.leave(b"after") is False
    assert next(payload for _, payload in box.take()) == b"before"


def test_half_a_note_is_none(stack):
    box = Box(stack, 4096)
    assert box.leave(b"whole")
    head = box.array[:8].copy()
    assert box.leave(b"half")
    box.array[:8] = head  # as if its writer had been killed before it told
    assert [payload for _, payload in box.take()] == [b"whole"]
    assert box.leave(b"next")
    assert [payload for _, payload in box.take()] == [b"next"]


def scribble(box, at, number, nbytes):
    box.array[at : at + nbytes] = np.frombuffer(number.to_bytes(nbytes, "little"), dtype=np.uint8)


HEADS = [(0, number, 8) for number in (7, 8, 4000, 1 << 40, (1 << 64) - 8)]
LENGTHS = [(192, number, 4) for number in (9, 4000, (1 << 32) - 1)]


@pytest.mark.parametrize(("at", "number", "nbytes"), HEADS + LENGTHS)
def test_nonsense_is_refused_and_reaches_nothing(stack, at, number, nbytes):
    box = Box(stack, 4096)
    assert box.leave(b"a note")
    scribble(box, at, number, nbytes)
    with pytest.raises(ValueError, match="not left there by a client"):
        box.take()
    assert box.tail == 0


@pytest.mark.parametrize("number", [1, 4096, 1 << 40, (1 << 64) - 8])
def test_what_the_client_says_was_taken_is_not_believed(stack, number):
    box = Box(stack, 4096)
    assert box.leave(b"a note")
    scribble(box, 64, number, 8)
    box.leave(b"another")  # or not, if there seems to be no room
    assert box.take()[0][1] == b"a note"


def test_bad_places_are_refused(stack):
    box = Box(stack, 4096)
    address, _ = box.place
    for place in ((address + 8, 4096), (address, 100), (address, 4090)):
        with pytest.raises(ValueError, match="no place for a mailbox"):
            copying.compiled.mailbox_leave(*place, b"x")
    with pytest.raises(TypeError):
        copying.compiled.mailbox_leave(*box.place, "text")


def test_notes_are_read_as_they_were_written():
    rng = random.Random()
    for _ in range(300):
        count = rng.choice([1, 1, 1, 3])
        held = HeldBlocks(
            keys=[secrets.token_bytes(16) for _ in range(count)],
            offsets=[rng.randrange(1 << 63) for _ in range(count)],
            lengths=[rng.randrange(1, 1 << 63) for _ in range(count)],
            checksums=[rng.randrange(1 << 64) for _ in range(count)],
            pinned=[rng.random() < 0.5] * count if rng.random() < 0.5 else [],
            chunk_bytes=[rng.choice([0, 4096])] * count if rng.random() < 0.3 else [],
            tenants=[rng.choice(["", "übel"])] * count if rng.random() < 0.3 else [],
            groups=[rng.choice(["", "g" * 64])] * count if rng.random() < 0.3 else [],
        )
        segment = rng.randrange(1 << 32)
        read = read_note(write_note(Written(held, segment)))
        if isinstance(read, tuple):
            (number, row), expected = read, next(blocks_of(held))
            found = next(blocks_of(columns_of_rows([row])))
            assert number == segment
            assert asdict(found) == asdict(expected)
            assert count == 1
        else:
            assert read == Written(held, segment)
            assert count > 1 or held.chunk_bytes == [4096]
    unwritten = Unwritten(secrets.token_bytes(16), 7, 3)
    assert read_note(write_note(unwritten)) == unwritten


@pytest.mark.parametrize("payload", [b"", b"\0", b"\0nonsense", b"\1short", b"\2" + bytes(60)])
def test_what_is_no_note_is_said_to_be_none(payload):
    with pytest.raises(NoteMalformed):
        read_note(payload)
    whole = write_note(written(bytes(16), 0, 0))
    with pytest.raises(NoteMalformed):
        read_note(whole + b"\xff")  # a group that is no text
    with pytest.raises(NoteMalformed):
        read_note(whole + b"g" * 65)


# -- in a pool --------------------------------------------------------------------------------


@pytest.fixture
def still(monkeypatch):
    monkeypatch.setattr(reserved_places, "IDLE_S", 60.0)


def test_no_put_wakes_the_node_and_a_new_master_knows_all(stack, monkeypatch, still):
    masters = stack.enter_context(ExitStack())
    pool = Pool(stack, open_put_s=20.0, heartbeat_s=0.1)
    stores = [pool.store, pool.connect()]
    sent = [sent_notes(store, monkeypatch) for store in stores]
    values = fill_in_both_ways(stores)
    assert sent == [[], []]
    known = {block.key for block in pool.nodes[0].segments[0].index.blocks()}
    assert known == set(values)
    restart(pool, masters)
    assert {key: pool.store.get(key) for key in values} == values
    pool.master.check_invariants()


def test_what_does_not_fit_is_sent(stack, monkeypatch, still):
    monkeypatch.setattr(mailbox, "MAILBOX_BYTES", 1024)
    pool = Pool(stack)
    sent = sent_notes(pool.store, monkeypatch)
    values = fill(pool.store, 60)
    assert 0 < len(sent) < 60
    assert all(note.stamp for note in sent)
    segment = pool.nodes[0].segments[0]
    eventually(lambda: {b.key for b in segment.index.blocks()} == set(values), "all are known")


def test_a_mailbox_stays_as_large_as_it_was_made(stack, monkeypatch, still):
    """Whoever comes later may get a larger one: nobody reads behind the end of this one."""
    with monkeypatch.context() as patch:
        patch.setattr(mailbox, "MAILBOX_BYTES", 1024)
        pool = Pool(stack)
        sent = sent_notes(pool.store, monkeypatch)
        values = fill(pool.store, 60)
    assert 0 < len(sent) < 60
    values |= fill(pool.store, 60)  # around the end of the ring
    index = pool.nodes[0].segments[0].index
    eventually(lambda: {b.key for b in index.blocks()} == set(values), "all are known")


def test_clients_whose_writes_carry_no_notes_send_theirs(stack, monkeypatch, still):
    pool = Pool(stack)
    store = pool.connect(transfer=TransferConfig(backend=TransferBackend.TCP))
    monkeypatch.setattr(store.client.core.engine, "write_with_note", lambda *_, **__: None)
    sent = sent_notes(store, monkeypatch)
    values = fill(store)
    assert len(sent) == len(values)
    assert all(note.stamp for note in sent), "of the clock that is both ends'"


def test_what_is_told_while_another_thread_opens_the_mailbox_says_when(stack, monkeypatch, still):
    """Such a note is sent: it may come after one that was left later, and must give way to it."""
    pool = Pool(stack)
    node = pool.nodes[0]
    fill(pool.store, 1)
    box = node.name, 0
    fresh = pool.connect().client
    segments, engine = fresh.segments, fresh.core.engine
    where = NodeAddress(node.name, node._engine.address, 0)
    segments.get(where, deadline_s=time.monotonic() + 60)
    assert box in segments._mailboxes
    opening, go_on, sent = threading.Event(), threading.Event(), []
    write, notify = engine.write, engine.notify

    def slow_write(*given, **options):
        opening.set()
        assert go_on.wait(60)
        return write(*given, **options)

    monkeypatch.setattr(engine, "write", slow_write)
    monkeypatch.setattr(engine, "notify", lambda peer, payload: sent.append(payload))
    offset = 40 * SIZE
    first, late, last = (secrets.token_bytes(16) for _ in range(3))
    with ThreadPoolExecutor(1) as others:
        telling = others.submit(segments.tell, node.name, written(first, 2 * offset, 0))
        assert opening.wait(60)
        try:
            segments.tell(node.name, written(late, offset, 0))
        finally:
            go_on.set()
        telling.result(60)
    assert box in segments._outboxes
    (payload,) = sent
    pool.store.client.segments.tell(node.name, written(last, offset, 0))
    index = node.segments[0].index
    assert index.at(2 * offset).key == first
    assert index.at(offset).key == last
    take, taken = node._mailboxes.take_sent, []
    monkeypatch.setattr(node._mailboxes, "take_sent", lambda n: taken.append(take(n)))
    notify(node.name, payload)
    eventually(lambda: taken, "it arrived")
    assert index.at(offset).key == last


@pytest.mark.parametrize("mailbox_bytes", [1024, 64 << 10])
@pytest.mark.parametrize("other_clock", [False, True])
def test_several_clients_in_a_pool_that_is_small(stack, monkeypatch, mailbox_bytes, other_clock):
    """What is there is known as it is, whoever wrote over whose place last."""
    masters = stack.enter_context(ExitStack())
    monkeypatch.setattr(mailbox, "MAILBOX_BYTES", mailbox_bytes)
    if other_clock:
        monkeypatch.setattr(Mailboxes, "offer_to", lambda self, peer: (b"", ""))
    monkeypatch.setattr(opening, "RESERVED_SHARE", 0.5)
    pool = Pool(stack, segment_bytes=1 << 20, heartbeat_s=0.1)
    stores, rng, values = [pool.store, pool.connect(), pool.connect()], random.Random(), {}
    for _ in range(400):
        store, dice = rng.choice(stores), rng.random()
        size = rng.choice([SIZE, SIZE, SIZE, 3 * SIZE, 100_000])
        if dice < 0.6:
            key, data = secrets.token_bytes(16), secrets.token_bytes(size)
            if store.put(key, data) is STORED:
                values[key] = data
        elif dice < 0.75 and values:
            key = rng.choice(list(values))
            if rng.random() < 0.5:
                store.put(key, secrets.token_bytes(size))  # taken, unless it was evicted
                values.pop(key)
                store.remove(key)
            else:
                store.remove(key)
                values.pop(key)
        elif dice < 0.9:
            keys = [secrets.token_bytes(16) for _ in range(3)]
            bodies = [secrets.token_bytes(size) for _ in keys]
            for key, data, outcome in zip(keys, bodies, store.put_batch(keys, bodies), strict=True):
                if outcome is STORED:
                    values[key] = data
        else:
            pool.nodes[0].segments[0].index.blocks()  # somebody looks in between
    there = {key for key in values if pool.store.exists(key)}
    assert there
    restart(pool, masters)
    found = {key: pool.store.get(key) for key in values}
    assert there <= {key for key, data in found.items() if data is not None}
    assert all(data in (None, values[key]) for key, data in found.items())
    assert pool.master.statistics().corrupt_blocks == 0
    pool.master.check_invariants()


@pytest.mark.parametrize(
    ("mailbox_bytes", "portion_bytes"),
    [(1024, 1), (1024, 500), (64 << 10, 500), (64 << 10, 1 << 20)],
)
def test_the_last_word_on_a_place_is_what_is_remembered(
    stack, monkeypatch, still, mailbox_bytes, portion_bytes
):
    monkeypatch.setattr(mailbox, "MAILBOX_BYTES", mailbox_bytes)
    monkeypatch.setattr(mailboxes, "PORTION_BYTES", portion_bytes)
    pool = Pool(stack)
    stores, rng, last = [pool.store, pool.connect(), pool.connect()], random.Random(), {}
    for store in stores:
        fill(store, 1)
    (node,) = pool.nodes
    node.segments[0].index.forget_range(0, pool.config.segment_bytes)
    unsaid = set()
    for _ in range(1000):
        place, key, store = rng.randrange(20), secrets.token_bytes(16), rng.choice(stores)
        if place in last and rng.random() < 0.3:
            key, store = last.pop(place)  # who said it takes it back
            unsaid.add(key)
            store.client.segments.tell(node.name, Unwritten(key, place * SIZE))
        else:
            store.client.segments.tell(node.name, written(key, place * SIZE, 0))
            last[place] = key, store
        if rng.random() < 0.02:
            node.segments[0].index.blocks()

    def settled():
        found = {b.offset // SIZE: b.key for b in node.segments[0].index.blocks()}
        # Where nothing is now, what was there long before may be believed: its bytes say no.
        return unsaid.isdisjoint(found.values()) and all(
            found.get(place) == key for place, (key, _) in last.items()
        )

    eventually(settled, "what was said last")


def written(key, offset, stamp):
    return Written(HeldBlocks([key], [offset], [SIZE], [1]), 0, stamp)


def test_a_late_note_gives_way_to_what_was_left_after_it(stack, still):
    pool = Pool(stack)
    values = fill(pool.store)
    boxes, segment = pool.nodes[0]._mailboxes, pool.nodes[0].segments[0]
    before = {block.key: block.offset for block in segment.index.blocks()}
    assert set(before) == set(values)
    stamp, now = min(stamp for stamp, _, _ in boxes._recent) - 1, time.monotonic_ns()
    (key, offset), take = next(iter(before.items())), boxes.take_sent
    take(written(b"l" * 16, offset, stamp))
    take(written(b"o" * 16, offset + SIZE // 2, stamp))
    take(Unwritten(key, offset, 0, stamp))
    assert {block.key: block.offset for block in segment.index.blocks()} == before
    take(written(b"n" * 16, offset, now))
    assert segment.index.at(offset).key == b"n" * 16
    take(Unwritten(b"c" * 16, offset, 0, now + 2))  # the write itself is still to come
    take(Unwritten(b"n" * 16, offset, 0, now + 1))
    take(written(b"c" * 16, offset, now + 1))
    assert segment.index.at(offset) is None


def test_late_notes_of_many_blocks_give_way_block_by_block():
    """Written by several at once, in batches: the work must not grow with the product."""
    rng, entered = random.Random(), []
    nobody = {"on_peer_lost": lambda call: None, "on_notes": lambda call: None}
    engine = SimpleNamespace(name="node", take_notes=list, **nobody)
    boxes = Mailboxes(engine, lambda segment, said: entered.extend(said))
    units = 1 << 19  # of 64 bytes
    later, whole = np.zeros(units, dtype=bool), 0

    def batch(stamp):
        at = rng.randrange(units - 16 * 1000)
        starts = [at + 16 * i + rng.randrange(8) for i in range(1000)]
        lengths = [rng.randrange(1, 8) for _ in starts]
        keys = [rng.randbytes(16) for _ in starts]
        columns = [64 * start for start in starts], [64 * length for length in lengths]
        note = Written(HeldBlocks(keys, *columns, [1] * 1000), 0, stamp)
        return note, list(zip(keys, starts, lengths, strict=True))

    for stamp in range(1000, 1000 + 2 * RECENT_BLOCKS_MAX // 1000):
        note, blocks = batch(stamp)
        boxes.take_sent(note)
        assert entered.pop() is note, "it is not late"
        if stamp >= 1000 + RECENT_BLOCKS_MAX // 1000 + 10:  # longer ago may be forgotten
            for _, start, length in blocks:
                later[start : start + length] = True
    assert RECENT_BLOCKS_MAX - 1000 < boxes._recent_blocks <= RECENT_BLOCKS_MAX
    for stamp in range(900, 910):
        note, blocks = batch(stamp)
        boxes.take_sent(note)
        kept = {key for said in entered for key in said.held.keys}
        for key, start, length in blocks:
            assert key not in kept or not later[start : start + length].any()
        whole += len(kept) == 1000
        entered.clear()
    assert whole < 10, "some were late"


def test_the_mailbox_of_a_client_that_leaves_is_freed(stack, still):
    pool = Pool(stack)
    with pool.connect() as store:
        values = fill(store)
        boxes = pool.nodes[0]._mailboxes._boxes
        assert len(boxes) == 1
    eventually(lambda: not boxes, "it is freed")
    index = pool.nodes[0].segments[0].index
    assert {block.key for block in index.blocks()} == set(values)


def test_a_mailbox_full_of_nonsense_ends_nothing(stack, monkeypatch, still):
    pool = Pool(stack)
    values = fill(pool.store)
    (box,) = pool.nodes[0]._mailboxes._boxes.values()
    box.region.array[:8] = 255
    (segment,) = pool.nodes[0].segments
    assert {block.key for block in segment.index.blocks()} == set()
    assert box.is_broken
    sent = sent_notes(pool.store, monkeypatch)
    more = fill(pool.store)
    assert len(sent) == len(more)
    eventually(lambda: {b.key for b in segment.index.blocks()} == set(more), "they are sent")
    assert {key: pool.store.get(key) for key in values} == values
