"""Grouped GEMM in bf16: the rows of each expert times that expert's weights.

    out[r] = rows[r] @ weights[e].T        for the expert e with bounds[e] <= r < bounds[e + 1]

Legend: E experts, R rows grouped by expert, N columns of the result, K columns of the input.

    rows     [1, 2]  [3, 4]  [5, 6]             bounds [0, 1, 1, 3]: expert 1 has none
    weights  0: [[1, 0], [0, 1]]   1: any   2: [[1, 1], [2, 0]]
    out      [1, 2]  [3 + 4, 2 * 3]  [5 + 6, 2 * 5]  =  [1, 2]  [7, 6]  [11, 10]

Bounds may be aligned, as `unpack` makes them: padding rows are rows like others, and zeros there
give zeros. Rows from `bounds[E]` on are not computed, so a buffer may be larger than its content.
Every tile is one program's, which adds along K in fp32 in ascending order: no atomics, no split,
the same bits in each run.
"""

from __future__ import annotations

import torch

from dispatch.kernels.grouped_tiles import (
    DIVISOR,
    FEW_ROWS,
    MANY_ROWS,
    MOST_ROWS,
    Architecture,
    GemmTiles,
    architecture,
    check_bounds,
    first_step,
    load_step,
    store_tile,
    tile_of_program,
)
from dispatch.kernels.language import cdiv, jit, launch, power_of_two, tl
from dispatch.kernels.operands import check_operand, runs_kernel

HALVES = (torch.bfloat16, torch.float16)


@jit
def _grouped_gemm_kernel(
    rows_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_experts: tl.tensor,
    num_columns: tl.tensor,
    depth: tl.tensor,
    EXPERTS: tl.constexpr,
    WHOLE_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
) -> None:
    expert, first, end, n_tile = tile_of_program(
        tl.program_id(0),
        bounds_ptr,
        num_experts,
        tl.cdiv(num_columns, BLOCK_N),
        EXPERTS,
        BLOCK_M,
        GROUP_M,
    )
    if expert == num_experts:
        return
    row = first + tl.arange(0, BLOCK_M)
    column = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    # Lanes past the edge read the first row or column again: no mask in the loop.
    safe_row = tl.where(row < end, row, first)
    row_ptrs, weight_ptrs = first_step(
        rows_ptr, weights_ptr, expert, safe_row, column, num_columns, depth, BLOCK_K
    )
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(tl.cdiv(depth, BLOCK_K)):
        a, b = load_step(row_ptrs, weight_ptrs, depth - step * BLOCK_K, WHOLE_K, BLOCK_K)
        total = tl.dot(a, b, total)
        row_ptrs += BLOCK_K
        weight_ptrs += BLOCK_K
    store_tile(out_ptr, total, row, end, column, num_columns)


def gemm_tiles(num_rows: int, num_experts: int, depth: int, kind: Architecture) -> GemmTiles:
    """Choose sizes by the mean number of rows of an expert, and by K.

    With few rows the weights are all that is read, and many narrow programs read them fastest;
    with many the tiles are as large as registers and shared memory allow.
    """
    if depth % DIVISOR:
        return GemmTiles(block_m=64, block_n=64, block_k=64, num_warps=8, num_stages=2)
    mean = cdiv(num_rows, max(1, num_experts))
    if kind is Architecture.CDNA:
        block_m = 16 if mean <= FEW_ROWS else 64 if mean <= MANY_ROWS else 128
        return GemmTiles(block_m=block_m, block_n=128, block_k=64, num_warps=8, num_stages=2)
    if mean <= FEW_ROWS:
        return GemmTiles(block_m=16, block_n=64, block_k=128, num_warps=4, num_stages=4)
    if mean <= MANY_ROWS:
        return GemmTiles(block_m=64, block_n=128, block_k=64, num_warps=4, num_stages=4)
    if mean <= MOST_ROWS or kind is Architecture.AMPERE:
        return GemmTiles(block_m=128, block_n=128, block_k=64, num_warps=8, num_stages=4)
    return GemmTiles(block_m=128, block_n=256, block_k=64, num_warps=8, num_stages=4)


def grouped_gemm(
    rows: torch.Tensor,
    weights: torch.Tensor,
    bounds: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    tiles: GemmTiles | None = None,
) -> torch.Tensor:
    """Multiply the rows of each expert with its weights.

    Args:
        rows: [R, K] bf16 or fp16, contiguous, grouped by expert.
        weights: [E, N, K] of the same type, contiguous: each expert's matrix as a linear layer
            stores it.
        bounds: [E + 1] int32 or int64, ascending within 0..R. On a GPU the values are not checked.
        out: [R, N] of the same type or fp32, contiguous, to be written into; None: a new one.
            Rows outside `bounds` keep what they hold.
        tiles: Sizes; None: chosen by R and E. Fixed ones make the bits independent of both.

    Returns:
        `out`.

    Raises:
        InputInvalid: A shape or type is not as stated; nothing was started.
        KernelsUnavailable: No kernels for this device.
    """
    check_operand("rows", rows, (None, None), HALVES)
    num_rows, depth = rows.shape
    check_operand("weights", weights, (None, None, depth), (rows.dtype,), device=rows.device)
    num_experts, num_columns, _ = weights.shape
    check_bounds(bounds, num_rows, num_experts, rows.device)
    if out is None:
        out = rows.new_empty((num_rows, num_columns))
    due = (num_rows, num_columns)
    check_operand("out", out, due, (rows.dtype, torch.float32), device=rows.device)
    if not runs_kernel(rows.device):
        return grouped_gemm_torch(rows, weights, bounds, out=out)
    tiles = tiles or gemm_tiles(num_rows, num_experts, depth, architecture(rows.device))
    launch(
        _grouped_gemm_kernel,
        (tiles.num_programs(num_rows, num_experts, num_columns),),
        rows,
        weights,
        bounds,
        out,
        num_experts,
        num_columns,
        depth,
        device=rows.device,
        EXPERTS=power_of_two(num_experts),
        WHOLE_K=depth % tiles.block_k == 0,
        **tiles.options(),
    )
    return out


def grouped_gemm_torch(
    rows: torch.Tensor,
    weights: torch.Tensor,
    bounds: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    tiles: GemmTiles | None = None,
) -> torch.Tensor:
    """See `grouped_gemm`."""
    del tiles  # of the kernel only
    if out is None:
        out = rows.new_empty((len(rows), weights.shape[1]))
    begin, *ends = bounds.tolist()
    for weight, end in zip(weights, ends, strict=True):
        product = rows[begin:end].to(out.dtype) @ weight.to(out.dtype).T
        out[begin:end] = product
        begin = end
    return out
