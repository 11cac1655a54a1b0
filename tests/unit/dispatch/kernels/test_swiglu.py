"""SwiGLU against the formula in double precision."""

from __future__ import annotations

import math

import pytest
import torch

from dispatch.errors import InputInvalid
from dispatch.kernels.fp8 import dequantise_torch, quantise_torch
from dispatch.kernels.swiglu import swiglu, swiglu_torch
from dispatch.kernels.swiglu_fp8 import swiglu_fp8, swiglu_fp8_torch

OPERATIONS = (swiglu, swiglu_torch)
# One rounding to the type, and what exp and division may be off in fp32.
TOLERANCES = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-6}


def formula(gate_up):
    gate, up = gate_up.double().chunk(2, dim=1)
    return gate / (1 + torch.exp(-gate)) * up


def test_the_example_of_the_docstring(interpreted) -> None:
    for operation in OPERATIONS:
        found = operation(torch.tensor([[0.0, math.log(3), 5.0, 8.0]]))
        assert found[0].tolist() == pytest.approx([0, 6.5917], abs=1e-4)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(0, 8), (1, 1), (5, 768), (3, 1030), (7, 48), (2, 0)])
def test_kernel_and_reference_follow_the_formula(interpreted, seed, rows, width, dtype) -> None:
    gate_up = (torch.randn(rows, 2 * width) * 4).to(dtype)
    due = formula(gate_up)
    for operation in OPERATIONS:
        found = operation(gate_up)
        assert found.dtype is dtype
        assert found.shape == (rows, width)
        torch.testing.assert_close(found.double(), due, rtol=1.01 * TOLERANCES[dtype], atol=1e-7)


def test_rows_behind_the_last_expert_are_left_out(interpreted, seed) -> None:
    gate_up = torch.randn(6, 32)
    due = swiglu(gate_up)
    gate_up[4:] = torch.nan
    for bounds in (torch.tensor([0, 1, 4]), torch.tensor([0, 1, 4], dtype=torch.int32)):
        for operation in OPERATIONS:
            found = operation(gate_up, bounds)
            torch.testing.assert_close(found[:4], due[:4], rtol=1e-6, atol=1e-7)


def test_extremes_are_finite_and_what_is_no_number_stays_visible(interpreted) -> None:
    inf, nan = math.inf, math.nan
    gate_up = torch.tensor([[-200.0, 200.0, nan, 1.0, 3.0, 1.0, 1.0, nan], [0, -inf, inf, 1] * 2])
    for operation in OPERATIONS:
        found = operation(gate_up)
        assert found[0, :2].tolist() == [0.0, 200.0]
        assert found[0, 2:].isnan().all()
        assert found[1, 0] == 0
        assert found[1, 2] == inf


def test_the_example_of_the_docstring_in_fp8(interpreted) -> None:
    for operation in (swiglu_fp8, swiglu_fp8_torch):
        elements, scales = operation(torch.tensor([[0.0, 40.0, 5.0, 11.2]]))
        assert elements.float().tolist() == [[0.0, 448.0]]
        assert scales[0].tolist() == pytest.approx([1.0])


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(0, 8), (1, 1), (3, 768), (2, 1300), (5, 130)])
def test_fp8_holds_the_formula_up_to_its_rounding(interpreted, seed, rows, width, dtype) -> None:
    gate_up = (torch.randn(rows, 2 * width) * 4).to(dtype)
    due, due_scales = quantise_torch(formula(gate_up).float())
    for operation in (swiglu_fp8, swiglu_fp8_torch):
        elements, scales = operation(gate_up)
        assert elements.shape == (rows, width)
        torch.testing.assert_close(scales, due_scales, rtol=1e-5, atol=0)
        # What is near the middle of two fp8 numbers may be rounded to either.
        found, wanted = dequantise_torch(elements, scales), dequantise_torch(due, due_scales)
        torch.testing.assert_close(found, wanted, rtol=2**-3, atol=1e-2)
        same = (elements.view(torch.uint8) == due.view(torch.uint8)).float()
        assert rows == 0 or same.mean() >= 0.99 - 1 / width


def test_fp8_leaves_rows_out_and_shows_what_is_no_number(interpreted, seed) -> None:
    gate_up = torch.randn(4, 300)
    due, due_scales = swiglu_fp8(gate_up)
    gate_up[2:] = torch.nan
    bounds = torch.tensor([0, 2])
    elements, scales = swiglu_fp8(gate_up, bounds)
    assert torch.equal(elements[:2].view(torch.uint8), due[:2].view(torch.uint8))
    assert torch.equal(scales[:2], due_scales[:2])
    elements, scales = swiglu_fp8(gate_up)
    assert elements[2:].float().isnan().all()
    assert scales.isfinite().all()


def test_wrong_input_is_named() -> None:
    with pytest.raises(InputInvalid) as caught:
        swiglu_fp8(torch.zeros(2, 0))
    assert caught.value.name == "columns of gate_up"
    cases = {
        "columns of gate_up modulo 2": (torch.zeros(2, 3),),
        "dtype of gate_up": (torch.zeros(2, 4).long(),),
        "bounds": (torch.zeros(2, 4), torch.tensor([0, 3])),
        "shape of bounds": (torch.zeros(2, 4), torch.tensor(3)),
    }
    for name, arguments in cases.items():
        with pytest.raises(InputInvalid) as caught:
            swiglu(*arguments)
        assert caught.value.name == name
