"""The replay counts what it says, against a count by hand and one by a plain simulation."""

from __future__ import annotations

import random
import secrets

import pytest

from benchmarks.bench_hit_rate import Cache, replay
from configs.schema import Eviction


def requests_of(rng):
    """Conversations that grow by some blocks at every turn, all behind one system prompt."""
    talks, fresh = [[0, 1] for _ in range(12)], 2
    for _ in range(150):
        talk = rng.choice(talks)
        for _ in range(rng.randint(1, 5)):
            talk.append(fresh)
            fresh += 1
        yield list(talk[: rng.randint(1, 30)])


@pytest.mark.parametrize("policy", Eviction)
def test_only_whole_prefixes_are_hits(policy):
    requests = [[1, 2, 3], [1, 2, 4], [9, 2, 3]]
    assert replay(requests, (policy,), (None,)) == [2 / 9]


@pytest.mark.parametrize("policy", Eviction)
def test_no_tier_holds_too_much_or_what_another_holds(policy):
    seed = secrets.randbits(32)
    cache = Cache((policy, policy), (20, 50))
    for request in requests_of(random.Random(seed)):
        cache.count(request)
        parents = dict(zip(request[1:], request, strict=False))
        for block in reversed(request):
            cache.use(block, parents)
            assert block in cache.tiers[0][0], seed
        dram, ssd = (set(policy.evictable()) for policy, _ in cache.tiers)
        assert len(dram) <= 20, seed
        assert len(ssd) <= 50, seed
        assert not dram & ssd, seed


def test_two_tiers_of_lru_hit_what_one_as_large_as_both_hits():
    seed = secrets.randbits(32)
    requests = list(requests_of(random.Random(seed)))
    both = replay(requests, (Eviction.LRU,) * 2, (20, 50))
    assert sum(both) == pytest.approx(replay(requests, (Eviction.LRU,), (70,))[0]), seed
    assert both[0] == pytest.approx(replay(requests, (Eviction.LRU,), (20,))[0]), seed
