"""Timeouts that are none: refused by name at every call, before anything is asked."""

from __future__ import annotations

import asyncio
import inspect
import math
import secrets

import numpy as np
import pytest
import torch

from kvstore import AsyncStore, InvalidValue, Pin, PutOptions, PutOutcome, Store
from kvstore.client.pieces import Pieces
from kvstore.client.store_client import StoreClient
from kvstore.events.chains import Link
from tests.support.store_pool import Pool
from transfer import allocate

NONSENSE = [math.nan, math.inf, -math.inf, 1e30, True, "1", b"1", [1.0], np.float32("nan"), object]
KEY = secrets.token_bytes(16)
NAMED = {
    "put": ("name", b"value"),
    "put_batch": (["name"], [b"value"]),
    "put_tensor": ("tensor", torch.arange(8)),
    "remove": ("name",),
    "remove_batch": (["name"],),
    "set_pin": (["name"], Pin.SOFT),
    "get": ("name",),
    "get_batch": (["name"],),
    "get_into": ("name", bytearray(100)),
    "get_batch_into": (["name"], [bytearray(100)]),
    "get_tensor": ("tensor",),
    "view": ("name",),
    "view_tensor": ("tensor",),
    "get_tensor_into": ("tensor", torch.zeros(8, dtype=torch.int64)),
    "exists": ("name",),
    "exists_batch": (["name"],),
    "lookup_prefix": ([KEY],),
}


def of_blocks(hit, region):
    """Arguments of the calls that are about blocks."""
    pieces = Pieces.of_blocks(region, [0], np.array([64]))
    return {
        "lookup_prefix": ([KEY],),
        "lookup": ([KEY],),
        "view": (hit,),
        "get_into": (hit, region, [0]),
        "copy": (hit, pieces),
        "exists": ([KEY],),
        "put": ([KEY], region, [0], [64]),
        "put_pieces": ([KEY], pieces, PutOptions()),
        "describe": ([KEY], [Link(None, b"four")]),
        "put_blocks": ([KEY], pieces),
        "set_pin": ([KEY], Pin.SOFT),
        "remove": ([KEY],),
    }


def registered(stack, store):
    memory = allocate(4096)
    stack.callback(memory.close)
    return store.register(memory)


def asked(pool):
    """What the master was asked for, but for leases, which are given back a moment later."""
    found = pool.master.statistics()
    return found.hit_blocks, found.missed_blocks, found.stored_blocks, found.blocks


def timed(kind):
    """The public methods that take a timeout."""
    return {
        name
        for name, method in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_") and "timeout_s" in inspect.signature(method).parameters
    } - {"put_quickly", "put_slowly"}


@pytest.mark.parametrize("timeout_s", NONSENSE, ids=repr)
def test_each_call_names_the_argument_and_asks_nothing(stack, timeout_s):
    pool = Pool(stack)
    store = pool.store
    region = registered(stack, store)
    hot = secrets.token_bytes(16)
    for _ in range(4):  # hot: it needs no master from here on
        store.put(hot, b"hot")
        assert store.get(hot) == b"hot"
    store.client.put([KEY], region, [0], [64])
    hit = store.client.lookup([KEY])
    before = asked(pool)

    def refuse(call, *given, **options):
        with pytest.raises(InvalidValue, match="timeout_s must be") as caught:
            call(*given, timeout_s=timeout_s, **options)
        assert not caught.value.retryable

    tried = set()
    for name, given in {**NAMED, "get ": (hot,), "get_into ": (hot, bytearray(9))}.items():
        if hasattr(Store, name.strip()):
            refuse(getattr(store, name.strip()), *given)
            tried.add(name.strip())
    assert tried == timed(Store)
    client, tried = store.client, {"get_ranges"}
    refuse(client.get_ranges, hit, region, [0], start=0, nbytes=1)
    for name, given in of_blocks(hit, region).items():
        if hasattr(StoreClient, name):
            refuse(getattr(client, name), *given)
            tried.add(name)
    assert tried == timed(StoreClient)
    assert asked(pool) == before
    assert store.get(hot) == b"hot"
    client.release(hit)


@pytest.mark.parametrize("timeout_s", NONSENSE[:6], ids=repr)
def test_asynchronous_calls_too(stack, timeout_s):
    pool = Pool(stack)
    region = registered(stack, pool.store)
    pool.store.client.put([KEY], region, [0], [64])
    hit = pool.store.client.lookup([KEY])
    before = asked(pool)

    async def main():
        async with AsyncStore(pool.connect()) as store:
            blocks, tried = of_blocks(hit, region), set()
            given = {
                **NAMED,
                "put_blocks": blocks["put_blocks"],
                "view_blocks": (hit,),
                "get_ranges": (hit, region, [0]),
            }
            for name in timed(AsyncStore):
                with pytest.raises(InvalidValue, match="timeout_s must be"):
                    await getattr(store, name)(*given[name], timeout_s=timeout_s)
                tried.add(name)
            assert "get" in tried

    asyncio.run(main())
    assert asked(pool) == before
    pool.store.client.release(hit)


def test_what_is_a_time_is_taken(stack):
    store = Pool(stack).store
    for timeout_s in (20, 20.0, np.float64(20), 3.2e8):
        name = secrets.token_bytes(16)
        assert store.put(name, b"value", timeout_s=timeout_s) is PutOutcome.STORED
        assert store.get(name, timeout_s=timeout_s) == b"value"
        assert store.exists(name, timeout_s=timeout_s)


def test_a_node_is_not_waited_for_without_an_end(stack):
    node = Pool(stack).nodes[0]
    for timeout_s in NONSENSE:
        with pytest.raises(InvalidValue, match="timeout_s must be"):
            node.wait_registered(timeout_s)
    assert node.wait_registered(0.0)
