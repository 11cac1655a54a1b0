"""Places that are opened after a reply, for the next but one: nothing of them is lost or left."""

from __future__ import annotations

import secrets
import time

import pytest

from kvstore import Fenced, MasterUnavailable, PutOutcome
from kvstore.client import reserved_places
from kvstore.master.store_master import MasterTiming, StoreMaster
from kvstore.values import place_supply
from kvstore.wire import messages as m
from tests.support.store_pool import Pool
from tests.support.waits import eventually

STORED, FAILED = PutOutcome.STORED, PutOutcome.FAILED
SIZE = 4096
AHEAD = 4
CAPACITY = 1 << 20


@pytest.fixture
def patient(monkeypatch):
    """Places are not given back while a test looks."""
    monkeypatch.setattr(reserved_places, "IDLE_S", 60.0)


@pytest.fixture
def pool(stack, monkeypatch):
    monkeypatch.setattr(place_supply, "AHEAD_MAX", AHEAD)
    pool = Pool(stack, posts=False)
    yield pool
    pool.store.close()
    eventually(lambda: pool.master.statistics().open_bytes == 0, "all is given back")
    pool.master.check_invariants()


def put(store):
    key = secrets.token_bytes(16)
    assert store.put(key, secrets.token_bytes(SIZE)) is STORED
    return key


def held(pool):
    return pool.master.statistics().open_bytes // SIZE


def until_ordered(store):
    """Put until places are ordered, of which none has been named again."""
    places = store.client.places
    for _ in range(20):
        if places._ordered:
            return
        put(store)
    raise AssertionError("nothing was ordered")


def test_what_is_ordered_is_used(pool, patient):
    until_ordered(pool.store)
    (order,) = pool.store.client.places._ordered.values()
    assert held(pool) == 1 + AHEAD
    put(pool.store)
    ((taken,),) = [list(pool.store.client.places._places.values())]
    assert [place.batch for place in taken] == order.numbers
    assert held(pool) == AHEAD
    assert not pool.store.client.places._ordered


def test_who_puts_no_more_gives_back_what_was_ordered(pool):
    until_ordered(pool.store)
    eventually(lambda: held(pool) == 0, "given back")
    eventually(lambda: pool.store.client.places._thread is None, "its thread is over")
    assert not pool.store.client.places._ordered
    until_ordered(pool.store)


@pytest.mark.parametrize("dead", [False, True])
def test_of_a_client_that_is_gone_nothing_is_opened(pool, patient, dead):
    other = pool.connect()
    until_ordered(other)
    (pool.master.confirm_dead if dead else pool.master.fence)([other.client.core.record.name])
    figures = pool.master.statistics()
    assert figures.open_bytes == 0
    assert figures.quarantined_bytes == (0 if dead else (1 + AHEAD) * SIZE)
    with pytest.raises(Fenced):
        put(other)
    if not dead:
        pool.master.confirm_dead([other.client.core.record.name])
    assert pool.master.statistics().quarantined_bytes == 0


@pytest.mark.parametrize("way", ["lost", "repeated"])
def test_an_order_whose_reply_is_lost_is_given_back(pool, patient, monkeypatch, way):
    store, lost = pool.store, []
    link = store.client._link._link
    attempt = link._attempt

    def lose(request, *args, **options):
        answer = attempt(request, *args, **options)
        if isinstance(request, m.Store) and request.soon and (not lost or way == "lost"):
            lost.append(request)
            raise MasterUnavailable(operation="Store", address="x", problem="lost")
        return answer

    for _ in range(20):
        put(store)
        if sum(map(len, store.client.places._places.values())) == 2:
            break
    monkeypatch.setattr(link, "_attempt", lose)
    key, data = secrets.token_bytes(16), secrets.token_bytes(SIZE)
    if way == "lost":
        with pytest.raises(MasterUnavailable):
            store.put(key, data, timeout_s=0.3)
    else:
        assert store.put(key, data) is STORED
    assert lost, "the fault happened"
    monkeypatch.undo()
    assert store.get(key) == data
    assert not store.client.places._ordered
    put(store)
    put(store)
    places = sum(map(len, store.client.places._places.values()))
    ordered = sum(len(order.numbers) for order in store.client.places._ordered.values())
    assert held(pool) == places + ordered, "what it does not know of is free"


@pytest.fixture
def master():
    master = StoreMaster(MasterTiming(lease_s=5.0, silence_s=10.0, put_s=30.0))
    told = m.Register(
        node="n", address="n:1", segment=0, base=0, capacity=CAPACITY, held=m.HeldBlocks(),
        untouched=True,
    )  # fmt: skip
    assert isinstance(master.step(told, 0.0), m.Registered)
    return master


def opened(master):
    return master.statistics().open_bytes // SIZE


def store(batch, following, *, soon=(), more=()):
    return m.Store(
        "c", batch, secrets.token_bytes(16), SIZE, 1, following, list(more), soon=list(soon)
    )


def test_the_master_opens_them_after_its_reply_or_with_the_next_request(master):
    assert master.step(m.Reserve("c", b"k" * 16, 1, SIZE), 1.0).place is not None
    assert master.step(store(1, 2, soon=[3]), 1.0).more == []
    assert master.has_wishes
    assert opened(master) == 0
    master.grant_wishes(1.0)
    assert (opened(master), master.has_wishes) == (1, False)
    reply = master.step(store(3, 4, soon=[5, 6]), 1.5)
    assert (reply.outcome, opened(master)) == (STORED, 0)
    reply = master.step(store(5, 7, more=[6, 8]), 2.0)  # nobody had time for it before
    assert reply.outcome is STORED, "it was opened before this was looked at"
    assert (len(reply.more), opened(master)) == (2, 2)
    master.check_invariants()


def test_only_a_stored_block_orders_and_what_is_given_up_is_not_opened(master):
    assert master.step(m.Reserve("c", b"k" * 16, 1, SIZE), 1.0).place is not None
    first = store(1, 2, soon=[3, 4])
    assert master.step(first, 1.0).outcome is STORED
    assert master.step(first, 1.0).outcome is FAILED, "asked again"
    assert opened(master) == 2, "once"
    assert master.step(m.Reserve("c", b"k" * 16, abandoned=[3]), 1.0).place is None
    assert opened(master) == 1
    assert master.step(store(9, 10, soon=[11]), 1.0).outcome is FAILED
    assert not master.has_wishes
    assert master.step(store(4, 12, soon=[3, 13]), 1.0).outcome is STORED
    master.grant_wishes(time.monotonic())
    assert opened(master) == 1, "a number that was given up stays so"
    refused = master.step(store(13, 14, soon=[14]), time.monotonic())
    assert isinstance(refused, m.Refused), "a number that is used twice"
    master.check_invariants()
