from __future__ import annotations

import math

import pytest
import torch

from dispatch.errors import InputInvalid
from dispatch.kernels.fp8 import (
    ScaleFormat,
    dequantise,
    dequantise_torch,
    num_groups,
    quantise,
    quantise_torch,
)

BOTH = (quantise, quantise_torch)
FORMATS = tuple(ScaleFormat)
CORNERS = {
    "zeros": [0.0, -0.0],
    "largest bf16": [3.3895e38, -1.0],
    "largest fp32": [3.4028234e38, 1e38],
    "denormals": [1e-40, -3e-41, 9.2e-41],
    "smallest normal": [1.1754944e-38, 0.0],
    "powers": [448.0 * 2**-20, 1.0 * 2**-20],
    "one infinity": [math.inf, 1.0, -2.0],
    "minus infinity": [-math.inf, 1.0, -2.0],
    "nan": [math.nan, 1.0, -2.0],
    "only nan": [math.nan] * 3,
}


def same(left, right) -> bool:
    """Bits, so that NaN equals itself and -0 does not equal 0."""
    return all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(left, right, strict=True)
    )


def test_the_example_of_the_docstring(interpreted) -> None:
    x = torch.tensor([[0.0, 1.0, -2.0, 448.0, math.inf, math.nan]])
    for scale_format in FORMATS:
        for operation in BOTH:
            rows, scales = operation(x, scale_format)
            assert rows.view(torch.uint8).tolist() == [[0x00, 0x38, 0xC0, 0x7E, 0x7F, 0x7F]]
            assert scales.tolist() == [[1.0 if scale_format is ScaleFormat.FP32 else 127]]
            back = dequantise(rows, scales, torch.float32)
            assert back[0, :4].tolist() == [0.0, 1.0, -2.0, 448.0]
            assert back[0, 4:].isnan().all()


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("num_rows", "hidden"), [(0, 128), (1, 1), (3, 127), (2, 128), (3, 129), (2, 2881), (1, 4096)]
)
def test_kernel_and_reference_have_the_same_bits(
    interpreted, seed, num_rows, hidden, dtype, scale_format
) -> None:
    x = torch.randn(num_rows, hidden) * torch.randn(num_rows, 1).exp2() ** 8
    x = x.to(dtype)
    rows, scales = quantise(x, scale_format)
    assert rows.dtype is torch.float8_e4m3fn
    assert scales.shape == (num_rows, num_groups(hidden))
    assert same((rows, scales), quantise_torch(x, scale_format))
    for target in (torch.bfloat16, torch.float32):
        back = dequantise(rows, scales, target)
        assert same((back,), (dequantise_torch(rows, scales, target),))


@pytest.mark.parametrize("scale_format", FORMATS)
def test_every_bf16_number_is_converted_alike(interpreted, scale_format) -> None:
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(4, -1)
    # In one order neighbours are of a size, in the other of all sizes.
    for order in (x, x.view(128, -1).t().reshape(4, -1)):
        order = order.contiguous()
        assert same(quantise(order, scale_format), quantise_torch(order, scale_format))


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("corner", CORNERS.values(), ids=CORNERS)
def test_corners(interpreted, corner, scale_format) -> None:
    x = torch.zeros(1, 130)
    x[0, : len(corner)] = torch.tensor(corner)
    found = quantise(x, scale_format)
    assert same(found, quantise_torch(x, scale_format))
    back = dequantise(*found, torch.float32)
    factors = found[1] if scale_format is ScaleFormat.FP32 else (found[1].float() - 127).exp2()
    assert factors.isfinite().all()
    assert (factors > 0).all()
    finite = x.isfinite()
    if scale_format is ScaleFormat.UE8M0 and back.isinf().any():
        assert x[back.isinf()].abs().min() > 3.29e38
        finite &= back.isfinite()
        back[back.isinf()] = math.nan
    assert back[~finite].isnan().all()
    # Half a step of 3 mantissa bits, or of the smallest step that the scale leaves.
    step = factors.repeat_interleave(128, 1)[:, :130] * 2**-10
    assert ((back - x).abs()[finite] <= torch.maximum(x.abs() / 16, step)[finite] * 1.0001).all()
    assert same((back[:, 128:],), (torch.zeros(1, 2),))


def test_a_row_is_converted_alone(interpreted, seed) -> None:
    x = torch.randn(5, 300)
    x[2] = math.nan
    rows, scales = quantise(x)
    for index in range(5):
        alone = quantise(x[index : index + 1])
        assert same(alone, (rows[index : index + 1], scales[index : index + 1]))


def test_powers_of_two_are_rounded_up(interpreted, seed) -> None:
    x = torch.randn(40, 128) * torch.randn(40, 1).exp2()
    for operation in BOTH:
        rows, scales = operation(x, ScaleFormat.UE8M0)
        factors = (scales.float() - 127).exp2()
        assert ((x / factors).abs() <= 448.0).all()
        assert ((x / factors).abs().amax(1) > 224.0).all()
        assert rows.float().abs().amax(1).gt(220.0).all()


def test_wrong_input_is_named() -> None:
    rows, scales = quantise(torch.zeros(2, 130))
    for call, name in (
        (lambda: quantise(torch.zeros(2)), "shape of x"),
        (lambda: quantise(torch.zeros(2, 0)), "hidden"),
        (lambda: quantise(torch.zeros(2, 4, dtype=torch.int64)), "dtype of x"),
        (lambda: dequantise(torch.zeros(2, 130), scales), "dtype of rows"),
        (lambda: dequantise(rows, scales[:, :1].contiguous()), "shape of scales"),
        (lambda: dequantise(rows, scales.half()), "dtype of scales"),
        (lambda: dequantise(rows, scales, torch.int32), "dtype"),
    ):
        with pytest.raises(InputInvalid) as caught:
            call()
        assert caught.value.name == name
