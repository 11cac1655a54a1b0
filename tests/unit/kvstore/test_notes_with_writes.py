"""Notes that clients leave with what they write over tcp: the node knows all, and only that."""

from __future__ import annotations

import random
import secrets
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from configs.schema import TransferBackend, TransferConfig
from kvstore import PutOptions, PutOutcome, mailbox
from kvstore.client import reserved_places
from kvstore.wire.peer_messages import Unwritten
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
from transfer.backends.server import NOTES_TOLD

TCP = TransferConfig(backend=TransferBackend.TCP)


@pytest.fixture(autouse=True)
def still(monkeypatch):
    monkeypatch.setattr(reserved_places, "IDLE_S", 60.0)


def blocks_of(pool):
    return {block.key: block for block in pool.nodes[0].segments[0].index.blocks()}


def test_nothing_is_sent_and_a_new_master_knows_all(stack, monkeypatch):
    masters = stack.enter_context(ExitStack())
    pool = Pool(stack, open_put_s=3.0, heartbeat_s=0.1)
    stores = [pool.connect(transfer=TCP), pool.connect(transfer=TCP), pool.connect()]
    sent = [sent_notes(store, monkeypatch) for store in stores[:2]]
    values = fill_in_both_ways(stores)
    assert sent == [[], []]
    assert set(blocks_of(pool)) == set(values)
    restart(pool, masters)
    assert {key: pool.store.get(key) for key in values} == values
    pool.master.check_invariants()


def test_groups_and_pins_are_told(stack):
    pool = Pool(stack)
    store = pool.connect(transfer=TCP)
    fill(store)
    options = PutOptions(group="g" * 64)
    key = secrets.token_bytes(16)
    for _ in range(3):
        key = secrets.token_bytes(16)
        assert store.put(key, secrets.token_bytes(SIZE), options=options) is STORED
    assert blocks_of(pool)[key].group == "g" * 64


def test_what_turned_out_to_be_no_block_is_forgotten_at_once(stack, monkeypatch):
    pool = Pool(stack, posts=False)  # else a key that is taken is not written at all
    store = pool.connect(transfer=TCP)
    values = fill(store)
    taken = secrets.token_bytes(16)
    assert pool.store.put(taken, b"first") is STORED
    sent = sent_notes(store, monkeypatch)
    left = []
    leave = store.client.segments.leave
    monkeypatch.setattr(
        store.client.segments, "leave", lambda *args: (left.append(args[1]), leave(*args))[1]
    )
    assert store.put(taken, secrets.token_bytes(SIZE)) is PutOutcome.CONFLICT
    assert [type(note) for note in left] == [Unwritten], "its bytes had been sent"
    assert sent == []
    known = blocks_of(pool)
    assert set(known) == {*values, taken}
    assert known[taken].nbytes == len(b"first")


def test_those_whom_nobody_takes_are_entered_when_they_are_many(stack):
    pool = Pool(stack, segment_bytes=64 << 20)
    store = pool.connect(transfer=TCP)
    engine, index = pool.nodes[0]._engine, pool.nodes[0].segments[0]._index
    names = set(fill(store))
    for _ in range(NOTES_TOLD):
        names.add(key := secrets.token_bytes(16))
        assert store.put(key, secrets.token_bytes(SIZE)) is STORED
    eventually(lambda: index.figures().blocks > NOTES_TOLD // 2, "entered without a look")
    assert set(blocks_of(pool)) == names
    assert engine.take_notes() == []


@pytest.mark.skipif(not mailbox.is_available(), reason="needs the compiled part")
def test_several_clients_in_a_pool_that_is_small(stack):
    """Places change hands between clients of both kinds: the last one to have it is right."""
    pool = Pool(stack, segment_bytes=64 * SIZE)
    stores = [pool.connect(transfer=TCP), pool.connect(transfer=TCP), pool.connect()]

    def work(store):
        rng, put = random.Random(), {}
        for _ in range(150):
            key, data = rng.randbytes(16), rng.randbytes(SIZE)
            if rng.random() < 0.1:
                keys, bodies = [rng.randbytes(16) for _ in range(5)], [data] * 5
                outcomes = store.put_batch(keys, bodies)
                put |= {k: data for k, o in zip(keys, outcomes, strict=True) if o is STORED}
            elif store.put(key, data) is STORED:
                put[key] = data
        return put

    with ThreadPoolExecutor() as threads:
        done = list(threads.map(work, stores))
    values = {key: data for put in done for key, data in put.items()}
    assert len(values) > 200
    there = {key: data for key in values if (data := pool.store.get(key)) is not None}
    assert there
    assert there == {key: values[key] for key in there}
    known = blocks_of(pool)
    assert set(there) <= set(known), "a new master would lose one"
    verified = pool.nodes[0].segments[0].held()
    assert set(verified.keys) >= set(there)


def test_connections_that_break_in_mid_put_cost_no_value_and_no_note(stack, monkeypatch):
    pool = Pool(stack, segment_bytes=64 << 20)
    store = pool.connect(transfer=TCP)
    node, client = pool.nodes[0]._engine, store.client.core.engine
    values = fill(store)
    segments, service = store.client.segments, node._links.service
    write = segments.write

    def write_and_reset(*arguments):
        transfer = write(*arguments)
        if random.random() < 0.3:
            for connection in service.connections(node._table.get(client.name).served_id):
                service.reset(connection)
        return transfer

    def num_broken() -> int:
        return sum(rail.failures + rail.retries for rail in client.statistics().rails)

    monkeypatch.setattr(segments, "write", write_and_reset)
    while num_broken() < 5 and len(values) < 400:
        key, data = secrets.token_bytes(16), secrets.token_bytes(random.choice([SIZE, 1 << 17]))
        assert store.put(key, data) is STORED
        values[key] = data
    assert num_broken(), "nothing was under way when connections were reset"
    assert set(blocks_of(pool)) == set(values)
    assert set(pool.nodes[0].segments[0].held().keys) == set(values), "all of them whole"
    assert {key: pool.store.get(key) for key in values} == values
