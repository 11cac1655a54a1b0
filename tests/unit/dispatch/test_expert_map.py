"""Placements: splits, replicas, routes, changes, and the wire form."""

from __future__ import annotations

import json
import pickle
import random
import subprocess
import sys

import pytest

from dispatch import ExpertMap, PlacementInvalid


def make(**placement):
    return ExpertMap(
        num_layers=1,
        num_logical=4,
        placement={int(rank[1:]): (experts,) for rank, experts in placement.items()},
    )


@pytest.mark.parametrize("num_logical", [1, 2, 7, 8, 60, 257])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 9])
def test_even_split_holds_every_expert_once_and_balanced(num_logical, num_ranks):
    ranks = [3 * r + 1 for r in range(num_ranks)]
    spread = ExpertMap.even(num_layers=num_ranks, num_logical=num_logical, ranks=ranks[::-1])
    assert spread.ranks == tuple(ranks)
    for layer in range(num_ranks):
        held = [spread.experts_of(rank, layer) for rank in ranks]
        assert sorted(e for experts in held for e in experts) == list(range(num_logical))
        assert max(map(len, held)) - min(map(len, held)) <= 1
    # Over as many layers as ranks, everybody's memory is exactly equal.
    totals = {sum(len(spread.experts_of(rank, i)) for i in range(num_ranks)) for rank in ranks}
    assert len(totals) == 1


def test_documented_example():
    spread = ExpertMap.even(num_layers=2, num_logical=8, ranks=[0, 1, 2])
    assert spread.placement == {
        0: ((0, 1, 2), (0, 1, 2)),
        1: ((3, 4, 5), (3, 4)),
        2: ((6, 7), (5, 6, 7)),
    }


def test_route_prefers_own_instance_then_spreads_and_marks_missing():
    placed = make(r0=(0, 1), r1=(1, 2), r2=(2,))
    assert placed.owners(0, 1) == (0, 1)
    assert placed.route(0, 0).tolist() == [0, 0, [1, 2][(0 + 2) % 2], -1]
    assert placed.route(0, 1).tolist() == [0, 1, 1, -1]
    assert placed.route(0, 2).tolist() == [0, [0, 1][(2 + 1) % 2], 2, -1]
    assert placed.missing() == ((0, 3),)
    targets = {int(placed.route(0, source)[2]) for source in range(10, 20)}
    assert targets == {1, 2}, "sources without an instance are spread over the owners"


def test_without_and_assign():
    placed = make(r0=(0, 1), r1=(2, 3))
    smaller = placed.without([1])
    assert smaller.ranks == (0,)
    assert smaller.missing() == ((0, 2), (0, 3))
    covered = smaller.assign({(0, 2): 0, (0, 3): 5})
    assert covered.missing() == ()
    assert covered.experts_of(0, 0) == (0, 1, 2)
    assert covered.experts_of(5, 0) == (3,)
    assert covered.assign({(0, 3): 5}) == covered
    assert placed == make(r1=(3, 2), r0=(1, 0)), "order of writing does not matter"


@pytest.mark.parametrize(
    "change",
    [
        {"placement": {0: ((0, 4),)}},
        {"placement": {0: ((-1,),)}},
        {"placement": {0: ((1, 1),)}},
        {"placement": {0: ((), ())}},
        {"placement": {-1: ((),)}},
        {"num_logical": 0},
    ],
)
def test_contradictions_are_refused(change):
    with pytest.raises(PlacementInvalid) as caught:
        ExpertMap(**{"num_layers": 1, "num_logical": 4, "placement": {}, **change})
    assert isinstance(caught.value, ValueError)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value)


def test_no_ranks_or_a_rank_twice_is_refused():
    for ranks in ([], [1, 1]):
        with pytest.raises(PlacementInvalid):
            ExpertMap.even(num_layers=1, num_logical=4, ranks=ranks)
    with pytest.raises(PlacementInvalid):
        make(r0=()).assign({(1, 0): 0})
    with pytest.raises(PlacementInvalid):
        make(r0=()).assign({(0, 4): 0})


def test_wire_form_is_json_compact_and_round_trips():
    seed = random.randrange(1 << 32)
    draw = random.Random(seed)
    for _ in range(50):
        placed = ExpertMap(
            num_layers=4,
            num_logical=16,
            placement={
                rank: tuple(tuple(draw.sample(range(16), draw.randrange(17))) for _ in range(4))
                for rank in draw.sample(range(100), draw.randrange(5))
            },
        )
        assert ExpertMap.from_wire(json.loads(json.dumps(placed.to_wire()))) == placed, seed
    big = ExpertMap.even(num_layers=94, num_logical=128, ranks=list(range(8)))
    assert len(json.dumps(big.to_wire())) < 400


@pytest.mark.parametrize(
    "wire",
    [
        {},
        {"num_layers": 1, "num_logical": 4, "placement": {"0": [[2, [0, 1]]]}},
        {"num_layers": 1, "num_logical": 4, "placement": {"0": [[1, [0, 1 << 40]]]}},
        {"num_layers": 1, "num_logical": 4, "placement": {"0": [[1, [0]]]}},
        {"num_layers": 1, "num_logical": 4, "placement": {"0": [[0, [0, 1]]]}},
        {"num_layers": 1, "num_logical": 4, "placement": {"x": []}},
        {"num_layers": 1, "num_logical": 4, "placement": []},
    ],
)
def test_broken_wire_forms_are_refused(wire):
    with pytest.raises(PlacementInvalid):
        ExpertMap.from_wire(wire)


def test_expert_map_needs_no_torch():
    code = "import sys; from dispatch import ExpertMap; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
