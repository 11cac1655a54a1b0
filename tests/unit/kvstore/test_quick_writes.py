"""Puts of one value in one request: what the long way would say, and nothing left of the places."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from contextlib import ExitStack

import numpy as np
import pytest

from configs.schema import TransferBackend, TransferConfig
from kvstore import (
    AsyncStore,
    Fenced,
    MasterServer,
    MasterUnavailable,
    Pin,
    PutOptions,
    PutOutcome,
    RegionPiece,
)
from kvstore.client import reserved_places
from kvstore.master import opening
from kvstore.node.settlement import Settlement
from kvstore.shards.plan import shard_of
from kvstore.values import place_supply
from kvstore.wire import messages as m
from tests.support.short_puts import SIZE, STORED, Requests, check_empty, value, warm
from tests.support.store_pool import WAIT_S, Pool
from tests.support.waits import eventually
from transfer import allocate

EXISTS, CONFLICT = PutOutcome.EXISTS, PutOutcome.CONFLICT


@pytest.fixture
def patient(monkeypatch):
    """Places are not given back while a test looks."""
    monkeypatch.setattr(reserved_places, "IDLE_S", 60.0)
    monkeypatch.setattr(place_supply, "AHEAD_MAX", 1)  # one place at a time


def test_one_request_per_put_once_the_size_is_known(stack, monkeypatch, patient):
    pool = Pool(stack)
    requests = Requests(pool.store, monkeypatch)
    names = [secrets.token_hex(8) for _ in range(5)]
    values = {name: value() for name in names}
    asked = []
    for name in names:
        assert pool.store.put(name, values[name]) is STORED
        asked.append(requests.take())
    assert asked == [["Allocate", "Finish"], ["Reserve", "Store"], ["Store"], ["Store"], ["Store"]]
    assert {name: pool.store.get(name) for name in names} == values
    assert pool.store.client.statistics().stored_blocks == 5
    figures = pool.master.statistics()
    assert (figures.stored_blocks, figures.blocks, figures.open_puts) == (5, 5, 0)
    assert figures.open_bytes == SIZE, "one place is held ahead"
    pool.store.close()
    assert pool.master.statistics().open_bytes == 0
    pool.master.check_invariants()


@pytest.mark.parametrize("nbytes", [1, 63, 100, 4096, 100_003, 1 << 20, 4 << 20, 16 << 20])
@pytest.mark.parametrize("backend", [TransferBackend.SHARED_MEMORY, TransferBackend.TCP])
def test_every_size_and_kind_is_its_bytes(stack, monkeypatch, patient, nbytes, backend):
    monkeypatch.setattr(opening, "RESERVED_SHARE", 1.0)
    pool = Pool(stack, segment_bytes=(16 << 20) + 9 * nbytes)
    store = pool.connect(transfer=TransferConfig(backend=backend))
    memory = allocate(nbytes + 100)
    stack.callback(memory.close)
    region = store.register(memory)
    warm(store, nbytes)
    requests = Requests(store, monkeypatch)
    for kind in (bytes, bytearray, RegionPiece):
        data, key = value(nbytes), secrets.token_bytes(16)
        put = kind(data) if kind is not RegionPiece else RegionPiece(region, 33, nbytes)
        region.array[33 : 33 + nbytes] = np.frombuffer(data, dtype=np.uint8)
        assert store.put(key, put) is STORED
        assert pool.store.get(key) == data
    remote = backend is TransferBackend.TCP and nbytes > 256 << 10
    assert requests.take() == ["Store"] * 3 or remote  # too large to be staged, not mapped


def test_places_are_given_several_at_a_time(stack, monkeypatch, patient):
    monkeypatch.setattr(place_supply, "AHEAD_MAX", 4)
    pool = Pool(stack, posts=False)
    warm(pool.store)  # the second of them was stored in the place that was reserved
    requests = Requests(pool.store, monkeypatch)
    held, wanted, soon, contents = [], [], [], {}

    def note(request):
        wanted.append(len(request.more))
        soon.append(len(request.soon))

    requests.before = note
    for _ in range(9):
        key = secrets.token_bytes(16)
        contents[key] = value()
        assert pool.store.put(key, contents[key]) is STORED
        held.append(pool.master.statistics().open_bytes // SIZE)
    assert requests.take() == ["Store"] * 9
    assert held == [2, 5, 4, 3, 2, 5, 4, 3, 2], "more are opened while one is left"
    assert wanted == [0, 0, 4, 0, 0, 0, 4, 0, 0]
    assert soon == [0, 4, 0, 0, 0, 4, 0, 0, 0]
    requests.before = None
    assert {key: pool.store.get(key) for key in contents} == contents
    key = next(iter(contents))
    assert pool.store.put(key, value()) is CONFLICT
    assert pool.master.statistics().open_bytes == 2 * SIZE
    pool.store.close()
    assert pool.master.statistics().open_bytes == 0
    pool.master.check_invariants()


def test_a_taken_name_costs_one_request_and_the_next_put_asks_first(stack, monkeypatch, patient):
    pool = Pool(stack, posts=False)
    key, first = secrets.token_bytes(16), value()
    assert pool.store.put(key, first) is STORED
    warm(pool.store)
    requests = Requests(pool.store, monkeypatch)
    assert pool.store.put(key, value()) is CONFLICT
    assert requests.take() == ["Store"]
    assert pool.store.put(key, first) is EXISTS
    assert requests.take() == ["Allocate"]
    assert pool.store.put(secrets.token_bytes(16), value()) is STORED
    assert requests.take() == ["Allocate", "Finish"]
    assert pool.store.put(key, first) is EXISTS
    assert requests.take() == ["Store"]
    assert pool.store.get(key) == first
    assert pool.store.client.statistics().skipped_blocks == 3
    pool.store.remove_batch([key])
    pool.master.check_invariants()


def test_what_a_conflict_wrote_is_not_adopted_by_the_next_master(stack, monkeypatch, patient):
    masters = stack.enter_context(ExitStack())
    pool = Pool(stack, posts=False, open_put_s=20.0, heartbeat_s=0.1)
    key, first, second = secrets.token_bytes(16), value(), value()
    assert pool.store.put(key, first) is STORED
    kept = warm(pool.store)
    requests = Requests(pool.store, monkeypatch)
    segment = pool.nodes[0].segments[0]
    eventually(lambda: len(segment.index.blocks()) == 4, "the node knows all")
    assert pool.store.put(key, second) is CONFLICT
    assert requests.take() == ["Store"], "the fault needs bytes that were written"
    eventually(lambda: sum(b.key == key for b in segment.index.blocks()) == 1, "it is forgotten")
    restart(pool, masters)
    assert pool.store.get(key) == first
    # The place that is still held is of the master before: the next put finds that out.
    assert pool.store.put(secrets.token_bytes(16), value()) is STORED
    assert all(pool.store.get(k) is not None for k in kept)
    assert pool.master.statistics().corrupt_blocks == 0
    pool.master.check_invariants()


def restart(pool, stack):
    """Put an empty master in the place of the only one; wait until its nodes have told it all."""
    port = int(pool.master.address.rpartition(":")[2])
    before = pool.master.statistics()
    pool.master.close()
    pool.master = stack.enter_context(MasterServer(pool.config, secret=pool.secret, port=port))
    pool.masters[:] = [pool.master]
    eventually(lambda: pool.master.statistics().nodes == before.nodes, "nodes register again")


def test_a_place_of_an_earlier_master_is_written_in_vain(stack, monkeypatch, patient):
    masters = stack.enter_context(ExitStack())
    pool = Pool(stack, open_put_s=8.0, heartbeat_s=0.1)
    warm(pool.store)
    # Asked by the node whether it is at rest, the client would drop the place.
    monkeypatch.setattr(Settlement, "ask", lambda settlement: [])
    restart(pool, masters)
    requests = Requests(pool.store, monkeypatch)
    key, data = secrets.token_bytes(16), value()
    assert pool.store.put(key, data) is STORED
    assert requests.take()[:2] == ["Store", "Allocate"]
    assert pool.store.get(key) == data
    pool.master.check_invariants()


def test_a_lost_reply_is_asked_again_and_found_to_be_ours(stack, monkeypatch, patient):
    pool = Pool(stack)
    warm(pool.store)
    link = pool.store.client._link._link
    attempt, lost = link._attempt, []

    def lose_first(request, *args, **options):
        answer = attempt(request, *args, **options)
        if isinstance(request, m.Store) and not lost:
            lost.append(answer.reply)
            raise MasterUnavailable(operation="Store", address="x", problem="lost")
        return answer

    monkeypatch.setattr(link, "_attempt", lose_first)
    before = pool.store.client.statistics()
    key, data = secrets.token_bytes(16), value()
    assert pool.store.put(key, data) is STORED
    assert lost[0].outcome is STORED
    assert pool.store.get(key) == data
    now = pool.store.client.statistics()
    assert (now.stored_blocks, now.skipped_blocks) == (before.stored_blocks + 1, 0)
    assert pool.store.put(secrets.token_bytes(16), value()) is STORED
    figures = pool.master.statistics()
    assert (figures.blocks, figures.open_puts) == (5, 0)
    pool.store.close()
    assert pool.master.statistics().open_bytes == 0
    pool.master.check_invariants()


@pytest.mark.parametrize("handled", [False, True])
def test_a_place_whose_reply_never_came_is_not_written_again(stack, monkeypatch, patient, handled):
    pool = Pool(stack)
    warm(pool.store)
    requests = Requests(pool.store, monkeypatch)
    sent = []

    def lose(request):
        if isinstance(request, m.Store) and not sent:
            sent.append(request)
            raise MasterUnavailable(operation="Store", address="x", problem="lost")

    if handled:
        requests.after = lose
    else:
        requests.before = lose
    key, data = secrets.token_bytes(16), value()
    with pytest.raises(MasterUnavailable):
        pool.store.put(key, data)
    assert sent
    assert pool.store.get(key) == (data if handled else None)
    assert pool.store.put(secrets.token_bytes(16), value()) is STORED
    figures = pool.master.statistics()
    assert figures.open_bytes == SIZE, "the lost ones were given back, the new one is held"
    late = pool.store.client._link.ask(sent[0], m.Stored)
    assert (late.outcome, late.place) == (PutOutcome.FAILED, None), "it came too late"
    pool.store.close()
    assert pool.master.statistics().open_bytes == 0
    pool.master.check_invariants()


def test_an_idle_client_gives_its_places_back(stack):
    pool = Pool(stack)
    keys = warm(pool.store)
    eventually(lambda: pool.master.statistics().open_bytes == 0, "given back")
    eventually(lambda: pool.store.client.places._thread is None, "its thread is over")
    keys += warm(pool.store)
    eventually(lambda: pool.master.statistics().open_bytes == 0, "and again")
    pool.store.remove_batch(keys)
    check_empty(pool)


@pytest.mark.parametrize("dead", [False, True])
def test_the_places_of_a_client_that_is_gone(stack, monkeypatch, patient, dead):
    pool = Pool(stack)
    other = pool.connect()
    warm(other)
    requests = Requests(other, monkeypatch)
    name = other.client.core.record.name
    assert pool.master.statistics().open_bytes == SIZE
    (pool.master.confirm_dead if dead else pool.master.fence)([name])
    figures = pool.master.statistics()
    assert (figures.open_bytes, figures.quarantined_bytes) == (0, 0 if dead else SIZE)
    with pytest.raises(Fenced):
        other.put(secrets.token_bytes(16), value())
    assert requests.take() == ["Store"]
    pool.master.check_invariants()


def test_a_place_held_for_too_long_is_not_begun_with(stack, monkeypatch, patient):
    pool = Pool(stack, open_put_s=4.0)
    warm(pool.store)
    requests = Requests(pool.store, monkeypatch)
    time.sleep(2.4)  # more than half of what the master waits
    assert pool.store.put(secrets.token_bytes(16), value()) is STORED
    assert requests.take() == ["Reserve", "Store"]
    # One whose writer is slower still: it is quarantined, and free when the writer says so.
    places = pool.store.client.places._places
    ((kind, [place]),) = places.items()
    time.sleep(4.4)
    pool.store.exists("something")
    assert pool.master.statistics().quarantined_bytes == SIZE
    places[kind] = [place._replace(until_s=time.monotonic() + WAIT_S)]
    key, data = secrets.token_bytes(16), value()
    assert pool.store.put(key, data) is STORED
    assert requests.take()[1:3] == ["Store", "Allocate"]
    assert pool.store.get(key) == data
    assert pool.master.statistics().quarantined_bytes == 0
    pool.master.check_invariants()


def test_a_node_that_ends_between_grant_and_store(stack, monkeypatch, patient):
    pool = Pool(stack, nodes=2)
    warm(pool.store)
    ((place,),) = pool.store.client.places._places.values()
    (gone,) = [node for node in pool.nodes if node.name == place.where.node]
    gone.close()
    key, data = secrets.token_bytes(16), value()
    assert pool.store.put(key, data) is STORED
    assert pool.store.get(key) == data
    pool.master.check_invariants()


def test_what_is_unusual_goes_the_long_way(stack, monkeypatch, patient):
    pool = Pool(stack)
    warm(pool.store)
    requests = Requests(pool.store, monkeypatch)
    long = ["Allocate", "Finish"]
    for options in (PutOptions(replicas=2), PutOptions(chunk_bytes=64),
                    PutOptions(media=(m.Medium.DRAM,)), PutOptions(prefer=("x",))):  # fmt: skip
        assert pool.store.put(secrets.token_bytes(16), value(), options=options) is STORED
        assert requests.take()[:1] == long[:1]
    assert pool.store.put(secrets.token_bytes(16), [value(SIZE // 2)] * 2) is STORED
    assert requests.take()[:1] == long[:1]
    assert pool.store.put_batch([secrets.token_bytes(16)], [value()]) == (STORED,)
    assert requests.take()[:1] == long[:1]
    pinned = PutOptions(pin=Pin.HARD, group="g")
    assert pool.store.put("pinned", value(), options=pinned) is STORED
    assert requests.take() == ["Store"]
    assert pool.master.statistics().hard_pinned_blocks == 1
    assert pool.store.remove_batch([], group="g") == 1


def test_a_full_pool_has_no_place_ahead(stack, monkeypatch, patient):
    pool = Pool(stack, segment_bytes=16 * SIZE)
    requests = Requests(pool.store, monkeypatch)
    keys = [secrets.token_bytes(16) for _ in range(16)]
    for key in keys:
        assert pool.store.put(key, value()) is STORED
    assert "Store" not in requests.take()
    assert all(pool.store.exists_batch(keys)), "all of it holds blocks"


@pytest.mark.parametrize("posts", [True, False], ids=["posted", "asked"])
@pytest.mark.parametrize("masters", [1, 3])
def test_many_writers_of_the_same_names_agree(stack, masters, posts):
    pool = Pool(stack, nodes=2, masters=masters, posts=posts)
    stores = [pool.store, pool.connect(), pool.connect()]
    names = [secrets.token_bytes(16) for _ in range(60)]
    contents = {name: [value(), value()] for name in names}
    outcomes = [[] for _ in range(6)]

    def write(number):
        store = stores[number % 3]
        for name in names:
            outcomes[number].append(store.put(name, contents[name][number % 2]))

    threads = [threading.Thread(target=write, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    allowed = {STORED, EXISTS, CONFLICT, PutOutcome.IN_PROGRESS}
    for i, name in enumerate(names):
        results = [row[i] for row in outcomes]
        assert set(results) <= allowed
        assert results.count(STORED) == 1
        winner = results.index(STORED) % 2
        assert pool.store.get(name) == contents[name][winner]
        same = [r for number, r in enumerate(results) if number % 2 == winner]
        assert CONFLICT not in same
    pool.store.remove_batch(names)
    for store in stores:
        store.close()
    check_empty(pool)


def test_a_place_for_each_of_several_masters(stack, monkeypatch, patient):
    pool = Pool(stack, masters=2)
    keys = [secrets.token_bytes(16) for _ in range(40)]
    assert pool.store.put(keys[0], value()) is STORED
    requests = Requests(pool.store, monkeypatch)
    contents = {key: value() for key in keys[1:]}
    for key, data in contents.items():
        assert pool.store.put(key, data) is STORED
    assert requests.take().count("Reserve") == len({shard_of(key, 2) for key in contents})
    assert {key: pool.store.get(key) for key in contents} == contents
    held = [master.statistics().open_bytes for master in pool.masters]
    assert held == [SIZE, SIZE]
    pool.store.close()
    assert [master.statistics().open_bytes for master in pool.masters] == [0, 0]


def test_who_asks_for_rest_hears_of_it_when_no_place_is_written_any_more(
    stack, monkeypatch, patient
):
    pool = Pool(stack)
    warm(pool.store)
    under_way = pool.store.client.core.under_way
    ((place,),) = pool.store.client.places._places.values()
    target, told = (place.where.node, place.where.segment), []
    requests = Requests(pool.store, monkeypatch)
    under_way.when_at_rest(target, 1, lambda: told.append(1))
    assert told == [1]
    assert pool.store.put(secrets.token_bytes(16), value()) is STORED
    assert requests.take() == ["Reserve", "Store"], "what was held is not used"

    def ask(request):
        if isinstance(request, m.Store):  # its reply brings another place
            under_way.when_at_rest(target, 2, lambda: told.append(2))
            assert told == [1]

    requests.before = ask
    assert pool.store.put(secrets.token_bytes(16), value()) is STORED
    assert told == [1, 2]
    requests.before = None
    requests.take()
    assert pool.store.put(secrets.token_bytes(16), value()) is STORED
    assert requests.take() == ["Reserve", "Store"], "nor what came meanwhile"
    assert under_way.num_live() == 0
    pool.store.close()
    assert pool.master.statistics().open_bytes == 0


def test_coroutines_put_in_one_request_too(stack, monkeypatch, patient):
    pool = Pool(stack)
    warm(pool.store)
    requests = Requests(pool.store, monkeypatch)
    contents = {secrets.token_bytes(16): value() for _ in range(20)}
    asking, go = threading.Event(), threading.Event()

    def wait(request):
        asking.set()
        assert go.wait(WAIT_S)

    async def use():
        async with AsyncStore(pool.store) as aio:
            puts = (aio.put(key, data) for key, data in contents.items())
            outcomes = await asyncio.gather(*puts)
            asked = requests.take()
            requests.before = wait
            late = asyncio.ensure_future(aio.put("late", value()))
            while not asking.is_set():
                await asyncio.sleep(0.001)
            late.cancel()
            await asyncio.sleep(0.05)
            assert not late.done(), "its end is waited for"
            go.set()
            with pytest.raises(asyncio.CancelledError):
                await late
            return outcomes, asked

    outcomes, asked = asyncio.run(use())
    assert (set(outcomes), asked) == ({STORED}, ["Store"] * 20)
    assert {key: pool.store.get(key) for key in contents} == contents
    assert pool.store.exists("late")
    pool.store.close()
    assert pool.master.statistics().open_bytes == 0
