"""Convert rows to fp8 e4m3 with one scale per 128 neighbours, and back.

Legend: R rows, H hidden, G = ceil(H / 128) groups of a row; the last one may be shorter.

    amax     largest magnitude among a group's finite elements
    scale    max(amax / 448, 2^-126); ue8m0: rounded up to a power of two
    element  x / scale, rounded to the nearest e4m3 number (448 is the largest)

    x        0   1   -2   448   inf   NaN        amax 448, scale 1
    bytes   00  38   C0    7E    7F    7F        back: 0 1 -2 448 NaN NaN

A scale is never 0 and always finite. e4m3 has no infinity: what is not finite becomes NaN, which
stays visible, and does not touch the scale of its neighbours. Denormal input is scaled like other
input. The same bits on every device. In ue8m0 no scaled magnitude is above 448; magnitudes above
3.29e38, within 3 % of the largest number, may round up to infinity on the way back.
"""

from __future__ import annotations

from enum import StrEnum

import torch

from dispatch.kernels.language import cdiv, jit, launch, tl
from dispatch.kernels.operands import FLOATS, check_member, check_operand, check_range, runs_kernel

GROUP = 128
E4M3_MAX = 448.0
E4M3_NAN = 0x7F
SCALE_MIN = 2.0**-126  # the smallest normal fp32: its inverse is finite
GROUPS = 16  # of one program


class ScaleFormat(StrEnum):
    """How scales are stored: as fp32, or as the 8 exponent bits of a power of two (ue8m0)."""

    FP32 = "fp32"
    UE8M0 = "ue8m0"

    @property
    def dtype(self) -> torch.dtype:
        """Type of a scale: float32, or uint8 with the exponent plus 127."""
        return torch.float32 if self is ScaleFormat.FP32 else torch.uint8


def num_groups(hidden: int) -> int:
    """Return G, the scales of a row."""
    return cdiv(hidden, GROUP)


@jit
def quantised(values: tl.tensor, UE8M0: tl.constexpr) -> tl.tensor:
    """Return e4m3 bytes [n, 128] and fp32 scales [n, 1] of fp32 values [n, 128]."""
    magnitude = tl.abs(values)
    finite = magnitude < float("inf")
    amax = tl.max(tl.where(finite, magnitude, 0.0), 1)[:, None]
    # Rounded divisions: the approximate one gives other bits on other devices.
    scale = tl.div_rn(amax, 448.0 + tl.zeros_like(amax))
    scale = tl.maximum(scale, 1.1754943508222875e-38)
    if UE8M0:
        # A mantissa that is not zero carries into the exponent, then it is cut off.
        bits = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        scale = bits.to(tl.float32, bitcast=True)
    scaled = values * tl.div_rn(1.0 + tl.zeros_like(scale), scale)
    scaled = tl.minimum(tl.maximum(scaled, -448.0), 448.0)
    narrow = tl.where(finite, scaled, 0.0).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return tl.where(finite, narrow, 0x7F).to(tl.uint8), scale


