"""SwiGLU against the formula in double precision."""

from __future__ import annotations

import math

import pytest
import torch

from dispatch.errors import InputInvalid
from dispatch.kernels.swiglu import swiglu, swiglu_torch

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


def test_wrong_input_is_named() -> None:
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
