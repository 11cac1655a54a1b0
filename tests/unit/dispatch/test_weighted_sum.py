"""The compiled sums, the same sums in torch, and one element at a time: the same bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dispatch import DispatchLayout, native
from dispatch.layout import RowFormat
from dispatch.weighted_sum import WeightedSum

WAYS = ["torch", "compiled"]


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(native, "compiled", None)
    elif native.compiled is None:
        pytest.skip("the compiled loops were not built")
    return request.param


@pytest.fixture
def generator(seed):
    return torch.Generator().manual_seed(seed)


def total_of(hidden: int, dtype: torch.dtype) -> WeightedSum:
    layout = DispatchLayout(
        hidden=hidden, topk=3, num_logical=4, num_layers=1, dtype=dtype, max_tokens=8
    )
    return WeightedSum(layout)


def slowly(rows: torch.Tensor, holes: torch.Tensor, weights: torch.Tensor, dtype) -> torch.Tensor:
    total = torch.zeros(rows.shape[0], rows.shape[2])
    for k in range(rows.shape[1]):
        product = weights[:, k : k + 1] * rows[:, k].float()
        total = total + torch.where(holes[:, k : k + 1], 0.0, product)
    return total.to(dtype)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("num", "width", "hidden"), [(1, 1, 1), (5, 8, 1025), (9, 3, 2050)])
def test_bits(way, generator, dtype, out_dtype, num, width, hidden):
    exponents = torch.randint(-20, 12, (num, width, hidden), generator=generator)
    rows = (torch.randn(exponents.shape, generator=generator) * 2.0**exponents).to(dtype)
    weights = torch.randn(num, width, generator=generator)
    holes = torch.rand(num, width, generator=generator) < 0.2
    weights[holes] = 0
    total = total_of(hidden, dtype)
    for full in (False, True):
        empty = torch.zeros_like(holes) if full else holes
        slots = (~empty).reshape(-1).nonzero().reshape(-1).numpy()
        words = RowFormat(hidden * dtype.itemsize).of(rows.view(-1, hidden))
        total.start(dtype, num, width, holes=not full)
        near, far = slots[::2], slots[1::2]
        total.put(near, words, near)
        total.put(far, np.ascontiguousarray(words[far]))
        out = total.sum(weights, out_dtype)
        assert torch.equal(out, slowly(rows, empty, weights, out_dtype)), way


def test_ties_round_to_even_and_what_is_not_finite_stays_so(way):
    values = [1 + 2**-8, 1 + 3 * 2**-8, 3.397e38, float("inf"), -float("inf"), float("nan"), -0.0]
    rows = torch.tensor([[values]])
    total = total_of(len(values), torch.float32)
    total.start(torch.float32, 1, 1, holes=False)
    total.put(np.arange(1), RowFormat(4 * len(values)).of(rows[0]))
    out = total.sum(torch.ones(1, 1), torch.bfloat16)[0].float().tolist()
    assert out[:2] == [1.0, 1 + 2**-6]
    assert out[2:5] == [float("inf"), float("inf"), -float("inf")]
    assert np.isnan(out[5])
    assert not np.signbit(out[6]), "the sum starts from 0"


def test_a_row_can_be_used_by_several_sums(way):
    rows = torch.arange(6.0).view(2, 3)
    total = total_of(3, torch.float32)
    total.start(torch.float32, 3, 2, holes=True)
    total.put(np.array([0, 3, 4]), RowFormat(12).of(rows), np.array([1, 1, 0], np.int32))
    out = total.sum(torch.full((3, 2), 2.0), torch.float32)
    assert out.tolist() == [[6, 8, 10], [6, 8, 10], [0, 2, 4]]
    total.start(torch.float32, 0, 2, holes=False)
    assert total.sum(torch.empty(0, 2), torch.float32).shape == (0, 3)


def test_sizes_that_do_not_fit_are_refused():
    if native.compiled is None:
        pytest.skip("the compiled loops were not built")
    out, rows = torch.empty(2, 4), np.zeros(4, np.int64)
    for change in ({1: rows[:3]}, {2: np.zeros(3, np.float32)}, {3: 3}, {3: 0}, {4: 0}, {5: 2}):
        fine = [out.data_ptr(), rows, np.zeros(4, np.float32), 2, 4, 3, 3]
        native.compiled.weighted_sums(*fine)
        for index, value in change.items():
            fine[index] = value
        with pytest.raises(ValueError):
            native.compiled.weighted_sums(*fine)
    for arguments in ((out.data_ptr(), rows.astype(np.int32), 8), (out.data_ptr(), rows, -1)):
        with pytest.raises(ValueError):
            native.compiled.gather_rows(*arguments)
    with pytest.raises(TypeError):
        native.compiled.gather_rows(0)
