from __future__ import annotations

import math

import pytest
import torch

from dispatch.errors import InputInvalid
from dispatch.kernels.softmax_topk import softmax_topk
from dispatch.kernels.topk_softmax import topk_softmax, topk_softmax_torch

OPERATIONS = (topk_softmax, topk_softmax_torch)


def test_the_example_of_the_docstring(interpreted) -> None:
    logits = torch.tensor([[0.0, math.log(2), math.log(4), math.log(2)]])
    for operation in OPERATIONS:
        ids, weights = operation(logits, 2)
        assert ids.tolist() == [[2, 1]]
        assert weights[0].tolist() == pytest.approx([2 / 3, 1 / 3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "topk"),
    [(0, 8, 2), (1, 1, 1), (3, 7, 7), (5, 60, 6), (5, 257, 8), (9, 100, 1), (2, 40, 33)],
)
def test_the_kernel_chooses_what_the_reference_chooses(
    interpreted, seed, num_tokens, num_experts, topk, dtype
) -> None:
    logits = (torch.randn(num_tokens, num_experts) * 3).to(dtype)
    ids, weights = topk_softmax(logits, topk, id_dtype=torch.int32)
    due_ids, due_weights = topk_softmax_torch(logits, topk, id_dtype=torch.int32)
    assert ids.dtype is torch.int32
    assert torch.equal(ids, due_ids)
    torch.testing.assert_close(weights, due_weights, rtol=2e-6, atol=1e-12)
    other_ids, other_weights = softmax_topk(logits, topk, renormalise=True)
    assert torch.equal(ids, other_ids.to(torch.int32))
    torch.testing.assert_close(weights, other_weights, rtol=2e-5, atol=1e-7)


def test_what_is_not_a_number_stays_visible_and_ids_stay_valid(interpreted) -> None:
    nan, inf = math.nan, math.inf
    logits = torch.tensor(
        [[nan, 1.0, 3.0, 2.0], [inf, 0.0, 1.0, 2.0], [-inf, -inf, -inf, -inf], [0.0, -inf, 0.0, 0]]
    )
    for operation in OPERATIONS:
        ids, weights = operation(logits, 2)
        assert ids.tolist() == [[2, 3], [0, 3], [0, 1], [0, 2]]
        assert weights.isnan()[:, 0].tolist() == [True, True, True, False]
        assert weights[3].tolist() == [0.5, 0.5]


def test_wrong_input_is_named() -> None:
    for logits, topk, id_dtype, name in (
        (torch.zeros(3), 1, torch.int64, "shape of router_logits"),
        (torch.zeros(3, 4), 5, torch.int64, "topk"),
        (torch.zeros(3, 4), 1, torch.int16, "id_dtype"),
    ):
        with pytest.raises(InputInvalid) as caught:
            topk_softmax(logits, topk, id_dtype=id_dtype)
        assert caught.value.name == name
