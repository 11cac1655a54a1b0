"""Values that are read where they lie: what is handed out, how long it stays, who is told."""

from __future__ import annotations

import asyncio
import gc
import math
import secrets
import threading
import time

import numpy as np
import pytest

from configs.schema import TransferBackend, TransferConfig
from kvstore import (
    AsyncStore,
    BlockCorrupt,
    BlockUnreachable,
    InvalidKey,
    InvalidValue,
    LeaseLost,
    MasterUnavailable,
    PutOptions,
    PutOutcome,
    Store,
    StoreClient,
    StoreClosed,
    TooManyViews,
)
from tests.support.lending_node import three_media
from tests.support.store_pool import WAIT_S, Pool
from tests.support.waits import eventually

STORED = PutOutcome.STORED
SIZES = (1, 100, 240, 241, 5000, 65_536, (1 << 20) + 7, (8 << 20) + 12_345)


def stored(store, name, nbytes, **options):
    value = secrets.token_bytes(nbytes)
    assert store.put(name, value, options=PutOptions(**options)) is STORED
    return value


def all_given_back(pool):
    """No lease is left but those of hot places, and none once their owners are closed."""
    pool.store.quick_reads.hot.close()
    eventually(lambda: pool.master.statistics().leases == 0, "the leases are given back")
    pool.master.check_invariants()


@pytest.mark.parametrize("chunk_bytes", [0, 4096])
def test_what_is_viewed_is_what_was_put_and_lies_in_the_pool(stack, chunk_bytes):
    pool = Pool(stack, segment_bytes=32 << 20)
    segment = pool.nodes[0].segments[0].region.array
    for nbytes in SIZES:
        value = stored(pool.store, f"of {nbytes}", nbytes, chunk_bytes=chunk_bytes)
        for _ in range(4):  # looked up, looked up again, hot
            with pool.store.view(f"of {nbytes}") as view:
                assert view.in_place
                assert view.held()
                assert view.memory == value
                assert len(view) == view.nbytes == len(view.memory) == nbytes
                assert view.lies_right()
    with pool.store.view(f"of {nbytes}") as view:
        at = segment.tobytes().index(value)
        segment[at] ^= 1
        assert view.memory[0] == value[0] ^ 1, "it is the pool's memory, no copy"
        assert not view.lies_right()
        segment[at] ^= 1
    assert pool.store.client.statistics().hot_blocks > 0
    all_given_back(pool)


def test_a_client_that_never_read_there_views_in_place_at_once(stack):
    pool = Pool(stack)
    value = stored(pool.store, "name", 70_000)
    with pool.connect().view("name") as view:
        assert view.in_place
        assert view.memory == value


def test_of_a_node_in_this_process_too(stack):
    pool = Pool(stack)
    node = pool.nodes[0]
    client = StoreClient(
        node._engine, pool.addresses, pool.config, secret=pool.secret, local_node=node
    )
    node._engine.on_notify(client.on_notify)
    stack.enter_context(client)
    store = stack.enter_context(Store(client))
    value = stored(pool.store, "name", 70_000)
    for _ in range(3):
        with store.view("name") as view:
            assert view.in_place
            assert view.memory == value
        assert store.get("name") == value


def test_nothing_can_be_written_through_it(stack):
    pool = Pool(stack)
    value = stored(pool.store, "name", 4096)
    with pool.store.view("name") as view:
        with pytest.raises(TypeError):
            view.memory[0] = 1
        array = np.frombuffer(view.memory, dtype=np.uint8)
        assert not array.flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True
        del array
    assert pool.store.get("name") == value


@pytest.mark.parametrize("where", ["tcp", "disk"])
def test_what_is_not_mapped_here_is_copied_and_says_so(stack, tmp_path, where):
    if where == "disk":
        pool, transfer = Pool(stack, segments=three_media(tmp_path, 4 << 20)[1:2]), TransferConfig()
    else:
        pool, transfer = Pool(stack), TransferConfig(backend=TransferBackend.TCP)
    store = pool.connect(transfer=transfer)
    for nbytes in (1, 5000, 300_000):
        value = stored(store, f"of {nbytes}", nbytes)
        for _ in range(3):
            with store.view(f"of {nbytes}") as view:
                assert not view.in_place
                assert view.held()
                assert view.memory == value
                assert view.memory.readonly
    store.quick_reads.hot.close()
    all_given_back(pool)


