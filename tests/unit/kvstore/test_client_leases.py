"""Leases that are kept, lost and let go, over a real master in this process."""

from __future__ import annotations

import math
import secrets
import threading
import time

import numpy as np
import pytest

from kvstore import (
    InvalidValue,
    LeaseExpired,
    PutOptions,
    PutOutcome,
    StoreClosed,
    TooManyHolds,
)
from kvstore.client.lease import Lease
from kvstore.client.lease_keeper import HELD_MAX, LeaseKeeper
from kvstore.errors import MasterUnavailable
from kvstore.wire import messages as m
from tests.support.store_pool import Pool
from tests.support.waits import eventually
from transfer import allocate

BLOCK = 4096


def filled(stack, number, *, chunk_bytes=0, **knobs):
    """-> pool, keys of blocks in it, region with their bytes in its first half"""
    pool = Pool(stack, **knobs)
    memory = allocate(2 * number * BLOCK)
    stack.callback(memory.close)
    region = pool.store.register(memory)
    half = number * BLOCK
    region.array[:half] = np.frombuffer(secrets.token_bytes(half), dtype=np.uint8)
    keys = [secrets.token_bytes(16) for _ in range(number)]
    options = PutOptions(chunk_bytes=chunk_bytes)
    outcomes = pool.store.client.put(
        keys, region, np.arange(number) * BLOCK, BLOCK, options=options
    )
    assert set(outcomes) == {"stored"}
    return pool, keys, region


@pytest.mark.parametrize("chunk_bytes", [0, 512])
def test_a_held_hit_is_read_layer_by_layer_long_after_its_lease(stack, chunk_bytes):
    pool, keys, region = filled(stack, 4, chunk_bytes=chunk_bytes, lease_s=3.0)
    client = pool.store.client
    layers, layer_bytes = 8, BLOCK // 8
    with client.hold(client.lookup_prefix(keys)) as held:
        for layer in range(layers):
            # Target: [layer][block][bytes], as an attention layer wants it.
            offsets = 4 * BLOCK + (layer * 4 + np.arange(4)) * layer_bytes
            good = client.get_ranges(
                held.hit, region, offsets, start=layer * layer_bytes, nbytes=layer_bytes
            )
            assert good == 4
            time.sleep(0.5)
        assert not held.lost
    source = region.array[: 4 * BLOCK].reshape(4, layers, layer_bytes)
    target = region.array[4 * BLOCK :].reshape(layers, 4, layer_bytes)
    assert np.array_equal(source.transpose(1, 0, 2), target)
    eventually(lambda: pool.master.statistics().leases == 0, "the lease is given back")


def test_what_is_held_is_not_evicted(stack):
    pool, keys, region = filled(stack, 4, segment_bytes=1 << 16, lease_s=3.0)
    client = pool.store.client
    with client.hold(client.lookup_prefix(keys)) as held:
        for i in range(40):
            pool.store.put(f"pressure {i}", secrets.token_bytes(BLOCK))
            time.sleep(0.1)  # in all for longer than the lease
        assert client.get_into(held.hit, region, 4 * BLOCK + np.arange(4) * BLOCK) == 4
    assert np.array_equal(region.array[: 4 * BLOCK], region.array[4 * BLOCK :])
    assert pool.master.statistics().evicted_blocks > 0


def test_what_is_removed_can_be_read_by_who_holds_it(stack):
    pool, keys, region = filled(stack, 3)
    client, other = pool.store.client, pool.connect()
    offsets = 3 * BLOCK + np.arange(3) * BLOCK
    with client.hold(client.lookup_prefix(keys)) as held:
        assert other.remove_batch(keys) == 3
        assert other.client.lookup_prefix(keys).num_blocks == 0
        assert other.put(keys[0], b"other bytes") is PutOutcome.STORED
        assert client.get_into(held.hit, region, offsets) == 3
        assert np.array_equal(region.array[: 3 * BLOCK], region.array[3 * BLOCK :])
    assert other.remove(keys[0])

    def all_free():
        figures = pool.master.statistics()
        return figures.free_bytes == figures.capacity_bytes

    eventually(all_free, "its bytes are free once nobody holds them")


def test_leases_that_nobody_waits_for_are_released_together(stack):
    pool, keys, _ = filled(stack, 3)
    client = pool.store.client
    hits = [client.lookup([key]) for key in keys]
    assert pool.master.statistics().leases == 3
    for hit in hits:
        client.release(hit, wait=False)
    client.release(client.lookup([secrets.token_bytes(16)]), wait=False)  # a miss has none
    eventually(lambda: pool.master.statistics().leases == 0, "they are released in the background")


@pytest.mark.parametrize(
    ("start", "nbytes"),
    [(-1, 5), (BLOCK - 1, 2), (BLOCK, 1), (0, 0), (0, BLOCK + 1), ((1 << 63) - 5, 9)],
)
def test_ranges_outside_of_a_block_are_refused(stack, start, nbytes):
    pool, keys, region = filled(stack, 1)
    client = pool.store.client
    hit = client.lookup_prefix(keys)
    with pytest.raises(InvalidValue):
        client.get_ranges(hit, region, [0], start=start, nbytes=nbytes)
    client.release(hit)


