"""The short ways of values under asyncio: no thread, no wait in the loop, nothing half done."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import threading
import time
from contextlib import ExitStack

import numpy as np
import pytest

from configs.schema import TransferBackend, TransferConfig
from kvstore import AsyncStore, MasterServer, MasterUnavailable, PutOutcome, RegionPiece
from kvstore.client.near_question import NearQuestion
from kvstore.wire.master_link import ATTEMPT_S
from tests.support.store_pool import WAIT_S, Pool
from tests.support.waits import eventually
from transfer import allocate

STORED, EXISTS, CONFLICT = PutOutcome.STORED, PutOutcome.EXISTS, PutOutcome.CONFLICT


class Asked:
    """What a store asks, by the loop and by threads."""

    def __init__(self, store, monkeypatch):
        self.near, self.far = [], []
        ask, begin = store.client._link.ask, NearQuestion.ask

        def listen(request, expected, **options):
            self.far.append(type(request).__name__)
            return ask(request, expected, **options)

        def listen_near(part, *args, **options):
            self.near.append(type(part).__name__)
            return begin(part, *args, **options)

        monkeypatch.setattr(store.client._link, "ask", listen)
        monkeypatch.setattr(NearQuestion, "ask", listen_near)

    def take(self):
        taken = self.near, self.far
        self.near, self.far = [], []
        return taken


class Stall:
    """Holds up a master's requests of one kind until it is let go."""

    def __init__(self, pool, monkeypatch, kind):
        self.entered, self.go = threading.Event(), threading.Event()
        server = pool.master._server
        handle = server._handler

        def wait(identity, request):
            if kind in request[:40]:
                self.entered.set()
                assert self.go.wait(WAIT_S)
            return handle(identity, request)

        monkeypatch.setattr(server, "_handler", wait)


def check_empty(pool):
    pool.store.close()

    def all_free():
        for master in pool.masters:
            master.check_invariants()
        found = [master.statistics() for master in pool.masters]
        return all(f.open_bytes == f.leases == f.open_puts == 0 for f in found)

    eventually(all_free, "no place, lease or put is left")


@pytest.mark.parametrize("masters", [1, 3])
def test_a_hot_value_is_read_without_a_request_and_a_put_takes_one(stack, monkeypatch, masters):
    pool = Pool(stack, masters=masters)
    contents = {secrets.token_bytes(16): secrets.token_bytes(4096) for _ in range(40)}
    for key, data in contents.items():
        assert pool.store.put(key, data) is STORED
    name, data = next(iter(contents.items()))

    async def use():
        async with AsyncStore(pool.store) as aio:
            assert await aio.get(name) == data  # the segment is reached, the line is there
            asked = Asked(pool.store, monkeypatch)
            await asyncio.sleep(0.1)  # the first lease is released
            asked.take()
            target = bytearray(5000)
            for _ in range(20):
                assert await aio.get(name) == data
                assert await aio.get_into(name, target) == 4096
                assert target[:4096] == data
            near, _ = asked.take()
            assert near.count("Lookup") <= 1
            assert pool.store.client.statistics().hot_blocks >= 38
            took_s = ATTEMPT_S
            while took_s >= ATTEMPT_S:  # what took so long was asked again, and rightly so
                fresh = {secrets.token_bytes(16): secrets.token_bytes(4096) for _ in range(50)}
                asked.take()
                began_s = time.monotonic()
                outcomes = await asyncio.gather(*(aio.put(k, v) for k, v in fresh.items()))
                took_s = time.monotonic() - began_s
                assert set(outcomes) == {STORED}
                near, far = asked.take()
            if pool.store.client.posts.box is not None:
                assert near.count("Store") + far.count("Store") <= 25, "most are posted"
            else:
                assert near.count("Store") + far.count("Store") == 50
                assert near.count("Store") >= 50 - masters
            assert masters == 1 or pool.store.client.posts.box is None
            assert "Allocate" not in near + far
            found = await asyncio.gather(*(aio.get(k) for k in fresh))
            assert found == list(fresh.values())
            assert [await aio.put(k, v) for k, v in list(fresh.items())[:2]] == [EXISTS] * 2
            assert await aio.put(next(iter(fresh)), secrets.token_bytes(4096)) is CONFLICT
            assert await aio.remove(name)
            assert await aio.get(name) is None

    asyncio.run(use())
    assert pool.store.get(name) is None
    check_empty(pool)


