"""Which tile of which expert a program of a grouped GEMM computes, and how large tiles are.

Legend: E experts, R rows grouped by expert, N columns of the result, K columns of the input.
An M tile is a run of BLOCK_M rows of one expert; an expert without rows has none.

    bounds   [0, 3, 3, 8]      BLOCK_M = 2
    M tiles  expert 0: [0, 2) [2, 3)      expert 1: none      expert 2: [3, 5) [5, 7) [7, 8)

Programs are numbered so that those running at the same time share memory: GROUP_M consecutive
M tiles compute a column of tiles each, then the next column. Mostly they are of one expert, so its
weights are read once for all of them, and their rows stay in the cache.

    GROUP_M = 2, two N tiles     M tile 0:  0  2     M tile 2:  4  6     M tile 4:  8  9
                                 M tile 1:  1  3     M tile 3:  5  7

How many M tiles there are is known on the device only. The launch has as many programs as there
could be, and those left over return at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch

from dispatch.errors import InputInvalid
from dispatch.kernels.language import cdiv, jit, tl
from dispatch.kernels.operands import IDS, check_operand, runs_kernel

FP8_BLOCK = 128  # elements with one scale
FEW_ROWS, MANY_ROWS, MOST_ROWS = 16, 128, 512  # of an expert, on average
DIVISOR = 16  # what Triton looks for in K: else elements are loaded one by one, in more registers


class Architecture(StrEnum):
    """What sizes of tiles depend on: registers and shared memory of a program."""

    CDNA = "cdna"  # 64 KiB
    AMPERE = "ampere"  # and all others: 99 to 164 KiB, products of single warps
    HOPPER = "hopper"  # and data-centre Blackwell: 227 KiB, products of groups of warps


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmTiles:
    """Sizes of one launch. The bits of a result row depend on these and on its input row alone.

    Attributes:
        block_m: Rows of a tile.
        block_n: Columns of a tile; divides 128 for fp8.
        block_k: Columns of the input at a time; 128 for fp8.
        group_m: M tiles that run side by side.
        num_warps: Warps of a program.
        num_stages: Steps whose loads are on their way at once.
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int = 8
    num_warps: int = 4
    num_stages: int = 3

    def num_programs(self, num_rows: int, num_experts: int, num_columns: int) -> int:
        """Most tiles that `num_rows` rows of `num_experts` experts can need."""
        # Each expert with rows has at most one M tile that is not full.
        m_tiles = num_rows // self.block_m + min(num_experts, num_rows)
        return m_tiles * cdiv(num_columns, self.block_n)

    def options(self) -> dict[str, int]:
        """What a launch is told of these sizes."""
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
            "GROUP_M": self.group_m,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


def architecture(device: torch.device) -> Architecture:
    """Return what a device is; for a CPU what its interpreter stands for."""
    if torch.version.hip is not None:
        return Architecture.CDNA
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] not in (9, 10):
        return Architecture.AMPERE
    return Architecture.HOPPER


def check_bounds(
    bounds: torch.Tensor, num_rows: int, num_experts: int, device: torch.device
) -> None:
    """Accept the bounds of expert groups, without waiting for a device.

    What they hold is read on the host only if it is there: on a GPU that would be a stall.

    Raises:
        InputInvalid: Shape, type or device is wrong; or the values descend or leave `[0, R]`.
    """
    check_operand("bounds", bounds, (num_experts + 1,), IDS, device=device)
    if runs_kernel(device) and device.type != "cpu":
        return
    values = bounds.tolist()
    if values != sorted(values) or values[0] < 0 or values[-1] > num_rows:
        raise InputInvalid(
            name="bounds", observed=str(values), expected=f"ascending within 0..{num_rows}"
        )


@jit
def tile_of_program(
    program: tl.tensor,
    bounds_ptr: tl.tensor,
    num_experts: tl.tensor,
    num_n_tiles: tl.tensor,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUP_M: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Expert, first row, end of the expert's rows and N tile of a program.

    The expert is `num_experts` if there is no such tile. EXPERTS is a power of two that is at
    least `num_experts`.
    """
    experts = tl.arange(0, EXPERTS)
    begins = tl.load(bounds_ptr + experts, mask=experts < num_experts, other=0)
    ends = tl.load(bounds_ptr + experts + 1, mask=experts < num_experts, other=0)
    tiles = ((ends - begins + (BLOCK_M - 1)) // BLOCK_M).to(tl.int32)
    closes = tl.cumsum(tiles, 0)
    num_m_tiles = tl.sum(tiles, 0)

    programs_per_group = GROUP_M * num_n_tiles
    first = program // programs_per_group * GROUP_M
    height = tl.maximum(tl.minimum(num_m_tiles - first, GROUP_M), 1)
    m_tile = first + program % programs_per_group % height
    n_tile = program % programs_per_group // height

    passed = closes <= m_tile  # experts whose tiles all come before this one
    exists = (m_tile < num_m_tiles) & (n_tile < num_n_tiles)
    expert = tl.where(exists, tl.sum(passed.to(tl.int32), 0), num_experts)
    within = (m_tile - tl.sum(tl.where(passed, tiles, 0), 0)).to(tl.int64)
    begin = tl.sum(tl.where(experts == expert, begins, 0), 0).to(tl.int64)
    end = tl.sum(tl.where(experts == expert, ends, 0), 0).to(tl.int64)
    return expert, begin + within * BLOCK_M, end, n_tile


@jit
def first_step(
    rows_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    expert: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    num_columns: tl.tensor,
    depth: tl.tensor,
    BLOCK_K: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Where the first BLOCK_K columns of the tile's rows and of its weights lie."""
    k = tl.arange(0, BLOCK_K)
    safe_column = tl.where(column < num_columns, column, 0).to(tl.int64)
    expert_column = expert.to(tl.int64) * num_columns + safe_column
    row_ptrs = rows_ptr + row[:, None] * depth + k[None, :]
    return row_ptrs, weights_ptr + expert_column[None, :] * depth + k[:, None]


@jit
def load_step(
    row_ptrs: tl.tensor,
    weight_ptrs: tl.tensor,
    left: tl.tensor,
    WHOLE_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Read one step of both; past the `left` columns of the input there are zeros."""
    if WHOLE_K:
        return tl.load(row_ptrs), tl.load(weight_ptrs)
    else:
        k = tl.arange(0, BLOCK_K)
        a = tl.load(row_ptrs, mask=k[None, :] < left, other=0.0)
        return a, tl.load(weight_ptrs, mask=k[:, None] < left, other=0.0)


@jit
def store_tile(
    out_ptr: tl.tensor,
    total: tl.tensor,
    row: tl.tensor,
    end: tl.tensor,
    column: tl.tensor,
    num_columns: tl.tensor,
) -> None:
    """Write what of a tile lies within the expert's rows and the result's columns."""
    target = out_ptr + row[:, None] * num_columns + column[None, :]
    inside = (row < end)[:, None] & (column < num_columns)[None, :]
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=inside)
