from __future__ import annotations

import math

import pytest
import torch

from dispatch.errors import InputInvalid
from dispatch.kernels.softmax_topk import softmax_topk, softmax_topk_torch

THIRD = 1 / 3
EXAMPLE = [0.0, math.log(2), math.log(4), math.log(2)]


@pytest.mark.parametrize(
    ("renormalise", "weights"), [(True, [2 * THIRD, THIRD]), (False, [4 / 9, 2 / 9])]
)
def test_the_example_of_the_docstring(interpreted, renormalise, weights) -> None:
    for operation in (softmax_topk, softmax_topk_torch):
        ids, found = operation(torch.tensor([EXAMPLE]), 2, renormalise=renormalise)
        assert ids.tolist() == [[2, 1]]
        assert found[0].tolist() == pytest.approx(weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("id_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "topk"),
    [(0, 8, 2), (1, 1, 1), (3, 7, 7), (5, 60, 6), (4, 257, 8), (9, 100, 1), (2, 40, 33)],
)
def test_the_kernel_chooses_what_the_reference_chooses(
    interpreted, seed, num_tokens, num_experts, topk, dtype, id_dtype
) -> None:
    logits = (torch.randn(num_tokens, num_experts) * 3).to(dtype)  # bf16 has many equal ones
    for renormalise in (True, False):
        ids, weights = softmax_topk(logits, topk, renormalise=renormalise, id_dtype=id_dtype)
        due_ids, due_weights = softmax_topk_torch(
            logits, topk, renormalise=renormalise, id_dtype=id_dtype
        )
        assert ids.dtype is id_dtype
        assert weights.dtype is torch.float32
        assert torch.equal(ids, due_ids)
        torch.testing.assert_close(weights, due_weights, rtol=2e-6, atol=1e-12)


def test_equal_scores_go_to_the_lower_id_and_the_signs_of_zero_are_equal(interpreted) -> None:
    logits = torch.tensor([[-0.0, 0.0, -0.0, 0.0], [1.0, 2.0, 2.0, 2.0], [5.0, 5.0, 5.0, 5.0]])
    for operation in (softmax_topk, softmax_topk_torch):
        ids, _ = operation(logits, 3)
        assert ids.tolist() == [[0, 1, 2], [1, 2, 3], [0, 1, 2]]


def test_what_is_not_a_number_stays_visible_and_ids_stay_valid(interpreted) -> None:
    nan, inf = math.nan, math.inf
    logits = torch.tensor(
        [
            [nan, 1.0, nan, 2.0],
            [inf, 0.0, 1.0, 2.0],
            [nan, nan, nan, nan],
            [-inf, -inf, -inf, -inf],
            [-inf, 0.0, -inf, 0.0],
        ]
    )
    for operation in (softmax_topk, softmax_topk_torch):
        ids, weights = operation(logits, 3)
        assert ids.tolist() == [[3, 1, 0], [0, 3, 2], [0, 1, 2], [0, 1, 2], [1, 3, 0]]
        assert weights[:4].isnan().all()
        assert weights[4].tolist() == [0.5, 0.5, 0.0]


def test_a_token_does_not_depend_on_its_neighbours(interpreted, seed) -> None:
    logits = torch.randn(7, 12)
    together = softmax_topk(logits, 4)
    for token in range(7):
        alone = softmax_topk(logits[token : token + 1], 4)
        assert all(
            torch.equal(one[token : token + 1], other)
            for one, other in zip(together, alone, strict=True)
        )


@pytest.mark.parametrize(
    ("logits", "topk", "name"),
    [
        (torch.zeros(3), 1, "shape of router_logits"),
        (torch.zeros(3, 4, dtype=torch.int64), 1, "dtype of router_logits"),
        (torch.zeros(4, 3).t(), 1, "stride of router_logits"),
        (torch.zeros(3, 4), 5, "topk"),
        (torch.zeros(3, 4), 0, "topk"),
    ],
)
def test_wrong_input_is_named(logits, topk, name) -> None:
    with pytest.raises(InputInvalid) as caught:
        softmax_topk(logits, topk)
    assert caught.value.name == name
