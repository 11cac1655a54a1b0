from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from dispatch.errors import InputInvalid
from dispatch.kernels.sigmoid_topk import sigmoid_topk, sigmoid_topk_torch

OPERATIONS = (sigmoid_topk, sigmoid_topk_torch)


def naive(logits, topk, bias, num_groups, topk_groups, renormalise, scale):
    """One token after another in Python floats; also how close the closest decision was."""
    margin, found = [], []
    for row in logits.double().tolist():
        scores = [1 / (1 + math.exp(-x)) for x in row]
        preferences = [s + b for s, b in zip(scores, bias.double().tolist(), strict=True)]
        size = len(row) // num_groups
        groups = [preferences[g * size : (g + 1) * size] for g in range(num_groups)]
        sums = [sum(sorted(group, reverse=True)[:2]) for group in groups]
        by_sum = sorted(range(num_groups), key=lambda g: -sums[g])
        allowed = [e for g in by_sum[:topk_groups] for e in range(g * size, (g + 1) * size)]
        order = sorted(allowed, key=lambda e: (-preferences[e], e))
        gaps = [preferences[a] - preferences[b] for a, b in pairwise(order)]
        ranked = sorted(sums)
        gaps += [b - a for a, b in pairwise(ranked)]
        margin.append(min(gaps, default=1.0))
        chosen = order[:topk]
        total = sum(scores[e] for e in chosen) if renormalise else 1.0
        found.append((chosen, [scores[e] / total * scale for e in chosen]))
    return found, margin


def test_the_example_of_the_docstring(interpreted) -> None:
    logits = torch.tensor([[math.log(3), 0.0, 0.0, 0.0]])
    bias = torch.tensor([0.0, 0.0, 0.125, 0.25])
    for operation in OPERATIONS:
        for renormalise, weight in ((True, 1.0), (False, 0.5)):
            ids, weights = operation(
                logits, 1, bias=bias, num_groups=2, topk_groups=1, renormalise=renormalise
            )
            assert ids.tolist() == [[3]]
            assert weights.tolist() == [[weight]]


@pytest.mark.parametrize(
    ("num_experts", "topk", "num_groups", "topk_groups"),
    [(8, 2, 1, 1), (64, 6, 8, 3), (60, 5, 5, 2), (21, 7, 7, 7), (12, 4, 12, 5), (96, 33, 3, 2)],
)
@pytest.mark.parametrize("renormalise", [True, False])
def test_kernel_reference_and_formula_agree(
    interpreted, seed, num_experts, topk, num_groups, topk_groups, renormalise
) -> None:
    logits = torch.randn(6, num_experts).to(torch.bfloat16)
    bias = torch.randn(num_experts) * 0.1
    due, margins = naive(logits, topk, bias, num_groups, topk_groups, renormalise, 2.5)
    for operation in OPERATIONS:
        ids, weights = operation(
            logits,
            topk,
            bias=bias,
            num_groups=num_groups,
            topk_groups=topk_groups,
            renormalise=renormalise,
            scale=2.5,
        )
        for token, (chosen, chosen_weights) in enumerate(due):
            if margins[token] > 1e-5:  # below, the last bit of an exponential decides
                assert ids[token].tolist() == chosen
                assert weights[token].tolist() == pytest.approx(chosen_weights, rel=1e-5)


def test_ties_go_to_lower_ids_and_lower_groups(interpreted) -> None:
    for operation in OPERATIONS:
        ids, _ = operation(torch.zeros(2, 12), 4, num_groups=4, topk_groups=2)
        assert ids.tolist() == [[0, 1, 2, 3]] * 2
        ids, _ = operation(torch.zeros(1, 5), 3)
        assert ids.tolist() == [[0, 1, 2]]


def test_negative_preferences_stay_within_the_chosen_groups(interpreted) -> None:
    bias = torch.full((8,), -5.0)
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0, 3.0, 2.0, 1.0, 0.0]])
    for operation in OPERATIONS:
        ids, _ = operation(logits, 4, bias=bias, num_groups=2, topk_groups=1)
        assert ids.tolist() == [[4, 5, 6, 7]]


def test_what_is_not_a_number_stays_visible_and_zero_scores_stay_finite(interpreted) -> None:
    nan, inf = math.nan, math.inf
    logits = torch.tensor([[nan, 0.0, 1.0, 2.0], [-inf] * 4, [inf, -inf, inf, 0.0]])
    for operation in OPERATIONS:
        ids, weights = operation(logits, 3, num_groups=2, topk_groups=2)
        assert ids.tolist() == [[3, 2, 1], [0, 1, 2], [0, 2, 3]]
        assert weights[0].isnan().all()
        assert weights[1].tolist() == [0.0, 0.0, 0.0]
        assert weights[2].tolist() == pytest.approx([0.4, 0.4, 0.2])


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("topk", {"topk": 3, "num_groups": 4, "topk_groups": 1}),
        ("num_groups", {"num_groups": 3}),
        ("topk_groups", {"num_groups": 2, "topk_groups": 3}),
        ("dtype of bias", {"bias": torch.zeros(8, dtype=torch.bfloat16)}),
        ("shape of bias", {"bias": torch.zeros(7)}),
    ],
)
def test_wrong_input_is_named(name, arguments) -> None:
    with pytest.raises(InputInvalid) as caught:
        sigmoid_topk(torch.zeros(3, 8), **{"topk": 1, **arguments})
    assert caught.value.name == name
