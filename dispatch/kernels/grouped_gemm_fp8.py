"""Grouped GEMM in fp8 e4m3: rows with a scale for 128 elements, weights with one for 128 x 128.

    out[r, n] = sum over blocks j of K:
        (rows[r, j] . weights[e, n, j]) * row_scales[r, j] * weight_scales[e, n // 128, j]

for the expert e with bounds[e] <= r < bounds[e + 1].

Legend: E experts, R rows grouped by expert, N columns of the result, K columns of the input,
J = ceil(K / 128) blocks of K; the last blocks of N and K may be shorter.

    rows     [1, 2]  [4, 4]     row_scales [0.5]  [2]      bounds [0, 1, 2]
    weights  0: [[1, 1]]        1: [[2, 0.5]]              weight_scales  0: [[1]]    1: [[0.25]]
    out      (1 + 2) * 0.5 * 1  =  1.5        (8 + 2) * 2 * 0.25  =  5

The tensor cores of Hopper add fp8 products with few bits; so each block's sum leaves them, is
scaled and added in fp32. Bounds, order and bits: as in `grouped_gemm`.
"""

from __future__ import annotations

import torch

from dispatch.kernels.grouped_tiles import (
    DIVISOR,
    FEW_ROWS,
    FP8_BLOCK,
    MANY_ROWS,
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
from dispatch.kernels.operands import check_member, check_operand, check_range, runs_kernel

RESULTS = (torch.bfloat16, torch.float16, torch.float32)
E4M3 = (torch.float8_e4m3fn,)
FP32 = (torch.float32,)


@jit
def _grouped_gemm_fp8_kernel(
    rows_ptr: tl.tensor,
    row_scales_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    weight_scales_ptr: tl.tensor,
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
    num_blocks = tl.cdiv(depth, BLOCK_K)
    row_scale_ptrs = row_scales_ptr + safe_row * num_blocks
    # A tile lies within one block of N, so one number scales all its columns.
    expert_block = expert.to(tl.int64) * tl.cdiv(num_columns, 128) + n_tile * BLOCK_N // 128
    weight_scale_ptr = weight_scales_ptr + expert_block * num_blocks
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for j in range(num_blocks):
        a, b = load_step(row_ptrs, weight_ptrs, depth - j * BLOCK_K, WHOLE_K, BLOCK_K)
        scale = tl.load(row_scale_ptrs + j) * tl.load(weight_scale_ptr + j)
        total += tl.dot(a, b) * scale[:, None]
        row_ptrs += BLOCK_K
        weight_ptrs += BLOCK_K
    store_tile(out_ptr, total, row, end, column, num_columns)


def gemm_fp8_tiles(num_rows: int, num_experts: int, depth: int, kind: Architecture) -> GemmTiles:
    """Choose sizes by the mean number of rows of an expert, and by K (see `gemm_tiles`)."""
    if depth % DIVISOR:
        return GemmTiles(block_m=32, block_n=64, block_k=128, num_warps=8, num_stages=2)
    mean = cdiv(num_rows, max(1, num_experts))
    if kind is Architecture.CDNA:
        block_m = 16 if mean <= FEW_ROWS else 64
        return GemmTiles(block_m=block_m, block_n=128, block_k=128, num_warps=8, num_stages=2)
    if mean <= FEW_ROWS:
        return GemmTiles(block_m=16, block_n=64, block_k=128, num_warps=4, num_stages=4)
    if mean <= MANY_ROWS:
        return GemmTiles(block_m=64, block_n=128, block_k=128, num_warps=4, num_stages=4)
    return GemmTiles(block_m=128, block_n=128, block_k=128, num_warps=8, num_stages=4)


def grouped_gemm_fp8(
    rows: torch.Tensor,
    row_scales: torch.Tensor,
    weights: torch.Tensor,
    weight_scales: torch.Tensor,
    bounds: torch.Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    tiles: GemmTiles | None = None,
) -> torch.Tensor:
    """Multiply the rows of each expert with its weights.

    Args:
        rows: [R, K] e4m3, contiguous, grouped by expert.
        row_scales: [R, J] fp32, contiguous: what the elements of a block are multiplied by.
        weights: [E, N, K] e4m3, contiguous.
        weight_scales: [E, ceil(N / 128), J] fp32, contiguous.
        bounds: [E + 1] int32 or int64, ascending within 0..R. On a GPU the values are not checked.
        out_dtype: bf16, fp16 or fp32.
        tiles: Sizes; None: chosen by R and E. Fixed ones make the bits independent of both.

    Returns:
        [R, N]; rows outside `bounds` hold anything.

    Raises:
        InputInvalid: A shape or type is not as stated; nothing was started.
        KernelsUnavailable: No kernels for this device.
    """
    check_operand("rows", rows, (None, None), E4M3)
    device, (num_rows, depth) = rows.device, rows.shape
    num_blocks = cdiv(depth, FP8_BLOCK)
    check_operand("row_scales", row_scales, (num_rows, num_blocks), FP32, device=device)
    check_operand("weights", weights, (None, None, depth), E4M3, device=device)
    num_experts, num_columns, _ = weights.shape
    due = (num_experts, cdiv(num_columns, FP8_BLOCK), num_blocks)
    check_operand("weight_scales", weight_scales, due, FP32, device=device)
    check_bounds(bounds, num_rows, num_experts, device)
    check_member("out_dtype", out_dtype, RESULTS)
    if not runs_kernel(device):
        return grouped_gemm_fp8_torch(
            rows, row_scales, weights, weight_scales, bounds, out_dtype=out_dtype
        )
    tiles = tiles or gemm_fp8_tiles(num_rows, num_experts, depth, architecture(device))
    check_range("block_k", tiles.block_k, FP8_BLOCK, FP8_BLOCK)
    check_range("128 % block_n", FP8_BLOCK % tiles.block_n, 0, 0)
    out = rows.new_empty((num_rows, num_columns), dtype=out_dtype)
    launch(
        _grouped_gemm_fp8_kernel,
        (tiles.num_programs(num_rows, num_experts, num_columns),),
        rows,
        row_scales,
        weights,
        weight_scales,
        bounds,
        out,
        num_experts,
        num_columns,
        depth,
        device=device,
        EXPERTS=power_of_two(num_experts),
        WHOLE_K=depth % FP8_BLOCK == 0,
        **tiles.options(),
    )
    return out


def grouped_gemm_fp8_torch(
    rows: torch.Tensor,
    row_scales: torch.Tensor,
    weights: torch.Tensor,
    weight_scales: torch.Tensor,
    bounds: torch.Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    tiles: GemmTiles | None = None,
) -> torch.Tensor:
    """See `grouped_gemm_fp8`."""
    del tiles  # of the kernel only
    (num_rows, depth), num_columns = rows.shape, weights.shape[1]
    out = rows.new_empty((num_rows, num_columns), dtype=out_dtype)
    columns = torch.arange(num_columns, device=rows.device) // FP8_BLOCK
    begin, *ends = bounds.tolist()
    for weight, scales, end in zip(weights, weight_scales, ends, strict=True):
        total = torch.zeros(end - begin, num_columns, device=rows.device)
        for j, low in enumerate(range(0, depth, FP8_BLOCK)):
            block = slice(low, low + FP8_BLOCK)
            product = (
                rows[begin:end, block].to(torch.float32) @ weight[:, block].to(torch.float32).T
            )
            total += product * (row_scales[begin:end, j, None] * scales[columns, j])
        out[begin:end] = total.to(out_dtype)
        begin = end
    return out