def test_misses_and_faults_are_those_of_get(stack):
    pool = Pool(stack)
    with pool.store.view("nobody") as view:
        assert view is None
    segment = pool.nodes[0].segments[0].region.array
    for chunk_bytes in (0, 1000):
        value = stored(pool.store, "name", 50_000, chunk_bytes=chunk_bytes)
        segment[segment.tobytes().index(value) + 40_000] ^= 1
        with pytest.raises(BlockCorrupt), pool.store.view("name"):
            pass
        with pool.store.view("name") as view:
            assert view is None
    with pytest.raises(InvalidKey):
        pool.store.view("")
    with pytest.raises(InvalidValue, match="max_s must be"):
        pool.store.view("name", max_s=math.nan)
    all_given_back(pool)


def test_another_copy_is_read_where_one_is_damaged_or_its_node_is_gone(stack):
    pool = Pool(stack, nodes=2)
    value = stored(pool.store, "name", 50_000, replicas=2)
    arrays = [node.segments[0].region.array for node in pool.nodes]
    eventually(lambda: all(value in a.tobytes() for a in arrays), "both have it")
    arrays[0][arrays[0].tobytes().index(value) + 9] ^= 1
    for _ in range(10):  # whichever is asked
        with pool.connect().view("name") as view:
            assert view.memory == value
    value = stored(pool.store, "another", 50_000, replicas=2)
    pool.nodes[0].close()
    for _ in range(3):
        with pool.connect().view("another") as view:
            assert view.memory == value


def test_what_is_out_of_reach_is_told_as_by_get(stack):
    pool = Pool(stack)
    stored(pool.store, "name", 5000)
    pool.nodes[0]._engine.close()  # without a word to the master
    with pytest.raises(BlockUnreachable), pool.store.view("name", timeout_s=2.0):
        pass


def renewed(view):
    """Wait until a view's lease was renewed."""
    first_s = view._lease.deadline_s
    eventually(lambda: view._lease.deadline_s > first_s, "its lease is renewed")


def test_what_is_viewed_is_not_evicted(stack):
    pool = Pool(stack, segment_bytes=1 << 16, lease_s=3.0)
    value = stored(pool.store, "viewed", 5000)
    with pool.store.view("viewed") as view:
        renewed(view)
        for _ in range(60):
            pool.store.put(secrets.token_hex(8), secrets.token_bytes(5000))
        assert view.held()
        assert view.memory == value
    assert pool.master.statistics().evicted_blocks > 20
    all_given_back(pool)


def test_what_is_removed_stays_until_the_view_ends(stack):
    pool = Pool(stack, segment_bytes=1 << 16)
    other = pool.connect()
    value = stored(pool.store, "name", 5000)
    for store in (other, pool.store):
        with pool.store.view("name") as view:
            assert store.remove("name")
            assert other.get("name") is None
            assert other.put("name", b"other bytes") is STORED
            for _ in range(30):
                other.put(secrets.token_hex(8), secrets.token_bytes(5000))
            assert view.memory == value
        pool.store.quick_reads.hot.close()
        other.remove("name")
        value = stored(other, "name", 5000)
    all_given_back(pool)


def test_what_this_store_removes_under_its_view_is_not_found_afterwards(stack):
    pool = Pool(stack)
    value = stored(pool.store, "name", 5000)
    for _ in range(3):
        with pool.store.view("name") as view:
            assert view.memory == value
    with pool.store.view("name") as view:
        assert pool.store.remove("name")
    assert pool.store.get("name") is None
    with pool.store.view("name") as view:
        assert view is None


def test_views_of_one_hot_value_at_once_have_leases_of_their_own(stack):
    pool = Pool(stack)
    value = stored(pool.store, "name", 5000)
    for _ in range(3):
        with pool.store.view("name"):
            pass
    with pool.store.view("name") as one, pool.store.view("name") as other:
        with pool.store.view("name") as third:
            assert third.memory == value
        assert one.held()
        assert other.held()
        assert pool.store.get("name") == value
    assert one._lease is not other._lease
    all_given_back(pool)


# -- leases that end -------------------------------------------------------------------------------


def test_a_master_that_forgot_the_lease_leaves_it_to_the_checksum_and_then_to_nobody(stack):
    pool = Pool(stack, lease_s=1.0)
    stored(pool.store, "name", 5000)
    viewing = pool.store.view("name")
    view = viewing.__enter__()
    pool.master.lead(term=1, until_s=math.inf)  # as one that has just started
    eventually(lambda: view._lease.lost, "the new one does not know it")
    assert not view.held()
    if view._lease.late_s() < -0.2:
        view.check()  # the bytes are right, and stay for the time of a lease
    eventually(lambda: view._lease.late_s() > 0, "not for ever")
    with pytest.raises(LeaseLost, match="not renewed any more") as caught:
        viewing.__exit__(None, None, None)
    assert caught.value.lease_id > 1 << 20, "its numbers are none of an earlier master's"
    assert caught.value.retryable


