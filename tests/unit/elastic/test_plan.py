"""Plans: every expert held, nothing moved without need, balanced, the same everywhere."""

from __future__ import annotations

import random

import pytest

from dispatch import ExpertMap
from elastic import plan
from elastic.errors import NoSurvivors
from tests.support.membership_network import member


def random_map(choose: random.Random) -> ExpertMap:
    layers, experts = choose.randint(1, 5), choose.choice((1, 2, 8, 60, 128))
    ranks = choose.sample(range(64), choose.randint(2, 9))
    if choose.random() < 0.4:
        return ExpertMap.even(num_layers=layers, num_logical=experts, ranks=ranks)
    held: dict[int, list[set[int]]] = {r: [set() for _ in range(layers)] for r in ranks}
    for layer in range(layers):
        for expert in range(experts):
            for rank in choose.sample(ranks, choose.choice((1, 1, 1, 2))):
                held[rank][layer].add(expert)
    placement = {r: tuple(tuple(sorted(s)) for s in held[r]) for r in ranks}
    return ExpertMap(num_layers=layers, num_logical=experts, placement=placement)


def counts(found: ExpertMap, layer: int) -> list[int]:
    return [len(found.experts_of(rank, layer)) for rank in found.ranks]


def test_the_drawn_example() -> None:
    before = ExpertMap.even(num_layers=1, num_logical=8, ranks=[0, 1, 2, 3])
    after = plan.cover_orphans(before, [0, 1, 2])
    assert [after.experts_of(r, 0) for r in (0, 1, 2)] == [(0, 1, 6), (2, 3, 7), (4, 5)]


def test_losses() -> None:
    seed = random.randrange(1 << 32)
    choose = random.Random(seed)
    for _ in range(200):
        before = random_map(choose)
        survivors = choose.sample(before.ranks, choose.randint(1, len(before.ranks)))
        after = plan.cover_orphans(before, survivors)
        assert after == plan.cover_orphans(before, survivors[::-1]), f"seed {seed}"
        assert after.ranks == tuple(sorted(survivors))
        assert not after.missing(), f"seed {seed}"
        orphans = set(before.without(set(before.ranks) - set(survivors)).missing())
        for rank in survivors:
            for layer in range(before.num_layers):
                old, new = (set(m.experts_of(rank, layer)) for m in (before, after))
                assert old <= new, f"seed {seed}: an expert was taken away"
                assert {(layer, e) for e in new - old} <= orphans, f"seed {seed}: needless copy"
        for layer in range(before.num_layers):
            # Filling the emptiest first never makes a layer less even than it had to be.
            grown = [
                len(after.experts_of(r, layer))
                for r in survivors
                if len(after.experts_of(r, layer)) > len(before.experts_of(r, layer))
            ]
            if grown:
                assert max(grown) <= min(counts(after, layer)) + 1, f"seed {seed}"


def test_gains() -> None:
    seed = random.randrange(1 << 32)
    choose = random.Random(seed)
    for _ in range(200):
        before = random_map(choose)
        rank = next(r for r in range(65) if r not in before.ranks)
        after = plan.with_joiner(before, rank)
        assert after == plan.with_joiner(before, rank)
        assert not after.missing(), f"seed {seed}"
        for layer in range(before.num_layers):
            total = sum(counts(before, layer))
            assert sum(counts(after, layer)) == total
            taken = after.experts_of(rank, layer)
            assert len(taken) <= -(-total // len(after.ranks)), f"seed {seed}"
            for other in before.ranks:
                lost = set(before.experts_of(other, layer)) - set(after.experts_of(other, layer))
                assert lost <= set(taken)
                assert set(after.experts_of(other, layer)) <= set(before.experts_of(other, layer))


def test_growth_from_even_stays_even() -> None:
    for experts in (1, 2, 7, 8, 64, 128):
        found = ExpertMap.even(num_layers=12, num_logical=experts, ranks=[0])
        for rank in range(1, 9):
            found = plan.with_joiner(found, rank)
            for layer in range(12):
                assert max(counts(found, layer)) - min(counts(found, layer)) <= 1
            totals = [sum(len(found.experts_of(r, i)) for i in range(12)) for r in found.ranks]
            assert max(totals) - min(totals) <= 12 // 2 + 2


def test_few_experts_are_shared_over_the_layers() -> None:
    before = ExpertMap(
        num_layers=6,
        num_logical=2,
        placement={r: tuple((r,) for _ in range(6)) for r in (0, 1)},
    )
    after = plan.with_joiner(before, 2)
    held = sum(len(after.experts_of(2, layer)) for layer in range(6))
    assert held == 4  # a third of twelve


def test_views() -> None:
    first = plan.first_view([member(2), member(0)], num_layers=2, num_logical=4)
    assert (first.epoch, first.ranks) == (1, (0, 2))
    joined = plan.view_with(first, member(1))
    assert (joined.epoch, joined.ranks) == (2, (0, 1, 2))
    same = plan.view_without(joined, [])
    assert (same.epoch, same.members, same.expert_map) == (3, joined.members, joined.expert_map)
    less = plan.view_without(joined, [member(0).incarnation])
    assert less.ranks == (1, 2)
    assert not less.expert_map.missing()
    with pytest.raises(NoSurvivors):
        plan.view_without(first, first.incarnations)


def test_a_returning_slot_keeps_its_experts() -> None:
    view = plan.first_view([member(r) for r in range(4)], num_layers=3, num_logical=8)
    back = plan.view_with(view, member(2, life=1))
    assert back.expert_map == view.expert_map
    assert back.member(2) == member(2, life=1)


def test_taking_over_a_dead_group() -> None:
    view = plan.first_view([member(r) for r in range(4)], num_layers=3, num_logical=8)
    again = [member(r, life=1) for r in range(4)]
    same = plan.view_of(view, again, dead=view.incarnations)
    assert same.expert_map == view.expert_map
    fewer = plan.view_of(view, again[:2], dead=view.incarnations)
    assert fewer.ranks == (0, 1)
    assert not fewer.expert_map.missing()
    others = plan.view_of(view, [member(8), member(9)], dead=view.incarnations)
    assert others.ranks == (8, 9)
    assert not others.expert_map.missing()


def test_gained() -> None:
    before = ExpertMap.even(num_layers=1, num_logical=8, ranks=[0, 1])
    after = plan.cover_orphans(before, [0])
    assert plan.gained(before, after, 0) == tuple((0, e) for e in range(4, 8))
    assert plan.gained(after, after, 0) == ()
    assert len(plan.gained(None, after, 0)) == 8
    with pytest.raises(ValueError, match="survivors"):
        plan.cover_orphans(before, [])
