"""What earns a copy: admission, promotion, hot blocks, filling; and names that are forgotten."""

from __future__ import annotations

import random

import pytest

from configs.kvstore_policies import Admission, TierPolicy
from kvstore.master.books.recent_names import RecentCounts
from kvstore.master.copies.admission import SsdAdmission
from kvstore.master.copies.filling import Budget, Fill, transfers
from kvstore.master.copies.hot_blocks import SAMPLE, HotBlocks
from kvstore.master.copies.promotion import Promotion


def test_names_are_remembered_for_one_generation_and_at_most_two():
    counts = RecentCounts(names_max=10, span_s=5.0)
    assert counts.see("a", 0.0) == 1
    assert counts.see("a", 4.0) == 2
    assert counts.see("b", 6.0) == 1
    assert counts.count("a") == 2
    assert counts.see("b", 12.0) == 2
    assert counts.count("a") == 0
    counts.see("c", 100.0)
    assert counts.count("b") == 0, "a silence forgets both generations"


def test_names_are_bounded():
    counts = RecentCounts(names_max=100)
    for i in range(10_000):
        counts.see(i)
        assert len(counts) <= 200
    assert counts.count(9_999) == 1
    assert counts.count(0) == 0


def test_admission_rules():
    names = range(20)
    for rule in Admission:
        admission = SsdAdmission(rule, names_max=100)
        admission.used(names[:5])
        admitted = [name for name in names if admission.admits(name)]
        expected = {Admission.ALWAYS: 20, Admission.NEVER: 0, Admission.SECOND_HIT: 5}[rule]
        assert len(admitted) == expected
        assert admission.counts_uses == (rule is Admission.SECOND_HIT)


@pytest.mark.parametrize("hits", [1, 2, 5])
def test_so_many_hits_in_the_window_promote_once(hits):
    promotion = Promotion(hits=hits, window_s=10.0)
    assert [promotion.hit("a", 0.1 * i) for i in range(2 * hits)] == (
        [False] * (hits - 1) + [True]
    ) * 2
    if hits > 1:
        assert not any(promotion.hit("b", 30.0 * i) for i in range(20)), "too far apart"


def test_promotion_can_be_off():
    assert not any(Promotion(hits=0, window_s=1.0).hit("a", 0.0) for _ in range(10))


def test_hot_blocks_are_told_once_per_so_many_hits():
    hot = HotBlocks(hits=10, window_s=5.0)
    told = [hot.hit(["a"], 0.01 * i) for i in range(25)]
    assert [i for i, names in enumerate(told) if names] == [9, 19]
    assert not any(HotBlocks(hits=0, window_s=5.0).hit(["a"], 0.0) for _ in range(99))


def test_long_runs_are_sampled_and_weighed():
    hot = HotBlocks(hits=100, window_s=1e6)
    run = [f"block {i}" for i in range(SAMPLE * 4)]
    told = [name for i in range(1000) for name in hot.hit(run, float(i))]
    assert set(told) == set(run)
    assert len(told) == pytest.approx(len(run) * 1000 / 100, rel=0.1)


def test_a_budget_grows_with_time_and_never_jumps():
    budget = Budget(1000)
    assert budget.left(5.0) == 0
    assert budget.left(5.5) == 500
    budget.spend(900)
    assert -200 <= budget.left(5.7) < -190
    assert budget.left(100.0) == 1000
    assert Budget(0).left(1e9) == 0


def test_transfers_bring_shares_together_and_go_no_further():
    for _ in range(200):
        rng = random.Random(seed := random.randrange(1 << 30))
        fills = [
            Fill(i, rng.randint(0, capacity), capacity)
            for i, capacity in enumerate(rng.choices([100, 1000, 5000], k=rng.randint(1, 6)))
        ]
        mean = sum(f.used_bytes for f in fills) / sum(f.capacity_bytes for f in fills)
        used = {f.segment: f.used_bytes for f in fills}
        nbytes_max = rng.randint(0, 10_000)
        targets = rng.choice([None, [0], [0, 1]])
        plan = transfers(fills, targets=targets, tolerance=0.05, nbytes_max=nbytes_max)
        for source, target, nbytes in plan:
            assert nbytes > 0, seed
            assert targets is None or target in targets, seed
            used[source] -= nbytes
            used[target] += nbytes
        assert sum(nbytes for _, _, nbytes in plan) <= nbytes_max, seed
        for fill in fills:
            after = used[fill.segment] / fill.capacity_bytes
            low, high = sorted((fill.share, mean))
            assert low - 0.02 <= after <= high + 0.02, (seed, fill, after, mean)


def test_an_even_pool_is_left_alone():
    fills = [Fill(0, 500, 1000), Fill(1, 480, 1000)]
    assert transfers(fills, targets=None, tolerance=0.05, nbytes_max=1 << 30) == []
    assert transfers([], targets=None, tolerance=0.05, nbytes_max=1) == []


def test_watermarks_are_ordered():
    with pytest.raises(ValueError, match="demotion_low"):
        TierPolicy(demotion_low=0.2, demotion_high=0.1)