def test_no_master_is_no_loss_as_long_as_the_bytes_are_right(stack):
    pool = Pool(stack, lease_s=0.6, request_timeout_s=6.0)
    value = stored(pool.store, "name", 5000)
    for _ in range(3):
        with pool.store.view("name"):
            pass
    with pool.store.view("name") as view:
        pool.master.close()
        eventually(lambda: view._lease.adrift, "nobody renewed it")
        assert not view.held()
        view.check()
        assert view.memory == value
    with pool.store.view("name") as view:  # known places are read on
        assert view.memory == value
        segment = pool.nodes[0].segments[0].region.array
        segment[segment.tobytes().index(value) + 7] ^= 1
        with pytest.raises(LeaseLost):
            view.check()
        segment[:] = 0
        with pytest.raises(LeaseLost):
            view.check()
        view.close()


def test_a_view_that_is_open_for_too_long_says_so_at_its_end(stack):
    pool = Pool(stack, lease_s=0.3)
    stored(pool.store, "name", 5000)
    for error in (None, KeyError()):
        viewing = pool.store.view("name", max_s=0.1)
        view = viewing.__enter__()
        eventually(lambda view=view: view._lease.late_s() > 0, "it is renewed no more")
        eventually(lambda: pool.master.statistics().leases == 0, "nor pins it the pool")
        if error is None:
            with pytest.raises(LeaseLost):
                viewing.__exit__(None, None, None)
        else:  # is on its way, and what is told
            viewing.__exit__(KeyError, error, None)
        assert view.closed
    all_given_back(pool)


def test_whoever_is_late_cannot_prove_anything(stack, monkeypatch):
    pool = Pool(stack, lease_s=0.5)
    stored(pool.store, "name", 5000)
    stopped = threading.Event()

    def stand_still(*_):
        stopped.wait(WAIT_S)
        raise MasterUnavailable(operation="Renew", address="x", problem="by the test")

    monkeypatch.setattr(pool.store.client.leases, "_renew", stand_still)
    viewing = pool.store.view("name")
    view = viewing.__enter__()
    eventually(lambda: view._lease.late_s() > 0, "its keeper stands still")
    assert view.lies_right(), "which is no proof"
    with pytest.raises(LeaseLost, match="not renewed in time"):
        viewing.__exit__(None, None, None)
    stopped.set()


# -- what outlives a view --------------------------------------------------------------------------


def test_what_was_made_of_it_keeps_the_lease_until_it_is_gone(stack):
    pool = Pool(stack, segment_bytes=1 << 16, lease_s=3.0)
    makes = (
        lambda memory: np.frombuffer(memory, dtype=np.uint8),
        lambda memory: memory[100:],
        lambda memory: np.asarray(memory)[100:].reshape(-1, 70)[1:],
    )
    values = [stored(pool.store, f"name {i}", 5000) for i in range(len(makes))]
    made, views = [], []
    for i, make in enumerate(makes):
        with pool.store.view(f"name {i}") as view:
            made.append(make(view.memory))
            views.append(view)
        with pytest.raises(StoreClosed):
            _ = view.memory
        assert view.closed
    renewed(views[0])
    for _ in range(60):
        pool.store.put(secrets.token_hex(8), secrets.token_bytes(5000))
    for value, one in zip(values, made, strict=True):
        assert bytes(one)[-1000:] == value[-1000:]
    for view in views:
        view.check()
        assert view.held()
    pool.store.quick_reads.hot.close()
    assert pool.master.statistics().leases == len(makes)
    del one
    made.clear()
    all_given_back(pool)


def test_a_view_that_nobody_closes_ends_with_the_last_who_knows_of_it(stack):
    pool = Pool(stack, lease_s=2.0)
    stored(pool.store, "name", 5000)
    view = pool.store.view("name").__enter__()
    memory, lease = view.memory, view._lease
    first_s = lease.deadline_s
    del view
    gc.collect()
    eventually(lambda: lease.deadline_s > first_s, "its lease is renewed")
    assert pool.master.statistics().leases == 1
    del memory
    all_given_back(pool)
    with pool.store.view("name") as view:
        memory = view.memory
    with pytest.raises(ValueError, match="released"):
        memory[0]  # of the memory itself, nobody reads on


