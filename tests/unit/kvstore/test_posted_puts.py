"""Puts that are posted, through a whole pool: who asks afterwards knows of them in any case."""

from __future__ import annotations

import gc
import math
import os
import secrets
import threading
import time
from contextlib import ExitStack

import pytest

from kvstore import Fenced, MasterServer, MasterUnavailable, PutOutcome
from kvstore.client import post_box, reserved_places
from kvstore.master import posts as posts_module
from kvstore.values import place_supply, quick_writes
from kvstore.wire import messages as m
from tests.support.posted import HandClient, Table, Words, needs_both_ends
from tests.support.short_puts import SIZE, STORED, Requests, check_empty, value
from tests.support.store_pool import WAIT_S, Pool
from tests.support.waits import eventually

pytestmark = needs_both_ends

EXISTS, CONFLICT = PutOutcome.EXISTS, PutOutcome.CONFLICT
FOREVER_S = 3600.0


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Places are not given back while a test looks, and a box is looked for again soon."""
    monkeypatch.setattr(reserved_places, "IDLE_S", 60.0)
    monkeypatch.setattr(place_supply, "AHEAD_MAX", 8)
    monkeypatch.setattr(post_box, "AGAIN_S", 0.01)


class Posting:
    """A store whose requests are heard, and what it has put."""

    def __init__(self, store, monkeypatch):
        self.store = store
        self.requests = Requests(store, monkeypatch)
        self.contents = {}

    def put(self):
        """Put a value; tell whether it was posted: nobody was asked anything."""
        key, data = secrets.token_bytes(16), value()
        self.requests.take()
        assert self.store.put(key, data) is STORED
        self.contents[key] = data
        return not self.requests.take()

    def until_posted(self):
        """Put until a put is posted; its key."""
        deadline, pause_s = time.monotonic() + WAIT_S, 0.002
        while not self.put():
            assert time.monotonic() < deadline, "nothing is posted"
            time.sleep(pause_s)
            pause_s = min(0.1, pause_s * 1.1)
        return next(reversed(self.contents))

    @property
    def name(self):
        return self.store.client.core.record.name

    def check(self, store):
        assert {key: store.get(key) for key in self.contents} == self.contents


@pytest.fixture
def pool(stack):
    pool = Pool(stack)
    yield pool
    pool.store.close()


@pytest.fixture
def posting(pool, monkeypatch):
    posting = Posting(pool.store, monkeypatch)
    posting.until_posted()
    return posting


def hold_back(pool, monkeypatch):
    """From now on the master looks at what is posted only when it is asked something."""
    monkeypatch.setattr(pool.master._posts, "doze", lambda now: None)


def test_a_stream_is_posted(pool, posting):
    posted = sum(posting.put() for _ in range(200))
    assert posted > 100
    assert pool.master.statistics().blocks == len(posting.contents)
    posting.check(pool.store)
    posting.check(pool.connect())
    assert pool.store.client.statistics().stored_blocks == len(posting.contents)
    pool.store.remove_batch(list(posting.contents))
    pool.store.close()
    check_empty(pool)


def test_whoever_asks_afterwards_knows_of_it(pool, posting, monkeypatch, rng):
    other = pool.connect()
    hold_back(pool, monkeypatch)
    for _ in range(60):
        key = posting.until_posted()
        data = posting.contents[key]
        kind = rng.randrange(6)
        if kind == 0:
            assert other.get(key) == data
        elif kind == 1:
            assert other.exists(key)
        elif kind == 2:
            assert other.put(key, data) is EXISTS
        elif kind == 3:
            assert other.put(key, value()) is CONFLICT
        elif kind == 4:
            assert pool.store.put(key, value()) is CONFLICT
        else:
            assert other.remove_batch([key]) == 1
            del posting.contents[key]
            assert pool.store.get(key) is None
        assert pool.master.statistics().blocks == len(posting.contents)
    posting.check(other)
    pool.master.check_invariants()


def test_the_fenced_post_nothing_more(pool, posting, monkeypatch):
    hold_back(pool, monkeypatch)
    posting.until_posted()
    count = len(posting.contents)
    pool.master.fence([posting.name])
    assert pool.master.statistics().blocks == count, "what was posted before counts"
    for _ in range(10):
        with pytest.raises(Fenced):
            pool.store.put(secrets.token_bytes(16), value())
    pool.master.confirm_dead([posting.name])
    figures = pool.master.statistics()
    assert (figures.blocks, figures.open_bytes, figures.quarantined_bytes) == (count, 0, 0)
    posting.check(pool.connect())
    pool.master.check_invariants()


def test_a_node_that_leaves_takes_its_blocks_and_no_others(stack, monkeypatch):
    monkeypatch.setattr(quick_writes, "REACH_S", 0.3)  # its engine is there still, and says nothing
    pool = Pool(stack, nodes=2)
    posting = Posting(pool.store, monkeypatch)
    for _ in range(40):
        posting.put()
    posting.until_posted()
    gone = pool.nodes[0]
    gone.close()
    lost = {key for key, data in posting.contents.items() if pool.store.get(key) != data}
    before = len(posting.contents)
    for _ in range(30):
        posting.put()
    assert pool.master.statistics().nodes == 1
    now = {key for key, data in posting.contents.items() if pool.store.get(key) != data}
    assert now == lost, "nothing was stored in what is gone"
    assert 0 < len(lost) < before
    pool.master.check_invariants()


def test_a_master_that_leads_again_hears_of_all(stack, monkeypatch):
    pool = Pool(stack, heartbeat_s=0.1, open_put_s=5.0)
    posting = Posting(pool.store, monkeypatch)
    for term in range(1, 4):
        posting.until_posted()
        hold_back(pool, monkeypatch)
        posting.until_posted()
        pool.master.lead(term=term, until_s=math.inf)
        eventually(lambda: pool.master.statistics().nodes == 1, "the node tells what it holds")
        assert pool.store.put(secrets.token_bytes(16), value()) is STORED
        posting.check(pool.store)
    posting.until_posted()
    pool.master.check_invariants()


def test_who_stands_down_takes_what_was_posted_and_no_more(stack, monkeypatch):
    pool = Pool(stack, heartbeat_s=0.1, open_put_s=5.0)
    posting = Posting(pool.store, monkeypatch)
    posting.until_posted()
    hold_back(pool, monkeypatch)
    posting.until_posted()
    box = pool.store.client.posts.box
    pool.master.stand_down()
    assert box.waiting() == 0, "it was taken"
    late = secrets.token_bytes(16)
    with pytest.raises(MasterUnavailable):
        pool.store.put(late, value(), timeout_s=0.2)
    assert box.waiting() == 0
    assert box.generation() == post_box.NEVER
    pool.master.lead(term=1, until_s=math.inf)
    eventually(lambda: pool.master.statistics().nodes == 1, "the node tells what it holds")
    posting.check(pool.store)
    posting.until_posted()
    assert pool.store.client.posts.box is not box


def test_whose_time_is_over_is_posted_to_no_more(pool, posting, monkeypatch):
    hold_back(pool, monkeypatch)
    posting.until_posted()
    count = len(posting.contents)
    pool.master.confirm(time.monotonic() - 1.0)
    with pytest.raises(MasterUnavailable):
        pool.store.put(secrets.token_bytes(16), value(), timeout_s=0.2)
    assert pool.store.client.posts.box.waiting() <= count
    pool.master.confirm(time.monotonic() + FOREVER_S)
    posting.until_posted()
    posting.check(pool.store)
    pool.master.check_invariants()


@pytest.mark.parametrize("why", ["rebuilding", "settling", "telling"])
def test_a_master_that_may_not_know_all_is_asked(pool, posting, monkeypatch, why):
    master, known = pool.master, secrets.token_bytes(16)
    if why == "telling":
        ghost = m.Register("ghost", "ghost:1", SIZE, False, m.HeldBlocks(), more=True)
        assert isinstance(master._step(ghost), m.Registered)
    else:
        monkeypatch.setattr(
            master, f"_{'rebuilt' if why == 'rebuilding' else 'settled'}_s", math.inf
        )
        master.statistics()  # it says so behind its reply
    assert not any(posting.put() for _ in range(30))
    if why == "telling":
        held = m.HeldBlocks([known], [0], [SIZE], [5])
        assert master._step(m.Hold("ghost", 0, held)).adopted == 1
        assert pool.store.put(known, value()) is CONFLICT
        assert not any(posting.put() for _ in range(30)), "an earlier master's clients may write"
        assert isinstance(master._step(m.Settled("ghost", 0)), m.Done)
    else:
        monkeypatch.setattr(master, f"_{'rebuilt' if why == 'rebuilding' else 'settled'}_s", 0.0)
        master.statistics()
    posting.until_posted()
    posting.check(pool.store)
    master.check_invariants()


def test_what_is_under_way_when_a_master_begins_to_rebuild(pool, posting):
    """A claim from before is no post afterwards."""
    hand = hand_of(pool, posting)
    key = secrets.token_bytes(16)
    assert hand.claim(key)
    ghost = m.Register("ghost", "ghost:1", SIZE, False, m.HeldBlocks(), more=True)
    pool.master._step(ghost)
    assert not hand.post(key, 1)
    assert not any(pool.master._step(m.Exists([key])).flags)
    hand.close()


class Hand(HandClient):
    def close(self):
        self.table.memory.close()
        self.ring.memory.close()


def hand_of(pool, posting):
    """The same client, stopped between two steps of a put."""
    posts = pool.master._posts
    (number,) = [n for n, name in posts._clients.items() if name == posting.name]
    return Hand(Table(posts._keys), Words(posts._rings[number]))


@pytest.mark.parametrize("way", ["put", "batch", "long"])
def test_another_s_put_of_a_claimed_key(pool, posting, way):
    other, key, data = pool.connect(), secrets.token_bytes(16), value()
    for _ in range(4):
        assert other.put(secrets.token_bytes(16), value()) is STORED
    hand = hand_of(pool, posting)
    assert hand.claim(key)
    if way == "put":
        assert other.put(key, data) is STORED
    elif way == "batch":
        assert other.put_batch([key, secrets.token_bytes(16)], [data, value()]) == (STORED, STORED)
    else:
        assert other.put(key, [data[:100], data[100:]]) is STORED
    assert not hand.post(key, 1), "it was too slow"
    assert pool.store.get(key) == data
    assert pool.store.put(key, value()) is CONFLICT
    assert hand.table.owners(key) == [0]
    posting.until_posted()
    hand.close()


def test_tables_grow_and_clients_go_on(stack, monkeypatch):
    monkeypatch.setattr(posts_module, "BUCKETS_MIN", 4)
    pool = Pool(stack)
    posting = Posting(pool.store, monkeypatch)
    boxes, rooms = [], set()
    while len(posting.contents) < 600:
        posting.put()
        box = pool.store.client.posts.box
        if box is not None and not any(box is known for known in boxes):
            boxes.append(box)
        if pool.master._posts is not None:
            rooms.add(pool.master._posts._office.room)
    posting.until_posted()
    assert len(rooms) > 2, "it grew more than once"
    assert len(boxes) > 2
    posting.check(pool.connect())
    pool.master.check_invariants()
    pool.store.remove_batch(list(posting.contents))
    table = Table(pool.master._posts._keys)
    assert table.words() == []
    table.memory.close()


def test_each_block_is_told_of_once_and_soon(stack, monkeypatch):
    anywhere = {"endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"}
    pool = Pool(stack, events={"enabled": True, **anywhere})
    told, offer = [], pool.master.events.offer

    def listen(batches):
        told.extend(
            key
            for batch in batches
            for change in batch.changes
            if type(change).__name__ == "Stored"
            for key in change.keys
        )
        return offer(batches)

    monkeypatch.setattr(pool.master.events, "offer", listen)
    posting = Posting(pool.store, monkeypatch)
    for _ in range(5):
        key = posting.until_posted()
        eventually(lambda key=key: key in told, "told without any request")
        time.sleep(0.3)  # nobody looks any more: who posts next wakes the master
        for _ in range(20):
            posting.put()
    eventually(lambda: len(told) >= len(posting.contents), "all are told of")
    assert sorted(told) == sorted(posting.contents)


def open_memory():
    """Descriptors of taken keys and posts, and how often they are mapped."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:
            continue  # of the listing itself
    with open("/proc/self/maps") as maps:
        found += maps.read().split("\n")
    ours = ("moe-runtime-posts", "moe-runtime-taken")
    return sum(any(name in entry for name in ours) for entry in found)


