"""The replay counts what it says, against a count by hand and one by a plain simulation."""

from __future__ import annotations

import random
import secrets
from xml.etree import ElementTree as ET

import pytest

from benchmarks.bench_hit_rate import TIERINGS, Cache, Tiering, replay
from benchmarks.line_chart import Panel, line_charts
from configs.kvstore_policies import Admission
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
    assert replay(requests, Cache(policy, (None,))) == [2 / 9]


@pytest.mark.parametrize("tiering", TIERINGS)
@pytest.mark.parametrize("policy", Eviction)
def test_no_tier_holds_too_much_or_what_another_holds(policy, tiering):
    seed = secrets.randbits(32)
    cache = Cache(policy, (20, 50), tiering)
    for request in requests_of(random.Random(seed)):
        cache.count(request)
        parents = dict(zip(request[1:], request, strict=False))
        for block in reversed(request):
            cache.use(block, parents)
            assert any(block in policy for policy, _ in cache.tiers), seed
        dram, ssd = (set(policy.evictable()) for policy, _ in cache.tiers)
        assert len(dram) <= 20, seed
        assert len(ssd) <= 50, seed
        assert not dram & ssd, seed


def test_two_tiers_of_lru_hit_what_one_as_large_as_both_hits():
    seed = secrets.randbits(32)
    requests = list(requests_of(random.Random(seed)))
    both = replay(requests, Cache(Eviction.LRU, (20, 50)))
    (one,) = replay(requests, Cache(Eviction.LRU, (70,)))
    assert sum(both) == pytest.approx(one), seed
    assert both[0] == pytest.approx(replay(requests, Cache(Eviction.LRU, (20,)))[0]), seed


def test_what_was_not_used_again_is_not_written_to_the_ssd():
    requests = (
        [[i] for i in range(100)] + [[i] for i in range(95, 100)] + [[i] for i in range(200, 400)]
    )
    cache = Cache(Eviction.LRU, (10, 50), Tiering(Admission.SECOND_HIT, 1))
    replay(requests, cache)
    assert cache.ssd_writes == 5
    always = Cache(Eviction.LRU, (10, 50), Tiering(Admission.ALWAYS, 1))
    replay(requests, always)
    assert always.ssd_writes > 100


def test_charts_are_well_formed_and_have_every_line():
    panel = Panel(title="a < b", x="blocks", y="rate")
    for name in ("lru: x", "lru: y", "other"):
        for x in (1_000, 10_000, 100_000):
            panel.add(name, x, x / 200_000)
    root = ET.fromstring(line_charts([panel, panel]))
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert texts.count("a < b") == 2
    assert {"lru: x", "lru: y", "other"} <= set(texts)
