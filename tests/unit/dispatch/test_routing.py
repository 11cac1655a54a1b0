"""Routes and permutations against loops over tokens and choices."""

from __future__ import annotations

import random

import numpy as np

from dispatch import ExpertMap
from dispatch.routing import ExpertMajor, LayerRoute


def test_documented_example():
    placed = ExpertMap(num_layers=1, num_logical=4, placement={0: ((0, 1),), 1: ((2, 3),)})
    route = LayerRoute(placed, [0, 1], 0, 0)
    ids = np.array([[0, 2], [2, 3], [-1, 0]])
    slots = route.slots(ids)
    routing = route.route(slots, 3, 2)
    assert slots.tolist() == [0, 2, 2, 3, 4, 0]
    assert routing.order.tolist() == [0, 5, 1, 2, 3]
    assert routing.choice_bounds == [0, 2, 5]
    assert routing.row_tokens.tolist() == [0, 2, 0, 1]
    assert routing.row_bounds == [0, 2, 4]
    assert routing.choice_rows.tolist() == [0, 1, 0, 1, 1]
    assert routing.counts.tolist() == [2, 0, 2, 1]
    assert (routing.num_masked, routing.num_missing, routing.num_invalid) == (1, 0, 0)


def test_documented_permutation():
    gather, place = ExpertMajor(2, 2).arrange(np.array([[2, 1], [1, 1]]))
    assert gather.tolist() == [0, 1, 3, 2, 4]
    assert place.tolist() == [0, 1, 3, 2, 4]


def test_against_a_loop():
    seed = random.randrange(1 << 32)
    draw = random.Random(seed)
    for _ in range(100):
        check_one(draw, seed)


def check_one(draw, seed):
    num_logical, num_tokens, topk = draw.randrange(1, 9), draw.randrange(7), draw.randrange(1, 5)
    members = sorted(draw.sample(range(9), draw.randrange(1, 5)))
    placed = ExpertMap(
        num_layers=1,
        num_logical=num_logical,
        placement={
            rank: (tuple(draw.sample(range(num_logical), draw.randrange(num_logical + 1))),)
            for rank in [*members, 20]  # rank 20 holds experts but takes no part
        },
    )
    source = draw.choice(members)
    target = placed.route(0, source)
    ids = np.array(
        [[draw.randrange(-1, num_logical) for _ in range(topk)] for _ in range(num_tokens)],
        dtype=np.int64,
    ).reshape(num_tokens, topk)
    route = LayerRoute(placed, members, source, 0)
    routing = route.route(route.slots(ids), num_tokens, topk)
    missing = masked = 0
    for token in range(num_tokens):
        for k in range(topk):
            masked += ids[token, k] < 0
            missing += ids[token, k] >= 0 and target[ids[token, k]] not in members
    assert (routing.num_masked, routing.num_missing) == (masked, missing), seed
    for member, rank in enumerate(members):
        choices, counts = [], []
        for expert in placed.experts_of(rank, 0):
            found = [
                token * topk + k
                for token in range(num_tokens)
                for k in range(topk)
                if ids[token, k] == expert and target[expert] == rank
            ]
            choices += found
            counts.append(len(found))
        tokens = sorted({choice // topk for choice in choices})
        here = slice(*routing.choice_bounds[member : member + 2])
        rows = slice(*routing.row_bounds[member : member + 2])
        slots = slice(*route.slot_bounds[member : member + 2])
        assert routing.order[here].tolist() == choices, seed
        assert routing.counts[slots].tolist() == counts, seed
        assert routing.row_tokens[rows].tolist() == tokens, seed
        assert routing.choice_tokens[here].tolist() == [c // topk for c in choices], seed
        assert routing.choice_rows[here].tolist() == [tokens.index(c // topk) for c in choices]


def test_permutation_against_a_loop():
    seed = random.randrange(1 << 32)
    draw = random.Random(seed)
    for _ in range(100):
        sources, experts = draw.randrange(1, 5), draw.randrange(5)
        counts = np.array(
            [[draw.randrange(4) for _ in range(experts)] for _ in range(sources)], dtype=np.int64
        ).reshape(sources, experts)
        arrivals = [
            (expert, source, i)
            for source in range(sources)
            for expert in range(experts)
            for i in range(counts[source, expert])
        ]
        gather, place = ExpertMajor(sources, experts).arrange(counts)
        assert [arrivals[j] for j in gather] == sorted(arrivals), seed
        assert [gather[j] for j in place] == list(range(len(arrivals))), seed
