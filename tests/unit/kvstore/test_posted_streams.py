"""Stores that post and stores that ask: the same operations have the same outcomes and contents."""

from __future__ import annotations

import random
import threading

import pytest

from kvstore import Pin, PutOptions, PutOutcome
from kvstore.client import post_box, reserved_places
from kvstore.values import hot_places, place_supply
from tests.support.posted import Table, needs_both_ends
from tests.support.short_puts import Requests, check_empty
from tests.support.store_pool import WAIT_S, Pool

pytestmark = needs_both_ends

SIZES = (300, 4096, 20_000)
STEPS = 1500
STORED, EXISTS, CONFLICT = PutOutcome.STORED, PutOutcome.EXISTS, PutOutcome.CONFLICT


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    monkeypatch.setattr(reserved_places, "IDLE_S", 60.0)
    monkeypatch.setattr(place_supply, "AHEAD_MAX", 8)
    monkeypatch.setattr(post_box, "AGAIN_S", 0.01)
    # Else who reads twice finds for a while what others have removed since.
    monkeypatch.setattr(hot_places, "HOT_BLOCKS_MAX", 0)


def operations(rng):
    """Who does what with which key; contents are few, so that names are taken with either."""
    names = [rng.randbytes(16) for _ in range(250)]
    contents = [rng.randbytes(size) for size in SIZES for _ in range(2)]
    for _ in range(STEPS):
        who, key = rng.randrange(3), rng.choice(names)
        draw = rng.random()
        if draw < 0.6:
            options = PutOptions(pin=Pin.SOFT) if rng.random() < 0.05 else None
            yield who, "put", key, (rng.choice(contents), options)
        elif draw < 0.75:
            yield who, "get", key, ()
        elif draw < 0.8:
            yield who, "exists", key, ()
        elif draw < 0.83:
            yield who, "put_batch", key, (names[rng.randrange(250)], rng.choice(contents))
        else:
            yield who, "remove", key, ()


def carry_out(store, what, key, more):
    if what == "put":
        content, options = more
        return (
            store.put(key, content) if options is None else store.put(key, content, options=options)
        )
    if what == "put_batch":
        other, content = more
        keys = [key] if other == key else [key, other]
        return store.put_batch(keys, [content] * len(keys))
    if what == "remove":
        return store.remove_batch([key])
    return getattr(store, what)(key)


def by_the_book(book, what, key, more):
    """What comes of it, as a dictionary says."""

    def put(name, content):
        if name not in book:
            book[name] = content
            return STORED
        return EXISTS if book[name] == content else CONFLICT

    if what == "put":
        return put(key, more[0])
    if what == "put_batch":
        other, content = more
        return tuple(put(name, content) for name in ([key] if other == key else [key, other]))
    if what == "remove":
        return int(book.pop(key, None) is not None)
    return book.get(key) if what == "get" else key in book


@pytest.mark.parametrize("posts", [True, False], ids=["posted", "asked"])
def test_a_stream_of_three_stores_is_that_of_a_dictionary(stack, monkeypatch, seed, posts):
    pool = Pool(stack, posts=posts, nodes=2, segment_bytes=16 << 20)
    stores = [pool.store, pool.connect(), pool.connect()]
    heard = [Requests(store, monkeypatch) for store in stores]
    book, silent = {}, 0
    for step, (who, what, key, more) in enumerate(operations(random.Random(seed))):
        heard[who].take()
        wanted = by_the_book(book, what, key, more)
        assert carry_out(stores[who], what, key, more) == wanted, (step, who, what)
        silent += what == "put" and not heard[who].take()
        if step % 300 == 0:
            pool.master.check_invariants()
    assert (silent > 50) == posts, "puts that asked nobody"
    figures = pool.master.statistics()
    assert figures.blocks == len(book)
    assert figures.corrupt_blocks == 0
    assert {key: pool.store.get(key) for key in book} == book
    if posts:
        table = Table(pool.master._posts._keys)
        assert len(table.words()) == len(book), "a word for each block"
        table.memory.close()
    pool.store.remove_batch(list(book))
    for store in stores:
        store.close()
    check_empty(pool)


def test_both_ways_in_one_pool_in_many_threads(stack, seed):
    """Each key has one winner, whose bytes all read; what is removed may be put again."""
    pool = Pool(stack, nodes=2, segment_bytes=16 << 20)
    stores = [pool.store, pool.connect(), pool.connect()]
    stores[2].client.posts.close()
    rng = random.Random(seed)
    names = [rng.randbytes(16) for _ in range(150)]
    problems, outcomes = [], [[] for _ in range(4)]

    def use(number, noise):
        store = stores[number % 3]
        for name in noise.sample(names, len(names)):
            content = bytes([number]) * 16 + name * 255
            outcome = store.put(name, content)
            outcomes[number].append((name, outcome))
            found = store.get(name)
            if outcome is STORED and found != content:
                problems.append(f"{number} stored {name.hex()} and finds another")
            if found is not None and found[16:] != name * 255:
                problems.append(f"{number} finds wrong bytes of {name.hex()}")

    threads = [
        threading.Thread(target=use, args=(i, random.Random(rng.random()))) for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not problems
    won = [name for own in outcomes for name, outcome in own if outcome is STORED]
    assert sorted(won) == sorted(names), "each once"
    assert pool.master.statistics().blocks == len(names)
    pool.store.remove_batch(names)
    assert pool.master.statistics().blocks == 0
    for store in stores:
        store.close()
    check_empty(pool)
