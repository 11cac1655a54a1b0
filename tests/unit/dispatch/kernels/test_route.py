from __future__ import annotations

import pytest
import torch

from dispatch.errors import InputInvalid
from dispatch.expert_map import ExpertMap
from dispatch.kernels.route import route, route_torch
from dispatch.kernels.routed import ExpertSlots
from dispatch.routing import LayerRoute

CPU = torch.device("cpu")
OPERATIONS = (route, route_torch)


def layer(placement, num_experts, source_rank=0):
    """The layer's tables, and the CPU path's route, which knows nothing of the kernels."""
    experts = ExpertMap(
        num_layers=1,
        num_logical=num_experts,
        placement={rank: (tuple(held),) for rank, held in placement.items()},
    )
    known = LayerRoute(experts, sorted(placement), source_rank, 0)
    return ExpertSlots.of(known, num_experts, CPU), known


def spread(num_experts, num_ranks):
    return {rank: range(rank, num_experts, num_ranks) for rank in range(num_ranks)}


def expect_same(routed, ids, known) -> None:
    num_tokens, topk = ids.shape
    due = known.route(known.slots(ids.long().numpy()), num_tokens, topk)
    num_choices, num_rows = len(due.order), due.row_bounds[-1]
    assert routed.counts.tolist() == [
        *due.counts.tolist(),
        due.num_masked,
        due.num_missing,
        due.num_invalid,
    ]
    assert routed.choice_bounds.tolist() == due.choice_bounds
    assert routed.row_bounds.tolist() == due.row_bounds
    assert routed.order[:num_choices].tolist() == due.order.tolist()
    assert routed.choice_rows[:num_choices].tolist() == due.choice_rows.tolist()
    assert routed.row_tokens[:num_rows].tolist() == due.row_tokens.tolist()
    places = torch.full((num_tokens * topk,), -1)
    places[torch.from_numpy(due.order)] = torch.arange(num_choices)
    assert routed.places.tolist() == places.view(num_tokens, topk).tolist()
    for token in range(num_tokens):
        met = set()
        for k in range(topk):
            place = int(routed.places[token, k])
            member = int(routed.targets[token, k])
            assert (place < 0) == (member < 0)
            if place < 0:
                assert int(routed.token_rows[token, k]) == -1
                continue
            assert due.choice_bounds[member] <= place < due.choice_bounds[member + 1]
            row = -1 if member in met else int(due.choice_rows[place])
            assert int(routed.token_rows[token, k]) == row
            met.add(member)


def test_the_example_of_the_docstring(interpreted) -> None:
    slots, _ = layer({0: [0, 1], 1: [2, 3]}, 4)
    ids = torch.tensor([[0, 2], [2, 3], [-1, 0]])
    for operation in OPERATIONS:
        routed = operation(ids, slots)
        assert routed.counts.tolist() == [2, 0, 2, 1, 1, 0, 0]
        assert routed.order[:5].tolist() == [0, 5, 1, 2, 3]
        assert routed.places.tolist() == [[0, 2], [3, 4], [-1, 1]]
        assert routed.choice_bounds.tolist() == [0, 2, 5]
        assert routed.row_tokens.tolist() == [0, 2, 0, 1, *routed.row_tokens[4:].tolist()]
        assert routed.row_bounds.tolist() == [0, 2, 4]
        assert routed.choice_rows[:5].tolist() == [0, 1, 0, 1, 1]
        assert routed.targets.tolist() == [[0, 1], [1, 1], [-1, 0]]
        assert routed.token_rows.tolist() == [[0, 0], [1, -1], [-1, 1]]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(
    ("num_tokens", "topk", "num_experts", "num_ranks"),
    [
        (1, 1, 1, 1),
        (5, 3, 7, 3),
        (33, 6, 60, 5),
        (40, 8, 257, 6),
        (3, 33, 40, 4),
        (3, 8, 8, 12),  # more members than experts
        (2, 150, 150, 2),  # a token has more choices than a run
    ],
)
def test_equals_the_route_of_the_cpu_path(
    interpreted, seed, num_tokens, topk, num_experts, num_ranks, dtype
) -> None:
    slots, known = layer(spread(num_experts, num_ranks), num_experts)
    ids = torch.randn(num_tokens, num_experts).topk(topk, dim=1).indices.to(dtype)
    ids[torch.rand(num_tokens, topk) < 0.2] = -1
    for operation in OPERATIONS:
        expect_same(operation(ids, slots), ids, known)


def test_runs_are_joined_in_order(interpreted, seed, monkeypatch) -> None:
    """Runs of 4 choices, so that few tokens make more runs than one tile of the scan has."""
    monkeypatch.setattr("dispatch.kernels.route.RUN", 4)
    slots, known = layer(spread(5, 2), 5)
    ids = torch.randint(0, 5, (80, 2))
    expect_same(route(ids, slots), ids, known)


def test_wide_tables_are_scanned_tile_by_tile(interpreted, seed) -> None:
    slots, known = layer(spread(300, 140), 300)
    ids = torch.randint(0, 300, (40, 8))
    expect_same(route(ids, slots), ids, known)


def test_duplicates_count_twice_and_invalid_ids_are_counted_apart(interpreted) -> None:
    slots, known = layer({0: [0, 1], 3: [2]}, 4)  # nobody holds expert 3
    ids = torch.tensor([[1, 1, 2, 1], [3, 3, -1, 2], [4, -2, 2**31 - 1, 0]], dtype=torch.int32)
    wide = ids.long()
    wide[2] = torch.tensor([2**40, -(2**40), -(2**63), 0])
    for operation in OPERATIONS:
        for given in (ids, wide):
            routed = operation(given, slots)
            expect_same(routed, given, known)
            assert routed.counts.tolist() == [1, 3, 2, 1, 2, 3]


def test_instances_of_an_expert_are_chosen_by_the_map(interpreted, seed) -> None:
    placement = {0: [0, 1], 1: [0, 2], 2: [0, 3, 4]}
    ids = torch.randint(0, 5, (20, 3))
    for source_rank in (0, 1, 2, 7):
        slots, known = layer(placement, 5, source_rank)
        for operation in OPERATIONS:
            expect_same(operation(ids, slots), ids, known)


@pytest.mark.parametrize("ids", [torch.empty(0, 4, dtype=torch.int64), torch.full((6, 4), -1)])
def test_nothing_to_send(interpreted, ids) -> None:
    slots, known = layer(spread(8, 3), 8)
    for operation in OPERATIONS:
        expect_same(operation(ids, slots), ids, known)


def test_all_tokens_to_one_expert(interpreted) -> None:
    slots, known = layer(spread(9, 4), 9)
    ids = torch.full((50, 1), 6)
    for operation in OPERATIONS:
        expect_same(operation(ids, slots), ids, known)


def test_a_member_without_experts_gets_nothing(interpreted, seed) -> None:
    slots, known = layer({0: [], 1: [0, 1, 2], 2: [], 3: [3]}, 4)
    ids = torch.randint(0, 4, (9, 2))
    for operation in OPERATIONS:
        expect_same(operation(ids, slots), ids, known)


def test_wrong_input_is_named() -> None:
    slots, _ = layer(spread(8, 2), 8)
    for ids, name in (
        (torch.zeros(3), "shape of topk_ids"),
        (torch.zeros(3, 2), "dtype of topk_ids"),
        (torch.zeros(2, 3, dtype=torch.int64).t(), "stride of topk_ids"),
    ):
        with pytest.raises(InputInvalid) as caught:
            route(ids, slots)
        assert caught.value.name == name