def test_a_store_that_is_closed_under_a_view_leaves_its_bytes_readable(stack):
    pool = Pool(stack)
    store = pool.connect()
    value = stored(store, "name", 5000)
    with store.view("name") as view:
        array = np.frombuffer(view.memory, dtype=np.uint8)
        store.close()
        assert not view.held()
        view.check()  # as far as can be seen
        assert view.memory == value
    assert pool.master.statistics().leases == 0
    assert array.sum() == np.frombuffer(value, dtype=np.uint8).sum()
    with pytest.raises(StoreClosed), store.view("name"):
        pass
    store = pool.connect()
    viewing = store.view("name")
    assert viewing.__enter__().in_place
    store.close()
    segment = pool.nodes[0].segments[0].region.array
    segment[segment.tobytes().index(value)] ^= 1
    with pytest.raises(LeaseLost, match="other bytes"):
        viewing.__exit__(None, None, None)


def test_a_node_that_is_closed_under_a_view_leaves_its_bytes_readable(stack):
    pool = Pool(stack)
    value = stored(pool.store, "name", 5000)
    with pool.store.view("name") as view:
        pool.nodes[0].close()
        pool.nodes[0]._engine.close()
        assert view.memory == value
    pool.master.check_invariants()


# -- bounds, threads, event loops ------------------------------------------------------------------


def test_a_client_holds_no_more_bytes_in_place_than_it_may(stack):
    pool = Pool(stack, view_bytes=10_000)
    for name in "abc":
        stored(pool.store, name, 5000)
    for _ in range(3):  # hot ones are refused likewise
        with pool.store.view("a"), pool.store.view("b") as kept:
            with pytest.raises(TooManyViews) as caught, pool.store.view("c"):
                pass
            assert (caught.value.nbytes, caught.value.held_bytes) == (5000, 10_000)
            assert kept.held()
        with pool.store.view("c"), pool.store.view("a"):
            pass
    made = []
    with pool.store.view("a") as view:
        made.append(view.memory[1:])
    with pool.store.view("b"), pytest.raises(TooManyViews), pool.store.view("c"):
        pass
    made.clear()
    with pool.store.view("b"), pool.store.view("c"):
        pass
    all_given_back(pool)


def test_many_threads_view_while_others_remove_and_put(stack):
    pool = Pool(stack, segment_bytes=1 << 20, lease_s=2.0)
    other, names = pool.connect(), [f"name {i}" for i in range(12)]
    values = {name: secrets.token_bytes(20_000 + i) for i, name in enumerate(names)}
    end, seen, wrong = time.monotonic() + 1.2, [], []

    def read(number):
        rng = np.random.default_rng(number)
        while time.monotonic() < end:
            name = names[rng.integers(len(names))]
            with pool.store.view(name) as view:
                if view is not None:
                    time.sleep(rng.random() / 500)
                    seen.append(view.in_place)
                    if view.memory != values[name]:
                        wrong.append(name)

    def write():
        rng = np.random.default_rng(99)
        while time.monotonic() < end:
            name = names[rng.integers(len(names))]
            other.put(name, values[name])
            other.put(secrets.token_hex(8), secrets.token_bytes(20_000))
            if rng.random() < 0.3:
                (other, pool.store)[rng.integers(2)].remove(name)

    threads = [threading.Thread(target=read, args=(i,)) for i in range(4)]
    threads.append(threading.Thread(target=write))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert sum(seen) > 10
    all_given_back(pool)


def test_in_an_event_loop(stack):
    pool = Pool(stack, segment_bytes=32 << 20)
    values = {f"of {n}": stored(pool.store, f"of {n}", n) for n in SIZES}
    copied = pool.connect(transfer=TransferConfig(backend=TransferBackend.TCP))

    async def one(store, name, in_place):
        for _ in range(4):
            async with store.view(name) as view:
                await asyncio.sleep(0.001)
                assert view.in_place is in_place
                assert view.memory == values[name]

    async def run():
        async with AsyncStore(pool.store) as store, AsyncStore(copied) as other:
            await asyncio.gather(*(one(store, name, True) for name in values))
            await asyncio.gather(*(one(other, name, False) for name in values))
            async with store.view("nobody") as view:
                assert view is None
            with pytest.raises(KeyError):
                async with store.view("of 100"):
                    raise KeyError

    asyncio.run(run())
    copied.quick_reads.hot.close()
    all_given_back(pool)