def test_nothing_is_left_of_clients_that_go_nor_of_the_pool(monkeypatch):
    gc.collect()  # boxes of earlier tests
    before = open_memory()
    with ExitStack() as stack:
        pool = Pool(stack)
        posting = Posting(pool.store, monkeypatch)
        posting.until_posted()
        alone = open_memory()
        for _ in range(5):
            with ExitStack() as one:
                store = one.enter_context(pool.connect())
                Posting(store, monkeypatch).until_posted()
                assert open_memory() > alone
            eventually(lambda: open_memory() == alone, "its ring is gone")
        assert pool.master._posts._office.num_clients == 1
    assert open_memory() == before


def test_a_master_without_memory_to_share_is_asked(stack, monkeypatch, caplog):
    def refuse(what, nbytes):
        raise OSError(23, "too many open files in system")

    monkeypatch.setattr(posts_module, "_memory", refuse)
    pool = Pool(stack)
    keys = [secrets.token_bytes(16) for _ in range(3 * place_supply.AHEAD_MAX)]
    for key in keys:
        assert pool.store.put(key, key * 100) is STORED
    assert [pool.store.get(key) for key in keys] == [key * 100 for key in keys]
    assert pool.store.client.posts.box is None
    assert len([r for r in caplog.records if "no puts are posted here" in r.message]) == 1