@jit
def _quantise_kernel(
    x_ptr: tl.tensor,
    bytes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    hidden: tl.tensor,
    groups_of_row: tl.tensor,
    UE8M0: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    group = (tl.program_id(1) * GROUPS + tl.arange(0, GROUPS))[:, None]
    column = group * 128 + tl.arange(0, 128)[None, :]
    values = tl.load(x_ptr + row * hidden + column, mask=column < hidden, other=0.0)
    narrow, scale = quantised(values.to(tl.float32), UE8M0)
    tl.store(bytes_ptr + row * hidden + column, narrow, mask=column < hidden)
    if UE8M0:
        exponent = (scale.to(tl.int32, bitcast=True) >> 23).to(tl.uint8)
        tl.store(scales_ptr + row * groups_of_row + group, exponent, mask=group < groups_of_row)
    else:
        tl.store(scales_ptr + row * groups_of_row + group, scale, mask=group < groups_of_row)


@jit
def _dequantise_kernel(
    rows_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    out_ptr: tl.tensor,
    hidden: tl.tensor,
    groups_of_row: tl.tensor,
    UE8M0: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    group = (tl.program_id(1) * GROUPS + tl.arange(0, GROUPS))[:, None]
    column = group * 128 + tl.arange(0, 128)[None, :]
    values = tl.load(rows_ptr + row * hidden + column, mask=column < hidden, other=0.0)
    scale = tl.load(scales_ptr + row * groups_of_row + group, mask=group < groups_of_row, other=0)
    if UE8M0:
        scale = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    out = (values.to(tl.float32) * scale).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * hidden + column, out, mask=column < hidden)


def quantise(
    x: torch.Tensor, scale_format: ScaleFormat = ScaleFormat.FP32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert rows to fp8.

    Args:
        x: [R, H] bf16, fp16 or fp32, contiguous; any H.
        scale_format: How the scales are stored.

    Returns:
        [R, H] float8_e4m3fn, and [R, G] scales of `scale_format.dtype`.

    Raises:
        InputInvalid: A shape or type is not as stated; nothing was started.
        KernelsUnavailable: No kernels for this device.
    """
    check_operand("x", x, (None, None), FLOATS)
    num_rows, hidden = x.shape
    check_range("hidden", hidden, 1, 2**31 - 1)
    if not runs_kernel(x.device, converts_fp8=True):
        return quantise_torch(x, scale_format)
    rows = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    groups = num_groups(hidden)
    scales = x.new_empty((num_rows, groups), dtype=scale_format.dtype)
    launch(
        _quantise_kernel,
        (num_rows, cdiv(groups, GROUPS)),
        x,
        rows.view(torch.uint8),
        scales,
        hidden,
        groups,
        device=x.device,
        UE8M0=scale_format is ScaleFormat.UE8M0,
        GROUPS=GROUPS,
    )
    return rows, scales


def quantise_torch(
    x: torch.Tensor, scale_format: ScaleFormat = ScaleFormat.FP32
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `quantise`."""
    num_rows, hidden = x.shape
    groups = num_groups(hidden)
    padded = x.new_zeros((num_rows, groups * GROUP), dtype=torch.float32)
    padded[:, :hidden] = x
    values = padded.view(num_rows, groups, GROUP)
    finite = values.isfinite()
    kept = torch.where(finite, values, 0.0)
    scale = (kept.abs().amax(2, keepdim=True) / E4M3_MAX).clamp(min=SCALE_MIN)
    if scale_format is ScaleFormat.UE8M0:
        bits = (scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000
        scale = bits.view(torch.float32)
    scaled = (kept * (1.0 / scale)).clamp(-E4M3_MAX, E4M3_MAX)
    narrow = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    narrow = torch.where(finite, narrow, E4M3_NAN).view(num_rows, groups * GROUP)
    narrow = narrow[:, :hidden].contiguous()
    scales = scale.squeeze(2)
    if scale_format is ScaleFormat.UE8M0:
        scales = (scales.view(torch.int32) >> 23).to(torch.uint8)
    return narrow.view(torch.float8_e4m3fn), scales


def dequantise(
    rows: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Convert rows back from fp8.

    Args:
        rows: [R, H] float8_e4m3fn, contiguous.
        scales: [R, G] float32, or uint8 (ue8m0).
        dtype: bf16, fp16 or fp32.

    Returns:
        [R, H]: element times scale, computed in fp32 and rounded once.

    Raises:
        InputInvalid: A shape, type or device is not as stated; nothing was started.
        KernelsUnavailable: No kernels for this device.
    """
    check_operand("rows", rows, (None, None), (torch.float8_e4m3fn,))
    num_rows, hidden = rows.shape
    groups = num_groups(hidden)
    formats = tuple(scale_format.dtype for scale_format in ScaleFormat)
    check_operand("scales", scales, (num_rows, groups), formats, device=rows.device)
    check_member("dtype", dtype, FLOATS)
    if not runs_kernel(rows.device, converts_fp8=True):
        return dequantise_torch(rows, scales, dtype)
    out = torch.empty_like(rows, dtype=dtype)
    launch(
        _dequantise_kernel,
        (num_rows, cdiv(groups, GROUPS)),
        rows,
        scales,
        out,
        hidden,
        groups,
        device=rows.device,
        UE8M0=scales.dtype is ScaleFormat.UE8M0.dtype,
        GROUPS=GROUPS,
    )
    return out


def dequantise_torch(
    rows: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """See `dequantise`."""
    factors = scales
    if scales.dtype is ScaleFormat.UE8M0.dtype:
        factors = (scales.to(torch.int32) << 23).view(torch.float32)
    wide = factors.repeat_interleave(GROUP, dim=1)[:, : rows.shape[1]]
    return (rows.to(torch.float32) * wide).to(dtype)
