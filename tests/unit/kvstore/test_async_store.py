"""The store under asyncio: many calls at once over a few threads, cancellation that is safe."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time

import numpy as np
import pytest
import torch

from configs.schema import TransferBackend, TransferConfig
from kvstore import AsyncStore, GetOutcome, InvalidKey, MasterUnavailable, PutOutcome
from kvstore.client.pieces import Pieces
from tests.support.store_pool import Pool
from transfer import allocate


@pytest.mark.parametrize("backend", [TransferBackend.AUTO, TransferBackend.TCP])
def test_hundreds_of_calls_at_once_need_no_thread_each(stack, backend):
    pool = Pool(stack, segment_bytes=32 << 20)
    store = pool.connect(transfer=TransferConfig(backend=backend))
    values = {f"name {i}": secrets.token_bytes(1 + 37 * i) for i in range(200)}
    values["large"] = secrets.token_bytes(3 << 20)
    before = threading.active_count()

    async def use() -> int:
        async with AsyncStore(store) as pool:
            puts = (pool.put(name, value) for name, value in values.items())
            assert set(await asyncio.gather(*puts)) == {PutOutcome.STORED}
            found = await asyncio.gather(*(pool.get(name) for name in values))
            threads = threading.active_count() - before
            assert found == list(values.values())
            assert await pool.get("no such name") is None
            target = np.zeros(3 << 20, dtype=np.uint8)
            assert await pool.get_into("large", target) == 3 << 20
            assert target.tobytes() == values["large"]
            results = await pool.get_batch(["large", "none"])
            assert [r.outcome for r in results] == [GetOutcome.HIT, GetOutcome.MISS]
            assert await pool.exists_batch(["large", "none"]) == [True, False]
            assert await pool.remove("large")
            assert not await pool.exists("large")
            tensor = torch.randn(50, 3)
            assert await pool.put_tensor("tensor", tensor) is PutOutcome.STORED
            assert torch.equal(await pool.get_tensor("tensor"), tensor)
            assert await pool.get_tensor_into("tensor", torch.zeros(50, 3))
            with pytest.raises(InvalidKey):
                await pool.get("")
            return threads

    # Requests, contacts, two for large copies; the keeper of leases, and the engine's own.
    assert asyncio.run(use()) <= 7


def test_blocks_in_registered_memory(stack):
    pool = Pool(stack)
    memory = allocate(8192)
    stack.callback(memory.close)
    region = pool.store.register(memory)
    region.array[:4096] = np.frombuffer(secrets.token_bytes(4096), dtype=np.uint8)
    keys = [secrets.token_bytes(16) for _ in range(4)]
    pool.store.client.put(keys, region, np.arange(4) * 1024, 1024)

    async def use() -> None:
        async with AsyncStore(pool.store) as aio:
            hit = await aio.lookup_prefix([*keys, bytes(16)])
            with pool.store.client.hold(hit):
                assert await aio.get_ranges(hit, region, 4096 + np.arange(4) * 1024) == 4
                assert np.array_equal(region.array[:4096], region.array[4096:])
                region.array[4096:] = 0
                offsets = 4096 + np.arange(4) * 16
                assert await aio.get_ranges(hit, region, offsets, start=100, nbytes=16) == 4
                expected = region.array[:4096].reshape(4, 1024)[:, 100:116]
                assert np.array_equal(region.array[4096:4160].reshape(4, 16), expected)
            others = [secrets.token_bytes(16) for _ in range(2)]
            pieces = Pieces.of_blocks(region, np.array([0, 2048]), np.array([2048, 2048]))
            assert await aio.put_blocks(others, pieces) == (PutOutcome.STORED,) * 2
            assert await aio.get(others[1]) == region.array[2048:4096].tobytes()

    asyncio.run(use())


def test_a_cancelled_call_has_ended_when_it_says_so(stack):
    pool = Pool(stack)
    value = bytearray(secrets.token_bytes(1 << 20))
    ask, asking, go = pool.store.client._link.ask, threading.Event(), threading.Event()

    def slow(request, expected, **options):
        if type(request).__name__ == "Finish":
            asking.set()
            assert go.wait(30.0)
        return ask(request, expected, **options)

    pool.store.client._link.ask = slow
    pool.store.client._link.near_question = lambda request: None  # a thread makes all requests

    async def use() -> None:
        async with AsyncStore(pool.store) as aio:
            task = asyncio.ensure_future(aio.put("name", value))
            while not asking.is_set():
                await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.sleep(0.05)
            assert not task.done(), "its bytes may still be moving"
            go.set()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(use())
    assert pool.store.get("name") == bytes(value), "it was past the point of no return"
    assert pool.master.statistics().open_puts == 0


def test_the_loop_runs_on_while_the_master_is_silent(stack):
    pool = Pool(stack, request_timeout_s=3.0)
    store = pool.connect()
    pool.master.close()
    ticks = []

    async def tick() -> None:
        while True:
            ticks.append(time.monotonic())
            await asyncio.sleep(0.01)

    async def use() -> None:
        async with AsyncStore(store) as aio:
            ticking = asyncio.ensure_future(tick())
            with pytest.raises(MasterUnavailable):
                await aio.put("name", b"value", timeout_s=3.0)
            ticking.cancel()

    asyncio.run(use())
    assert len(ticks) > 5
