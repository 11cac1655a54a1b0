"""Rows in fp8: odd values, scales that are powers of two, and how scales lie in memory."""

from __future__ import annotations

import random

import pytest
import torch

from dispatch import InputInvalid
from dispatch.deepep.fp8_rows import (
    check_fp8_width,
    column_major,
    exponents,
    pack_exponents,
    to_fp8,
)

ODD_ROWS = {
    "zeros": [0.0],
    "the smallest bf16": [2.0**-133],
    "the largest bf16": [3.3895314e38],
    "a maximum of exactly 448": [448.0, 1.0],
    "a maximum of exactly 448 * 16": [-448.0 * 16, 16.0],
    "a maximum just above": [450.0, 1.0],
}


def row_of(values: list[float], fill: float = 0.0) -> torch.Tensor:
    row = torch.full((1, 128), fill)
    row[0, : len(values)] = torch.tensor(values)
    return row.bfloat16()


@pytest.mark.parametrize("round_scale", [False, True])
@pytest.mark.parametrize("values", ODD_ROWS.values(), ids=ODD_ROWS.keys())
def test_case_12_odd_rows_have_finite_scales(values: list[float], round_scale: bool):
    row = row_of(values)
    quantised, scales = to_fp8(row, round_scale=round_scale)
    assert bool((scales.isfinite() & (scales > 0)).all())
    back, row = quantised.double() * scales, row.double()
    assert bool(back.isfinite().all())
    assert bool(((back - row).abs() <= row.abs() / 8 + 1e-4).all())


@pytest.mark.parametrize("round_scale", [False, True])
def test_case_12_what_is_not_finite_shows_and_spoils_nobody(round_scale: bool):
    row = row_of([float("nan"), float("inf"), -float("inf"), 448.0], fill=7.0)
    quantised, scales = to_fp8(row, round_scale=round_scale)
    assert scales.tolist() == [[1.0]]
    assert bool(quantised[0, :3].float().isnan().all())
    assert quantised[0, 3:].float().tolist() == [448.0, *[7.0] * 124]


def test_case_13_powers_of_two_are_rounded_up():
    seed = random.randrange(1 << 32)
    generator = torch.Generator().manual_seed(seed)
    magnitude = torch.exp2(torch.randint(-100, 100, (512, 1), generator=generator).float())
    x = (torch.randn(512, 256, generator=generator) * magnitude).bfloat16()
    quantised, scales = to_fp8(x, round_scale=True)
    mantissa, _ = torch.frexp(scales)
    assert bool((mantissa == 0.5).all()), seed
    amax = x.float().abs().view(512, 2, 128).amax(2)
    assert bool((amax / scales <= 448).all()), seed
    assert bool((amax.clamp(min=1e-4) / (scales / 2) > 448).all()), f"not larger than needed {seed}"
    assert bool(quantised.float().isfinite().all())
    for exact in (1e-4, 448.0, 448.0 * 2**20):
        assert int(exponents(torch.tensor([exact / 448.0]))) >= 1


def test_case_13_exponents_in_one_word():
    scales = torch.tensor([[1.0, 2.0, 0.5, 2.0**-20]])
    assert pack_exponents(scales).view(torch.uint8).tolist() == [[127, 128, 126, 107]]


@pytest.mark.parametrize("num_rows", [0, 1, 5, 8])
def test_case_14_column_major_is_the_same_values(num_rows: int):
    scales = torch.randn(3, num_rows, 4)
    turned = column_major(scales)
    assert torch.equal(turned, scales)
    assert turned.mT.is_contiguous()


def test_case_09_sizes_that_have_no_groups():
    check_fp8_width(7168, packed=True)
    check_fp8_width(128, packed=False)
    for hidden, packed in ((200, False), (64, False), (640, True)):
        with pytest.raises(InputInvalid, match="hidden"):
            check_fp8_width(hidden, packed=packed)
