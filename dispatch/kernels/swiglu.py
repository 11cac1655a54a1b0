"""SwiGLU: the activation between an expert's two products, in one pass over its input.

    out[r, i] = silu(gate) * up,  gate = gate_up[r, i],  up = gate_up[r, I + i]
    silu(g) = g / (1 + exp(-g))

Legend: R rows, I columns of the result (the expert's width).

    gate_up  [0, ln 3 | 5, 8]      silu(0) = 0       silu(ln 3) = ln 3 / (1 + 1/3) = 0.8240
    out      [0, 6.5917]

Computed in fp32 and rounded once. Each element is by itself, so a row does not depend on others.
"""

from __future__ import annotations

import torch

from dispatch.kernels.grouped_tiles import check_bounds
from dispatch.kernels.language import cdiv, jit, launch, power_of_two, tl
from dispatch.kernels.operands import FLOATS, check_operand, check_range, runs_kernel

BLOCK = 1024  # 16 bytes of bf16 for each thread of four warps


@jit
def gated(
    gate_up_ptr: tl.tensor, width: tl.tensor, column: tl.tensor, mask: tl.tensor
) -> tl.tensor:
    """silu(gate) * up in fp32 at some columns of the row of gates and ups at `gate_up_ptr`."""
    gate = tl.load(gate_up_ptr + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + width + column, mask=mask, other=0.0).to(tl.float32)
    return gate / (1.0 + tl.exp(-gate)) * up


@jit
def _swiglu_kernel(
    gate_up_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_experts: tl.tensor,
    width: tl.tensor,
    num_pieces: tl.tensor,
    BOUNDED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    row = (program // num_pieces).to(tl.int64)
    column = program % num_pieces * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    if BOUNDED:
        mask &= row < tl.load(bounds_ptr + num_experts)
    result = gated(gate_up_ptr + row * 2 * width, width, column, mask)
    tl.store(out_ptr + row * width + column, result.to(out_ptr.dtype.element_ty), mask=mask)


def swiglu(gate_up: torch.Tensor, bounds: torch.Tensor | None = None) -> torch.Tensor:
    """Apply SwiGLU to every row.

    Args:
        gate_up: [R, 2I] bf16, fp16 or fp32, contiguous, the gates first.
        bounds: [E + 1] int32 or int64, as of a grouped GEMM: rows from `bounds[E]` on hold nothing
            and are left out. None: all rows.

    Returns:
        [R, I] of the same type; rows that are left out hold anything.

    Raises:
        InputInvalid: A shape or type is not as stated; nothing was started.
        KernelsUnavailable: No kernels for this device.
    """
    check_operand("gate_up", gate_up, (None, None), FLOATS)
    num_rows, both = gate_up.shape
    check_range("columns of gate_up modulo 2", both % 2, 0, 0)
    if bounds is not None:
        check_bounds(bounds, num_rows, max(0, bounds.numel() - 1), gate_up.device)
    if not runs_kernel(gate_up.device):
        return swiglu_torch(gate_up, bounds)
    width = both // 2
    out = gate_up.new_empty((num_rows, width))
    block = min(BLOCK, power_of_two(width))
    num_pieces = cdiv(width, block)
    launch(
        _swiglu_kernel,
        (num_rows * num_pieces,),
        gate_up,
        bounds,
        out,
        0 if bounds is None else bounds.numel() - 1,
        width,
        num_pieces,
        device=gate_up.device,
        BOUNDED=bounds is not None,
        BLOCK=block,
        num_warps=4,
    )
    return out


def swiglu_torch(gate_up: torch.Tensor, bounds: torch.Tensor | None = None) -> torch.Tensor:
    """See `swiglu`."""
    del bounds  # rows that may hold anything may hold the result too
    return gated_torch(gate_up).to(gate_up.dtype)


def gated_torch(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [R, 2I] in fp32: [R, I]."""
    gate, up = gate_up.to(torch.float32).chunk(2, dim=1)
    return gate / (1.0 + torch.exp(-gate)) * up