def test_many_threads_of_one_store_post(pool, posting):
    names = [[secrets.token_bytes(16) for _ in range(80)] for _ in range(4)]
    contents = {name: value() for own in names for name in own}
    problems = []

    def write(own):
        for name in own:
            if pool.store.put(name, contents[name]) is not STORED:
                problems.append(name)

    threads = [threading.Thread(target=write, args=(own,)) for own in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not problems
    assert {name: pool.store.get(name) for name in contents} == contents
    assert pool.master.statistics().blocks == len(contents) + len(posting.contents)
    pool.master.check_invariants()


def test_a_master_that_ends_with_posts_that_nobody_took(stack, monkeypatch):
    """The node was told of each; the next master hears it from there."""
    masters = stack.enter_context(ExitStack())
    pool = Pool(stack, heartbeat_s=0.1, open_put_s=5.0)
    posting = Posting(pool.store, monkeypatch)
    posting.until_posted()
    hold_back(pool, monkeypatch)
    monkeypatch.setattr(pool.master._posts, "take", lambda: False)
    monkeypatch.setattr(pool.master._posts, "close", lambda: None)
    before = pool.master._posts
    count = pool.master.statistics().blocks
    while len(posting.contents) < count + 20:
        posting.until_posted()
    port = int(pool.master.address.rpartition(":")[2])
    pool.master.close()
    monkeypatch.undo()
    before.close()
    pool.master = masters.enter_context(MasterServer(pool.config, secret=pool.secret, port=port))
    eventually(lambda: pool.master.statistics().nodes == 1, "the node registers again")
    other = pool.connect()
    posting.check(other)
    pool.master.check_invariants()