@pytest.mark.parametrize("backend", [TransferBackend.AUTO, TransferBackend.TCP])
def test_a_hundred_tasks_read_and_write_what_they_should(stack, backend):
    # A hundred tasks wait for one another, on a busy machine for long.
    pool = Pool(stack, segment_bytes=64 << 20, masters=2, request_timeout_s=120.0)
    store = pool.connect(transfer=TransferConfig(backend=backend))
    memory = allocate(1 << 20)
    stack.callback(memory.close)
    region = store.register(memory)
    seed = time.time_ns()
    rng = random.Random(seed)
    sizes = [1, 100, 4096, 40_000, 70_000, 300_000]
    shared = {f"shared {i}": rng.randbytes(rng.choice(sizes)) for i in range(10)}

    async def work(aio, number):
        mine = {}
        for turn in range(6):
            name = f"{number} {turn}"
            mine[name] = rng.randbytes(rng.choice(sizes))
            if number == 0:
                region.array[: len(mine[name])] = np.frombuffer(mine[name], dtype=np.uint8)
                value = RegionPiece(region, 0, len(mine[name]))
                assert await aio.put(name, value) is STORED, seed
            else:
                assert await aio.put(name, mine[name]) is STORED, seed
            common = rng.choice(list(shared))
            outcome = await aio.put(common, shared[common])
            assert outcome in (STORED, EXISTS, PutOutcome.IN_PROGRESS), seed
            found = await aio.get(common)
            assert found is None or found == shared[common], seed
            for mine_too in rng.sample(list(mine), min(2, len(mine))):
                target = np.zeros(300_000, dtype=np.uint8)
                nbytes = await aio.get_into(mine_too, target)
                assert target[:nbytes].tobytes() == mine[mine_too], seed
                assert await aio.get(mine_too) == mine[mine_too], seed

    async def use():
        async with AsyncStore(store) as aio:
            await asyncio.gather(*(work(aio, number) for number in range(100)))

    asyncio.run(use())
    store.close()
    check_empty(pool)


@pytest.mark.parametrize("kind", [b"lookup", b"store"])
def test_a_stopped_master_holds_up_no_loop_and_a_cancelled_call_ends_first(
    stack, monkeypatch, kind
):
    pool = Pool(stack)
    for number in range(3):
        assert pool.store.put(f"warm {number}", bytes(100)) is STORED

    async def use():
        async with AsyncStore(pool.store) as aio:
            assert await aio.get("warm 0") == bytes(100)
            stall = Stall(pool, monkeypatch, kind)
            call = aio.get("warm 1") if kind == b"lookup" else aio.put("late", bytes(100))
            task = asyncio.ensure_future(call)
            ticks = 0
            while not stall.entered.is_set() or ticks < 20:
                await asyncio.sleep(0.001)
                ticks += 1
            task.cancel()
            await asyncio.sleep(0.05)
            assert not task.done(), "its end is waited for"
            stall.go.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            if kind == b"store":
                assert await aio.get("late") == bytes(100)

    asyncio.run(use())
    check_empty(pool)


def test_a_master_that_is_away_is_found_again(stack):
    """What is under way is asked again if it may be, a lookup says that nobody is there."""
    masters = stack.enter_context(ExitStack())  # closed after those who take leave of them
    pool = Pool(stack)
    for number in range(3):
        assert pool.store.put(f"warm {number}", bytes(100)) is STORED

    async def use():
        async with AsyncStore(pool.store) as aio:
            assert await aio.put("before", b"x" * 100) is STORED
            port = int(pool.master.address.rpartition(":")[2])
            pool.master.close()
            with pytest.raises(MasterUnavailable):
                await aio.get("before", timeout_s=0.3)
            put = asyncio.ensure_future(aio.put("meanwhile", b"y" * 100, timeout_s=WAIT_S))
            await asyncio.sleep(0.05)
            assert not put.done()
            again = MasterServer(pool.config, secret=pool.secret, port=port, rebuild_s=5.0)
            pool.masters = [masters.enter_context(again)]
            assert await put is STORED
            deadline = time.monotonic() + WAIT_S
            found = None
            while found is None:  # its node has yet to tell; nobody is asked for a moment
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
                with contextlib.suppress(MasterUnavailable):
                    found = await aio.get("before")
            assert await aio.get("meanwhile") == b"y" * 100

    asyncio.run(use())
    check_empty(pool)


def test_several_loops_one_after_the_other(stack):
    pool = Pool(stack)
    aio = AsyncStore(pool.store)
    stack.callback(aio.close)

    async def use(number):
        puts = (aio.put(f"{number} {i}", bytes(200)) for i in range(20))
        assert set(await asyncio.gather(*puts)) == {STORED}
        assert await aio.get(f"{number} 3") == bytes(200)

    for number in range(3):
        asyncio.run(use(number))


def test_puts_that_are_posted_by_the_loop_let_others_have_their_turn(stack):
    pool = Pool(stack)
    values = [secrets.token_bytes(random.randint(300, 200_000)) for _ in range(60)]
    for data in values:  # all sizes are put again and again
        assert pool.store.put(secrets.token_bytes(16), data) is STORED
    turns = 0

    async def count():
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async def use():
        async with AsyncStore(pool.store) as aio:
            counting = asyncio.ensure_future(count())
            for data in values:
                name = secrets.token_bytes(16)
                assert await aio.put(name, data) is STORED
                assert pool.store.get(name) == data
                assert await aio.put(name, data) is EXISTS
                assert await aio.put(name, secrets.token_bytes(len(data))) is CONFLICT
            counting.cancel()

    asyncio.run(use())
    assert turns >= sum(map(len, values)) // (1 << 20), "the loop was given up now and then"
    check_empty(pool)
