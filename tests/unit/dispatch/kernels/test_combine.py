"""Combine equals a sum written out token by token, bit for bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dispatch.errors import InputInvalid
from dispatch.kernels.combine import combine, combine_torch

ROWS = [[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]]
OPERATIONS = (combine, combine_torch)


def summed(rows, slots, weights, out_dtype):
    """One token, one choice, one rounding at a time."""
    out = torch.zeros(len(slots), rows.shape[1], dtype=torch.float32)
    for token, chosen in enumerate(slots.tolist()):
        total = np.zeros(rows.shape[1], np.float32)
        for k, slot in enumerate(chosen):
            if 0 <= slot < len(rows):
                factor = np.float32(1.0 if weights is None else weights[token, k].item())
                total = total + rows[slot].to(torch.float32).numpy() * factor
        out[token] = torch.from_numpy(total)
    return out.to(out_dtype)


def drawn(num_tokens, topk, num_rows, hidden, dtype):
    rows = torch.randn(num_rows, hidden).to(dtype)
    # Some choices are masked, some are past the end, rows are used twice and not at all.
    slots = torch.randint(-2, num_rows + 2, (num_tokens, topk))
    return rows, slots, torch.rand(num_tokens, topk)


def test_the_example_of_the_docstring(interpreted) -> None:
    rows, slots = torch.tensor(ROWS), torch.tensor([[2, 0], [1, -1]])
    weights = torch.tensor([[0.5, 2.0], [0.25, 7.0]])
    for operation in OPERATIONS:
        assert operation(rows, slots, weights).tolist() == [[52, 104], [2.5, 5]]
        assert operation(rows, slots).tolist() == [[101, 202], [10, 20]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("num_tokens", "topk", "num_rows", "hidden"),
    [(0, 2, 3, 8), (1, 1, 1, 1), (4, 8, 20, 1030), (3, 11, 9, 48), (2, 40, 50, 7), (3, 2, 0, 5)],
)
def test_kernel_and_reference_have_the_bits_of_the_written_out_sum(
    interpreted, seed, num_tokens, topk, num_rows, hidden, dtype
) -> None:
    rows, slots, weights = drawn(num_tokens, topk, num_rows, hidden, dtype)
    for out_dtype in {dtype, torch.float32, torch.bfloat16}:
        for factors in (weights, None):
            due = summed(rows, slots, factors, out_dtype)
            for operation in OPERATIONS:
                for places in (slots, slots.to(torch.int32)):
                    found = operation(rows, places, factors, out_dtype=out_dtype)
                    assert found.dtype is out_dtype
                    assert torch.equal(found.view(torch.uint8), due.view(torch.uint8))


def test_the_place_of_rows_and_the_other_tokens_do_not_matter(interpreted, seed) -> None:
    rows, slots, weights = drawn(5, 4, 12, 64, torch.bfloat16)
    due = combine(rows, slots, weights)
    moved = torch.randperm(len(rows))
    where = torch.full((16,), -1)  # of old slot -2..13, by Python's negative indices
    where[: len(rows)] = moved.argsort()
    assert torch.equal(combine(rows[moved].contiguous(), where[slots], weights), due)
    for token in range(5):
        one = slice(token, token + 1)
        assert torch.equal(combine(rows, slots[one], weights[one]), due[one])


def test_partial_sums_of_ranks_are_added_in_the_order_of_ranks(interpreted, seed) -> None:
    num_tokens, topk, ranks, hidden = 4, 6, 3, 40
    rows, slots, weights = drawn(num_tokens, topk, 24, hidden, torch.bfloat16)
    owner = torch.randint(0, ranks, slots.shape)
    for operation in OPERATIONS:
        partial = [
            operation(rows, slots.where(owner == r, -1), weights, out_dtype=torch.float32)
            for r in range(ranks)
        ]
        places = torch.arange(ranks) * num_tokens + torch.arange(num_tokens)[:, None]
        found = operation(torch.cat(partial), places, out_dtype=torch.bfloat16)
        total = torch.zeros(num_tokens, hidden)
        for part in partial:
            total = total + part
        assert torch.equal(found, total.to(torch.bfloat16))


def test_choices_left_out_hide_what_lies_there_and_the_others_show_it(interpreted) -> None:
    rows = torch.tensor([[math.nan, math.inf], [1.0, -0.0]])
    slots = torch.tensor([[-1, 1], [0, 1], [2, -1]])
    weights = torch.tensor([[math.nan, 1.0], [1.0, 1.0], [math.inf, math.nan]])
    for operation in OPERATIONS:
        found = operation(rows, slots, weights)
        assert found[0].tolist() == [1.0, 0.0]
        assert found[1].isnan().tolist() == [True, False]
        assert found[1, 1] == math.inf
        assert found[2].tolist() == [0.0, 0.0]
        # The sum starts from +0, so it never ends as -0.
        assert not torch.signbit(found[0, 1])


def test_rows_past_two_and_four_gib_are_found(interpreted, seed) -> None:
    # Only a few pages of it are ever touched.
    rows = torch.empty(2_200_000, 1030, dtype=torch.bfloat16)
    slots = torch.tensor([[1, 2_199_999], [1_050_000, -1], [2_085_000, 0]])
    chosen = slots[slots >= 0]
    rows[chosen] = torch.randn(len(chosen), 1030).to(torch.bfloat16)
    weights = torch.rand(slots.shape)
    assert torch.equal(combine(rows, slots, weights), combine_torch(rows, slots, weights))


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((torch.zeros(3), torch.zeros(1, 1).long()), "shape of rows"),
        ((torch.zeros(3, 2), torch.zeros(1, 1)), "dtype of slots"),
        ((torch.zeros(3, 2).t(), torch.zeros(1, 1).long()), "stride of rows"),
        ((torch.zeros(3, 2), torch.zeros(2, 2).long(), torch.zeros(2, 1)), "shape of weights"),
    ],
)
def test_wrong_input_is_named(arguments, name) -> None:
    with pytest.raises(InputInvalid) as caught:
        combine(*arguments)
    assert caught.value.name == name
    with pytest.raises(InputInvalid):
        combine(torch.zeros(1, 1), torch.zeros(1, 1).long(), out_dtype=torch.int32)
