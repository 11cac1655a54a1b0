"""Pages through a real master in this process: by a buffer or directly, in one part or in many."""

from __future__ import annotations

import secrets
import time
from contextlib import ExitStack

import numpy as np
import pytest

from kvstore import InvalidValue
from kvstore.pages import PagedClient, PagedMemory, PageLayout, PageStrides, gathering, paged_client
from tests.support.store_pool import Pool
from transfer import Region, allocate

LAYOUT = PageLayout(
    model="m", dtype="bfloat16", layers=3, block_tokens=4, kv_heads=4, key_size=32, value_size=32
)
PAGES = 6
ORDER = "layer page token part head"


class Cache:
    def __init__(self, pool: Pool, stack: ExitStack) -> None:
        memory = allocate(PAGES * 4 * LAYOUT.block_bytes)
        stack.callback(memory.close)
        engine = pool.store.client.core.engine
        self.region: Region = engine.register(memory)
        stack.callback(engine.release, self.region)
        strides = PageStrides.packed(ORDER, LAYOUT, heads=4, pages=PAGES)
        self.memory = PagedMemory(regions=(self.region,), strides=strides)
        self.client = PagedClient(pool.store.client, LAYOUT, self.memory)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("buffer_bytes", [1, 3 * 4 * LAYOUT.block_bytes, 1 << 20])
def test_pages_come_back(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, direct: bool, buffer_bytes: int
) -> None:
    monkeypatch.setattr(gathering, "DIRECT_BYTES_MIN", 0 if direct else 1 << 30)
    monkeypatch.setattr(paged_client, "BUFFER_BYTES_MAX", buffer_bytes)
    pool = Pool(stack)
    cache = Cache(pool, stack)
    seed = time.time_ns()
    content = np.random.default_rng(seed).integers(0, 256, cache.region.nbytes, dtype=np.uint8)
    cache.region.array[:] = content
    keys = cache.client.keys(range(4 * PAGES))
    assert cache.client.put(keys, [5, 4, 3, 2, 1, 0]) == [True] * PAGES
    cache.region.array[:] = 0
    hit = cache.client.lookup([*keys[:4], secrets.token_bytes(16), keys[5]])
    assert hit.num_pages == 4
    assert cache.client.read(hit, [5, 4, 3]) == 3
    shape = (LAYOUT.layers, PAGES, -1)
    expected = content.reshape(shape).copy()
    expected[:, :3] = 0
    assert np.array_equal(cache.region.array.reshape(shape), expected), seed
    with pytest.raises(InvalidValue, match="5 pages wanted of 4"):
        cache.client.read(hit, range(5))
    assert cache.client.read(hit, []) == 0
    cache.client.release(hit)
    assert pool.store.client.master_statistics().leases == 0


def test_pages_and_keys_are_as_many(stack: ExitStack) -> None:
    cache = Cache(Pool(stack), stack)
    with pytest.raises(InvalidValue, match="1 keys of 2 pages"):
        cache.client.put([secrets.token_bytes(16)], [0, 1])
    assert cache.client.put([], []) == []


def test_regions_are_one_or_one_for_each_layer(stack: ExitStack) -> None:
    pool = Pool(stack)
    cache = Cache(pool, stack)
    memory = PagedMemory(regions=(cache.region,) * 2, strides=cache.memory.strides)
    with pytest.raises(InvalidValue, match="2 regions for 3 layers"):
        PagedClient(pool.store.client, LAYOUT, memory)
