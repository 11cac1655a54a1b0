"""Combine: the expert rows of each token, weighted and summed in fp32 in a fixed order.

    out[t] = cast(((0 + w[t,0] * row[t,0]) + w[t,1] * row[t,1]) + ...)      k ascending

Legend: T tokens, K choices of a token, R rows, H hidden.

    rows     0: [1, 2]   1: [10, 20]   2: [100, 200]
    slots    [2, 0]  [1, -1]          weights  [0.5, 2]  [0.25, 7]
    out      0.5 * rows[2] + 2 * rows[0] = [52, 104]      0.25 * rows[1] = [2.5, 5]

Without weights every factor is 1. That is how `reduced` ends: each rank makes one row per token
out of its own rows (with weights, to fp32), and the token's rank adds those, ranks ascending.

Every product and every sum is rounded by itself, so the bits are the reference's, wherever the rows
lie and whatever tokens stand beside. For this the launch forbids fused multiply-adds.
"""

from __future__ import annotations

import torch

from dispatch.kernels.language import cdiv, jit, launch, power_of_two, tl
from dispatch.kernels.operands import FLOATS, IDS, check_operand, check_range, runs_kernel

BLOCK_H = 1024  # 16 bytes of bf16 for each thread of four warps
UNROLL = 8  # rows on their way at once


@jit
def _combine_kernel(
    rows_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    hidden: tl.tensor,
    num_pieces: tl.tensor,
    K: tl.constexpr,
    UNROLL: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    BLOCK_H: tl.constexpr,
) -> None:
    # One program for a piece of one token: K pieces are gathered, one is written.
    program = tl.program_id(0)
    token = (program // num_pieces).to(tl.int64)
    column = program % num_pieces * BLOCK_H + tl.arange(0, BLOCK_H)
    in_row = column < hidden
    total = tl.zeros((BLOCK_H,), tl.float32)
    for first in range(0, K, UNROLL):
        for i in tl.static_range(UNROLL):
            choice = first + i
            slot = tl.load(slots_ptr + token * K + choice, mask=choice < K, other=-1).to(tl.int64)
            used = (slot >= 0) & (slot < num_rows)
            piece = tl.load(rows_ptr + slot * hidden + column, mask=in_row & used, other=0.0)
            product = piece.to(tl.float32)
            if HAS_WEIGHTS:
                product *= tl.load(weights_ptr + token * K + choice, mask=used, other=0.0)
            total += product
    tl.store(out_ptr + token * hidden + column, total.to(out_ptr.dtype.element_ty), mask=in_row)


def combine(
    rows: torch.Tensor,
    slots: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Sum each token's rows. The caller's tensors are only read.

    Args:
        rows: [R, H] bf16, fp16 or fp32, contiguous.
        slots: [T, K] int64 or int32, contiguous: row of each choice. A choice that is none of
            0..R-1 is left out: it adds 0, and its weight is not read.
        weights: [T, K] fp32, contiguous; None: all 1.
        out_dtype: Of the result; None: as `rows`.

    Returns:
        [T, H].

    Raises:
        InputInvalid: A shape or type is not as stated; nothing was started.
        KernelsUnavailable: No kernels for this device.
    """
    check_operand("rows", rows, (None, None), FLOATS)
    check_operand("slots", slots, (None, None), IDS, device=rows.device)
    num_tokens, topk = slots.shape
    if weights is not None:
        due = (num_tokens, topk)
        check_operand("weights", weights, due, (torch.float32,), device=rows.device)
    out_dtype = out_dtype or rows.dtype
    check_range("out_dtype", FLOATS.index(out_dtype) if out_dtype in FLOATS else -1, 0, 2)
    if not runs_kernel(rows.device):
        return combine_torch(rows, slots, weights, out_dtype=out_dtype)
    num_rows, hidden = rows.shape
    out = rows.new_empty((num_tokens, hidden), dtype=out_dtype)
    block = min(BLOCK_H, power_of_two(hidden))
    num_pieces = cdiv(hidden, block)
    launch(
        _combine_kernel,
        (num_tokens * num_pieces,),
        rows,
        slots,
        weights,
        out,
        num_rows,
        hidden,
        num_pieces,
        device=rows.device,
        K=topk,
        UNROLL=min(UNROLL, power_of_two(topk)),
        HAS_WEIGHTS=weights is not None,
        BLOCK_H=block,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


def combine_torch(
    rows: torch.Tensor,
    slots: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See `combine`."""
    num_tokens, topk = slots.shape
    total = rows.new_zeros((num_tokens, rows.shape[1]), dtype=torch.float32)
    used = (slots >= 0) & (slots < len(rows))
    for k in range(topk):
        chosen = used[:, k].nonzero().flatten()
        product = rows[slots[chosen, k].to(torch.int64)].to(torch.float32)
        if weights is not None:
            product = product * weights[chosen, k, None]
        total[chosen] = total[chosen] + product
    return total.to(out_dtype or rows.dtype)