def test_reads_go_on_while_no_master_answers(stack):
    pool, keys, region = filled(stack, 2, lease_s=0.6, request_timeout_s=6.0)
    client = pool.store.client
    offsets = 2 * BLOCK + np.arange(2) * BLOCK
    name, value = "hot", secrets.token_bytes(BLOCK)
    pool.store.put(name, value)
    assert [pool.store.get(name) for _ in range(3)] == [value] * 3
    with client.hold(client.lookup_prefix(keys)) as held:
        pool.master.close()
        eventually(lambda: held.hit.lease.adrift, "its time is over, and nobody renewed it")
        assert not held.lost
        region.array[2 * BLOCK :] = 0
        assert client.get_into(held.hit, region, offsets) == 2
        assert np.array_equal(region.array[: 2 * BLOCK], region.array[2 * BLOCK :])
        assert pool.store.get(name) == value, "known places are read on"
        with pytest.raises(MasterUnavailable):
            pool.store.get("another")
        # Somebody else's bytes are there now, for all this client knows.
        segment = pool.nodes[0].segments[0].region.array
        segment[int(held.hit.offsets[1]) + 9] ^= 1
        with pytest.raises(LeaseExpired):
            client.get_into(held.hit, region, offsets)
        segment[int(held.hit.offsets[1]) + 9] ^= 1


def test_a_master_that_forgot_a_lease_ends_it(stack):
    pool, keys, region = filled(stack, 2, lease_s=0.6)
    client = pool.store.client
    with client.hold(client.lookup_prefix(keys)) as held:
        pool.master.lead(term=1, until_s=math.inf)  # as one that has just started
        eventually(lambda: held.lost, "it does not know the lease")
        eventually(lambda: held.hit.lease.late_s() > 0, "nor does it run for ever")
        with pytest.raises(LeaseExpired):
            client.get_into(held.hit, region, np.arange(2) * BLOCK)
    assert client.statistics().lost_leases == 1


def test_a_hold_that_nobody_closes_ends_by_itself(stack):
    pool, keys, _ = filled(stack, 2, lease_s=0.3)
    client = pool.store.client
    held = client.hold(client.lookup_prefix(keys), max_s=0.5)
    eventually(lambda: pool.master.statistics().leases == 0, "it is renewed no more")
    assert held.lost
    held.close()
    held.close()


def test_an_empty_hit_holds_nothing(stack):
    pool = Pool(stack)
    hit = pool.store.client.lookup_prefix([secrets.token_bytes(16)])
    with pool.store.client.hold(hit) as held:
        assert held.hit.num_blocks == 0
        assert not held.lost


def test_a_closed_client_holds_nothing_and_renews_nothing(stack):
    pool, keys, _ = filled(stack, 2)
    client = pool.store.client
    client.hold(client.lookup_prefix(keys))
    pool.store.close()
    assert pool.master.statistics().leases == 0, "released at the close"
    with pytest.raises(StoreClosed):
        client.leases.keep(Lease(7, time.monotonic() + 5), max_s=9.0)


# -- the keeper alone, with a master that does as it is told --------------------------------------


class Script:
    """Answers renewals as told, and remembers what was asked."""

    def __init__(self) -> None:
        self.running: dict[int, bool] = {}
        self.failing = False
        self.asked: list[list[int]] = []
        self.released: list[int] = []
        self.lost = 0
        self.lease_s = 0.3

    def renew(self, lease_ids, timeout_s):
        assert 0 < timeout_s < 60
        self.asked.append(list(lease_ids))
        if self.failing:
            raise MasterUnavailable(operation="Renew", address="x", problem="gone")
        return m.Renewed([self.running.get(i, True) for i in lease_ids], self.lease_s)

    def times(self, lease_id):
        return sum(lease_id in asked for asked in list(self.asked))

    def release(self, lease_ids):
        self.released += lease_ids

    def on_lost(self, number):
        self.lost += number


@pytest.fixture
def keeper():
    script = Script()
    keeper = LeaseKeeper(script.renew, script.release, script.on_lost)
    yield keeper, script
    keeper.close()


def lease(lease_id, seconds=0.3):
    return Lease(lease_id, time.monotonic() + seconds)


def test_many_leases_are_renewed_by_one_request_and_one_thread(keeper):
    keeper, script = keeper
    script.lease_s = 4.0
    leases = [lease(i, 4.0) for i in range(1, 200)]
    for one in leases:
        keeper.keep(one, max_s=60.0)
    eventually(lambda: all(script.times(i) >= 2 for i in range(1, 200)), "all are renewed again")
    assert [thread.name for thread in threading.enumerate()].count("store-leases") == 1
    assert len(script.asked) < sum(map(len, script.asked)) / 4, "not one request per lease"
    assert not any(one.lost or one.adrift for one in leases)
    for one in leases:
        keeper.drop(one)
    eventually(lambda: len(script.released) == 199, "all are released together")


def test_losses_are_told_each_by_its_own_lease(keeper):
    keeper, script = keeper
    script.running[2] = False
    kept, refused = lease(1), lease(2)
    keeper.keep(kept, max_s=60.0)
    keeper.keep(refused, max_s=60.0)
    eventually(lambda: refused.lost, "the master does not know it")
    assert not kept.lost
    keeper.drop(refused)
    keeper.drop(kept)
    eventually(lambda: script.released == [1], "what is lost need not be released")


def test_a_silent_master_is_asked_again_and_again(keeper):
    keeper, script = keeper
    script.failing = True
    one, other = lease(1, 0.6), lease(2, 30.0)
    keeper.keep(one, max_s=60.0)
    keeper.keep(other, max_s=60.0)
    eventually(lambda: one.adrift, "its time was over")
    eventually(lambda: script.times(1) > 1, "it is asked for again")
    assert not one.lost
    assert not other.adrift
    script.failing = False
    eventually(lambda: not one.adrift and one.late_s() < 0, "renewed after all")


def test_holds_are_bounded(keeper):
    keeper, _ = keeper
    for i in range(HELD_MAX):
        keeper.keep(lease(i + 1, 1e3), max_s=1e4)
    with pytest.raises(TooManyHolds) as caught:
        keeper.keep(lease(HELD_MAX + 1, 1e3), max_s=1e4)
    assert caught.value.held == HELD_MAX
