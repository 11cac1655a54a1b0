"""A node that joins a pool in use gets a bounded share of the new blocks until it is filled."""

from __future__ import annotations

import random
import secrets
from collections import Counter
from collections.abc import Sequence

import pytest

from configs.kvstore_policies import FillingPolicy, PolicyConfig, TierPolicy
from kvstore.master.books.allocator import padded
from kvstore.wire import messages as m
from tests.support.planned_pool import LENGTH, PlannedPool

BATCH = 64
TIMES = 3  # a round of tests with fresh numbers each


@pytest.fixture(params=range(TIMES))
def rng() -> random.Random:
    seed = secrets.randbits(64)
    print(f"seed {seed}")
    return random.Random(seed)


def pool_of(*, puts_max: float = 2.0, tolerance: float = 0.05) -> PlannedPool:
    """A pool that moves nothing by itself."""
    filling = FillingPolicy(bytes_per_s=0, tolerance=tolerance, puts_max=puts_max)
    policies = PolicyConfig(filling=filling, tiers=TierPolicy(promotion_hits=0))
    return PlannedPool(policies, check_every=20)


class Writer:
    """Puts blocks of random sizes; counts where their bytes went."""

    def __init__(self, pool: PlannedPool, rng: random.Random, *, client: str = "writer") -> None:
        self.pool = pool
        self.rng = rng
        self.client = client
        self.bytes: Counter[str] = Counter()
        self.places: list[tuple[str, int]] = []

    def put(self, lengths: Sequence[int], **options) -> None:
        """Put blocks of these sizes; all of them must find a place."""
        pool, count = self.pool, len(lengths)
        pool.batches += 1
        keys = [self.rng.randbytes(16) for _ in lengths]
        replicas = options.get("replicas", 1)
        reply = pool.step(
            m.Allocate(self.client, pool.batches, keys, list(lengths), [7] * count, **options)
        )
        assert isinstance(reply, m.Allocated), reply
        assert reply.outcomes == [m.PutOutcome.GRANTED] * count
        granted = [place for place, node in enumerate(reply.node_idx) if node >= 0]
        assert len(granted) == count * replicas
        for place in granted:
            where, offset = reply.nodes[reply.node_idx[place]], reply.offsets[place]
            pool.bytes[(where.node, where.segment, offset)] = keys[place // replicas]
            self.bytes[where.node] += padded(lengths[place // replicas])
            self.places.append((where.node, offset))
        reply = pool.step(m.Finish(self.client, pool.batches, granted))
        assert isinstance(reply, m.Finished)
        assert all(reply.stored)

    def sizes(self, *, mixed: bool) -> list[int]:
        count = self.rng.choice([1, self.rng.randint(2, BATCH), BATCH])
        if not mixed:
            return [LENGTH] * count
        return [self.rng.randint(1, 2 * LENGTH) for _ in range(count)]

    def fill(self, nbytes: int, *, mixed: bool) -> None:
        goal = self.bytes.total() + nbytes
        while self.bytes.total() < goal:
            self.put(self.sizes(mixed=mixed))


def utilisation(pool: PlannedPool) -> float:
    """The share of all capacity that is in use."""
    segments = list(pool.catalog.pool)
    return 1 - sum(s.free for s in segments) / sum(s.capacity for s in segments)


def is_filling(pool: PlannedPool, name: str) -> bool:
    books = pool.catalog.pool
    books.joined.graduate(books, pool.now)
    return any(segment.node.name == name for segment in books if segment in books.joined)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("full", [False, True])
def test_a_joined_node_gets_its_share_and_not_more(rng, mixed: bool, full: bool) -> None:
    puts_max = rng.choice([0.5, 1.0, 2.0, 4.0])
    pool = pool_of(puts_max=puts_max)
    blocks = {f"old {i}": rng.randint(300, 600) for i in range(3)}
    for name, capacity in blocks.items():
        pool.join(name, capacity)
    old_bytes = sum(blocks.values()) * LENGTH
    writer = Writer(pool, rng)
    writer.fill(old_bytes * 2 if full else old_bytes // 2, mixed=mixed)
    before = {name: pool.used(name) for name in blocks}

    blocks["new"] = rng.randint(300, 600)
    pool.join("new", blocks["new"])
    weight = puts_max * blocks["new"] * LENGTH
    bound = weight / (weight + old_bytes)
    writer.bytes.clear()
    while is_filling(pool, "new"):
        assert pool.used("new") < utilisation(pool)
        writer.put(writer.sizes(mixed=mixed))
        total = writer.bytes.total()
        if is_filling(pool, "new"):
            assert writer.bytes["new"] <= bound * total + 1e-6
        if total > BATCH * 2 * LENGTH * 10:
            assert writer.bytes["new"] >= 0.5 * bound * total, "it is filled, slowly"
        if not full and pool.catalog.counts["evicted"]:
            assert all(pool.used(name) > 0.9 for name in before), "what is free is used first"
            full = True
        assert total < 100 * old_bytes
    assert writer.bytes["new"] > 0
    if min(before.values()) > 0.9:
        assert all(pool.used(name) >= before[name] - 0.15 for name in before)
    writer.fill(old_bytes * 2, mixed=mixed)
    assert utilisation(pool) > 0.9, "all of it is used in the end"
    pool.check()


def test_a_pool_that_starts_empty_is_filled_as_if_nobody_had_joined(rng) -> None:
    sizes = [rng.randint(100, 400) for _ in range(rng.randint(1, 5))]
    seed = rng.randrange(1 << 64)
    places = []
    for forget in (False, True):
        pool = pool_of()
        for number, blocks in enumerate(sizes):
            pool.join(f"node {number}", blocks)
        if forget:
            for segment in pool.catalog.pool:
                pool.catalog.pool.joined.discard(segment)
        writer = Writer(pool, random.Random(seed))
        writer.fill(sum(sizes) * LENGTH * 2, mixed=True)
        places.append(writer.places)
        assert not pool.catalog.pool.joined
    assert places[0] == places[1]


def joined(rng, *, old: int = 1, pin: m.Pin = m.Pin.NONE) -> tuple[PlannedPool, Writer]:
    """Full nodes of pinned or other blocks, and an empty one."""
    pool = pool_of()
    for number in range(old):
        pool.join(f"old {number}", 2 * BATCH)
    writer = Writer(pool, rng)
    for _ in range(2 * old):
        writer.put([LENGTH] * BATCH, pin=pin)
    pool.join("new", 4 * BATCH)
    writer.bytes.clear()
    return pool, writer


@pytest.mark.parametrize("others", [1, 2, 3])
def test_several_that_joined_share(rng, others: int) -> None:
    pool, writer = joined(rng, old=3)
    names = ["new"] + [f"more {number}" for number in range(others)]
    for name in names[1:]:
        pool.join(name, 4 * BATCH)
    share = 8 / (3 * 2 + 8 * len(names))
    for _ in range(100):
        writer.put([LENGTH] * rng.randint(1, 3))
        rest = writer.bytes.total() - sum(writer.bytes[name] for name in names)
        for name in names:
            assert writer.bytes[name] <= 8 / (3 * 2) * rest + 1e-6
    for name in names:
        assert writer.bytes[name] >= 0.5 * share * writer.bytes.total()


class TestNoPutFailsForIt:
    def test_where_others_may_evict_nothing(self, rng) -> None:
        pool, writer = joined(rng, old=3, pin=m.Pin.HARD)
        for _ in range(3):
            writer.put([LENGTH] * BATCH)
        assert writer.bytes == {"new": 3 * BATCH * LENGTH}
        pool.check()

    def test_of_the_second_replica(self, rng) -> None:
        _, writer = joined(rng)
        writer.put([LENGTH] * BATCH, replicas=2)
        assert writer.bytes == {"old 0": BATCH * LENGTH, "new": BATCH * LENGTH}

    def test_of_a_block_that_fits_nowhere_else(self, rng) -> None:
        _, writer = joined(rng)
        writer.put([3 * BATCH * LENGTH])
        assert writer.bytes == {"new": 3 * BATCH * LENGTH}


class TestOtherRulesComeFirst:
    def test_a_writer_at_home_still_writes_elsewhere(self, rng) -> None:
        pool, _ = joined(rng)
        writer = Writer(pool, rng, client="old 0")
        for _ in range(3):
            writer.put([LENGTH] * BATCH)
        assert writer.bytes == {"new": 3 * BATCH * LENGTH}

    def test_a_preferred_node_is_used_at_once(self, rng) -> None:
        _, writer = joined(rng, old=3)
        writer.put([LENGTH] * BATCH, prefer=["new"])
        assert writer.bytes == {"new": BATCH * LENGTH}

    def test_an_avoided_node_is_not_used(self, rng) -> None:
        _, writer = joined(rng, old=3)
        for _ in range(5):
            writer.put([LENGTH] * BATCH, avoid=["new"])
        assert not writer.bytes["new"]

    def test_a_node_that_left_or_drains_has_no_account(self, rng) -> None:
        pool, writer = joined(rng, old=3)
        pool.step(m.Drain("new"))
        writer.put([LENGTH] * BATCH)
        assert not writer.bytes["new"]
        pool.step(m.Leave("new"))
        assert not pool.catalog.pool.joined
