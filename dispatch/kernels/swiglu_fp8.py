"""SwiGLU whose result goes into an fp8 product: activation and conversion in one pass.

    elements, scales = quantise(silu(gate) * up)        the bf16 result is never written

Legend: R rows, I columns of the result, G = ceil(I / 128) groups of a row.

    gate_up  [0, 40 | 5, 11.2]     silu(0) * 5 = 0       silu(40) * 11.2 = 448
    scales   [1]                   elements [0, 448]

What is converted is the fp32 number, rounded only once. Groups and scales are as `fp8` says.
"""

from __future__ import annotations

import torch

from dispatch.kernels.fp8 import ScaleFormat, num_groups, quantise_torch, quantised
from dispatch.kernels.grouped_tiles import check_bounds
from dispatch.kernels.language import cdiv, jit, launch, tl
from dispatch.kernels.operands import FLOATS, check_operand, check_range, runs_kernel
from dispatch.kernels.swiglu import gated, gated_torch

GROUPS = 8  # of one program: 1024 elements


@jit
def _swiglu_fp8_kernel(
    gate_up_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    bytes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    num_experts: tl.tensor,
    width: tl.tensor,
    groups_of_row: tl.tensor,
    num_pieces: tl.tensor,
    BOUNDED: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    row = (program // num_pieces).to(tl.int64)
    group = (program % num_pieces * GROUPS + tl.arange(0, GROUPS))[:, None]
    column = group * 128 + tl.arange(0, 128)[None, :]
    in_row, in_groups = column < width, group < groups_of_row
    if BOUNDED:
        present = row < tl.load(bounds_ptr + num_experts)
        in_row, in_groups = in_row & present, in_groups & present
    values = gated(gate_up_ptr + row * 2 * width, width, column, in_row)
    narrow, scale = quantised(values, False)
    tl.store(bytes_ptr + row * width + column, narrow, mask=in_row)
    tl.store(scales_ptr + row * groups_of_row + group, scale, mask=in_groups)


def swiglu_fp8(
    gate_up: torch.Tensor, bounds: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply SwiGLU to every row and convert the result.

    Args:
        gate_up: [R, 2I] bf16, fp16 or fp32, contiguous, the gates first; I >= 1.
        bounds: [E + 1] int32 or int64, as of a grouped GEMM: rows from `bounds[E]` on hold nothing
            and are left out. None: all rows.

    Returns:
        [R, I] float8_e4m3fn and [R, G] fp32 scales, as `grouped_gemm_fp8` takes them. Rows that
        are left out hold anything.

    Raises:
        InputInvalid: A shape or type is not as stated; nothing was started.
        KernelsUnavailable: No kernels for this device.
    """
    check_operand("gate_up", gate_up, (None, None), FLOATS)
    num_rows, both = gate_up.shape
    check_range("columns of gate_up modulo 2", both % 2, 0, 0)
    check_range("columns of gate_up", both, 2, 2**31 - 1)
    if bounds is not None:
        check_bounds(bounds, num_rows, max(0, bounds.numel() - 1), gate_up.device)
    if not runs_kernel(gate_up.device):
        return swiglu_fp8_torch(gate_up, bounds)
    width, groups = both // 2, num_groups(both // 2)
    elements = gate_up.new_empty((num_rows, width), dtype=torch.float8_e4m3fn)
    scales = gate_up.new_empty((num_rows, groups), dtype=torch.float32)
    num_pieces = cdiv(groups, GROUPS)
    launch(
        _swiglu_fp8_kernel,
        (num_rows * num_pieces,),
        gate_up,
        bounds,
        elements.view(torch.uint8),
        scales,
        0 if bounds is None else bounds.numel() - 1,
        width,
        groups,
        num_pieces,
        device=gate_up.device,
        BOUNDED=bounds is not None,
        GROUPS=GROUPS,
        num_warps=4,
    )
    return elements, scales


def swiglu_fp8_torch(
    gate_up: torch.Tensor, bounds: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `swiglu_fp8`."""
    del bounds  # rows that may hold anything may hold the result too
    return quantise_torch(gated_torch(gate_up), ScaleFormat.FP32)
