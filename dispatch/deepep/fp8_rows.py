"""Rows in fp8 e4m3, one scale for each run of 128 elements.

    scale = max(amax, 1e-4) / 448        row = e4m3(x * (448 / max(amax, 1e-4)))

With `round_scale` the scale is the next power of two that is not smaller, so that no value exceeds
448 after scaling. What is not finite does not count for the maximum and becomes NaN, which e4m3
can show; it has no infinity. So a scale is never 0, NaN or infinite.

    [0, 0, ... 0]             scale 1e-4 / 448, zeros
    [448, 1, ... nan, inf]    scale 1: 448, 1, ... nan, nan
"""

from __future__ import annotations

import torch

from dispatch.errors import InputInvalid

GROUP = 128  # elements that share a scale
PACKED_GROUP = 512  # elements whose four exponents share an int32
E4M3_MAX = 448.0
AMAX_MIN = 1e-4


def check_fp8_width(hidden: int, *, packed: bool) -> None:
    """Accept a row size that divides into groups.

    Raises:
        InputInvalid: It does not.
    """
    group = PACKED_GROUP if packed else GROUP
    if hidden % group:
        raise InputInvalid(
            name="hidden size of fp8 rows", observed=str(hidden), expected=f"a multiple of {group}"
        )


def to_fp8(x: torch.Tensor, *, round_scale: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows.

    Args:
        x: [..., H] floating, H a multiple of 128.
        round_scale: Make the scales powers of two.

    Returns:
        [..., H] float8_e4m3fn, and [..., H / 128] fp32 scales: row * scale is about x.
    """
    groups = x.float().reshape(*x.shape[:-1], x.shape[-1] // GROUP, GROUP)
    finite = groups.isfinite()
    amax = torch.where(finite, groups, 0.0).abs().amax(-1).clamp(min=AMAX_MIN)
    if round_scale:
        scales = torch.exp2(exponents(amax / E4M3_MAX).float() - 127)
        factors = 1.0 / scales
    else:
        scales = amax / E4M3_MAX
        factors = E4M3_MAX / amax
    scaled = (groups * factors.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX)
    rows = torch.where(finite, scaled, torch.nan).to(torch.float8_e4m3fn)
    return rows.flatten(-2), scales


def exponents(scales: torch.Tensor) -> torch.Tensor:
    """Return the biased exponent of the smallest power of two that is not below each scale.

    Args:
        scales: fp32, positive and normal.

    Returns:
        int32 of the same shape, 1..254: the format that is called UE8M0.
    """
    bits = scales.contiguous().view(torch.int32)
    return (bits >> 23) + ((bits & 0x7F_FFFF) != 0).int()


def pack_exponents(scales: torch.Tensor) -> torch.Tensor:
    """Pack power-of-two scales, four exponents in an int32, the first in the lowest byte.

    Args:
        scales: [..., H / 128] fp32 powers of two, H a multiple of 512.

    Returns:
        [..., H / 512] int32.
    """
    return exponents(scales).to(torch.uint8).contiguous().view(torch.int32)


def column_major(scales: torch.Tensor) -> torch.Tensor:
    """Return the same values with the rows next to each other in memory, per last two axes."""
    return scales.mT.contiguous().mT
