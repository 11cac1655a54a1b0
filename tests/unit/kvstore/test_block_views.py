"""Blocks of a hit that are read where they lie, and those that are copied beside them."""

from __future__ import annotations

import asyncio
import secrets

import numpy as np
import pytest

from configs.schema import TransferBackend, TransferConfig
from kvstore import AsyncStore, LeaseExpired, PutOptions, StoreClosed, TooManyViews
from tests.support.lending_node import three_media
from tests.support.store_pool import Pool
from tests.support.waits import eventually
from transfer import allocate


def filled(stack, pool, sizes, **options):
    """-> keys, values of blocks in the pool"""
    values = [secrets.token_bytes(nbytes) for nbytes in sizes]
    keys = [secrets.token_bytes(16) for _ in sizes]
    outcomes = pool.store.put_batch(keys, values, options=PutOptions(**options))
    assert set(outcomes) == {"stored"}
    return keys, values


def all_given_back(pool):
    eventually(lambda: pool.master.statistics().leases == 0, "the leases are given back")
    pool.master.check_invariants()


@pytest.mark.parametrize("chunk_bytes", [0, 1000])
def test_blocks_of_several_nodes_are_read_in_place(stack, chunk_bytes):
    pool = Pool(stack, nodes=2, segment_bytes=32 << 20)
    sizes = [1, 240, 241, 70_000, *([1 << 20] * 12)]
    keys, values = filled(stack, pool, sizes, chunk_bytes=chunk_bytes)
    client = pool.connect().client
    hit = client.lookup_prefix(keys)
    assert len(hit.nodes) == 2
    with client.view(hit) as view:
        assert view.in_place
        assert view.placed.all()
        assert view.num_good == len(keys)
        for i, value in enumerate(values):
            assert view.memory(i) == value
            assert view.memory(i).readonly
            assert not view.memory(i).obj.flags.writeable
        assert view.held()
        assert view.lies_right()
    with pytest.raises(StoreClosed):
        view.memory(0)
    all_given_back(pool)


def test_what_lies_elsewhere_is_copied_beside_the_rest(stack, tmp_path):
    segments = three_media(tmp_path, 1 << 20)[:2]
    pool = Pool(stack, segments=segments)
    keys, values = filled(stack, pool, [5000] * 20)
    on_disk, more = filled(stack, pool, [5000] * 20, media=("ssd",))
    keys, values = [*keys, *on_disk], [*values, *more]
    with pool.store.client.view(pool.store.client.lookup_prefix(keys)) as view:
        assert view.placed.any()
        assert not view.placed.all()
        assert [bytes(view.memory(i)) for i in range(len(keys))] == values
    forced = pool.connect(transfer=TransferConfig(backend=TransferBackend.TCP)).client
    with forced.view(forced.lookup_prefix(keys)) as view:
        assert not view.in_place
        assert view.num_good == len(keys)
        assert [bytes(view.memory(i)) for i in range(len(keys))] == values
        all_given_back(pool)
    with forced.view(forced.lookup_prefix([secrets.token_bytes(16)])) as view:
        assert view.num_good == 0


def test_a_damaged_block_ends_the_run_and_takes_nothing_along(stack):
    pool = Pool(stack)
    keys, values = filled(stack, pool, [5000] * 6)
    segment, client = pool.nodes[0].segments[0].region.array, pool.store.client
    segment[segment.tobytes().index(values[3]) + 9] ^= 1
    with client.view(client.lookup_prefix(keys)) as view:
        assert view.num_good == 3
        assert view.good.tolist() == [True] * 3 + [False] + [True] * 2
        assert view.memory(3) is None
        assert view.memory(5) == values[5]
    assert client.lookup_prefix(keys).num_blocks == 3, "it was reported"
    client.leases.close()


def test_what_was_made_of_one_block_keeps_all_of_them(stack):
    pool = Pool(stack, segment_bytes=1 << 16, lease_s=3.0)
    keys, values = filled(stack, pool, [5000] * 3)
    client = pool.store.client
    with client.view(client.lookup_prefix(keys)) as view:
        made = np.frombuffer(view.memory(1), dtype=np.uint8)[7:]
        first_s = view._lease.deadline_s
    eventually(lambda: view._lease.deadline_s > first_s, "the lease is renewed")
    for _ in range(60):
        pool.store.put(secrets.token_hex(8), secrets.token_bytes(5000))
    view.check()
    assert made.tobytes() == values[1][7:]
    del made
    all_given_back(pool)


def test_bounds_and_expired_leases(stack):
    pool = Pool(stack, view_bytes=10_000, lease_s=0.3)
    keys, _ = filled(stack, pool, [4000] * 3)
    client = pool.store.client
    with pytest.raises(TooManyViews), client.view(client.lookup_prefix(keys)):
        pass
    hit = client.lookup_prefix(keys[:2])
    eventually(lambda: hit.lease.late_s() > 0, "it ends")
    with pytest.raises(LeaseExpired), client.view(hit):
        pass
    all_given_back(pool)


def test_in_an_event_loop(stack):
    pool = Pool(stack)
    keys, values = filled(stack, pool, [300_000] * 4)
    memory = allocate(4096)
    stack.callback(memory.close)

    async def run():
        async with AsyncStore(pool.store) as store:
            hit = await store.lookup_prefix(keys)
            async with store.view_blocks(hit) as view:
                assert view.placed.all()
                assert [bytes(view.memory(i)) for i in range(4)] == values

    asyncio.run(run())
    all_given_back(pool)
