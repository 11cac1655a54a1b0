"""Unpack: rows out of the messages, expert after expert, ready for a grouped matrix product.

Legend: W sources, E_l experts of this rank, R rows of room, H hidden, G groups of a row.

    row_offsets   128 144 512  -1 160  -1        from `arrange`: bytes in `messages`, -1 padding
    bounds        0 4 6
    rows          a0  a1  a3   0  b2   0         padding rows are zeros

Rows are moved as words of up to 8 bytes, not a bit changes. Nothing is written from `bounds[E_l]`
on: the room is for the worst case, the work is for what came, shared by a few thousand programs.
"""

from __future__ import annotations

from enum import StrEnum

import torch

from dispatch.kernels.arranged import Arranged
from dispatch.kernels.fp8 import ScaleFormat, num_groups
from dispatch.kernels.language import cdiv, jit, launch, power_of_two, tl
from dispatch.kernels.message_parts import check_buffer
from dispatch.kernels.operands import FLOATS, check_member, check_operand, check_range, runs_kernel
from dispatch.kernels.pack import BLOCK, row_programs, word_type

DTYPES = (*FLOATS, torch.float8_e4m3fn)
ROWS_OF_SCALES = 32  # of one program
PADDING_SCALE = {torch.float32: 0x3F800000, torch.uint8: 127}  # bits of 1


class ScaleLayout(StrEnum):
    """The order of scales in memory: row after row, or column after column.

    Columns begin 16 bytes apart or a multiple of that, as tensor-map loads want it.
    """

    ROW = "row"
    COLUMN = "column"


@jit
def used_rows(end_ptr: tl.tensor, overflow_ptr: tl.tensor) -> tl.tensor:
    """Return how many rows there are; none if there were too many for the room."""
    return tl.where(tl.load(overflow_ptr) != 0, 0, tl.load(end_ptr))


@jit
def _unpack_kernel(
    messages_ptr: tl.tensor,
    row_offsets_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    overflow_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    num_experts: tl.tensor,
    row_words: tl.tensor,
    WORD_BYTES: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < row_words
    used = used_rows(bounds_ptr + num_experts, overflow_ptr)
    for number in range(tl.program_id(0), used, tl.num_programs(0)):
        offset = tl.load(row_offsets_ptr + number)
        source = tl.maximum(offset, 0) // (WORD_BYTES * UNIT) * UNIT
        words = tl.load(messages_ptr + source + column, mask=inside & (offset >= 0), other=0)
        target = (tl.zeros((), tl.int64) + number) * row_words
        if UNIT == 2:
            target = tl.multiple_of(target, 2)
        tl.store(rows_ptr + target + column, words, mask=inside)


@jit
def _unpack_scales_kernel(
    messages_ptr: tl.tensor,
    scale_offsets_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    overflow_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    num_experts: tl.tensor,
    groups: tl.tensor,
    row_stride: tl.tensor,
    group_stride: tl.tensor,
    SCALE_BYTES: tl.constexpr,
    PADDING: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_G: tl.constexpr,
) -> None:
    group = (tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)).to(tl.int64)[None, :]
    used = used_rows(bounds_ptr + num_experts, overflow_ptr)
    for block in range(tl.program_id(0), (used + BLOCK_R - 1) // BLOCK_R, tl.num_programs(0)):
        row = (tl.zeros((), tl.int64) + block) * BLOCK_R + tl.arange(0, BLOCK_R)
        offset = tl.load(scale_offsets_ptr + row, mask=row < used, other=-1)[:, None]
        inside = (row < used)[:, None] & (group < groups)
        source = tl.maximum(offset, 0) // SCALE_BYTES + group
        scale = tl.load(messages_ptr + source, mask=inside & (offset >= 0), other=PADDING)
        target = row[:, None] * row_stride + group * group_stride
        tl.store(scales_ptr + target, scale, mask=inside)


def unpack(
    messages: torch.Tensor, arranged: Arranged, *, hidden: int, dtype: torch.dtype
) -> torch.Tensor:
    """Gather the rows that have arrived. Waits for nothing.

    Args:
        messages: [bytes] uint8, aligned to 64 bytes: as they were arranged.
        arranged: From `arrange` with `row_bytes` of this H and type.
        hidden: H.
        dtype: bf16, fp16, fp32 or float8_e4m3fn.

    Returns:
        [R, H] of `dtype`, fresh: undefined from `bounds[E_l]` on.

    Raises:
        InputInvalid: A shape, type, device or number is not as stated; nothing was started.
        KernelsUnavailable: No kernels for this device.
    """
    device = messages.device
    check_buffer(messages, device)
    check_range("hidden", hidden, 1, 2**31 - 1)
    check_member("dtype", dtype, DTYPES)
    check_operand("row_offsets", arranged.row_offsets, (None,), (torch.int64,), device=device)
    if not runs_kernel(device):
        return unpack_torch(messages, arranged, hidden=hidden, dtype=dtype)
    capacity = len(arranged.row_offsets)
    rows = messages.new_empty((capacity, hidden), dtype=dtype)
    row_bytes = hidden * dtype.itemsize
    word = word_type(row_bytes)
    row_words = row_bytes // word.itemsize
    parts = cdiv(row_words, BLOCK)
    launch(
        _unpack_kernel,
        (min(capacity, row_programs(parts)), parts),
        messages.view(word),
        arranged.row_offsets,
        arranged.bounds,
        arranged.faults[-1:],
        rows.view(torch.uint8).view(word),
        len(arranged.counts),
        row_words,
        device=device,
        WORD_BYTES=word.itemsize,
        UNIT=2 if row_bytes % 16 == 0 else 1,
        BLOCK=BLOCK,
    )
    return rows


def unpack_torch(
    messages: torch.Tensor, arranged: Arranged, *, hidden: int, dtype: torch.dtype
) -> torch.Tensor:
    """See `unpack`."""
    row_bytes = hidden * dtype.itemsize
    rows = messages.new_empty((len(arranged.row_offsets), row_bytes))
    used = 0 if arranged.faults[-1] else int(arranged.bounds[-1])
    offsets = arranged.row_offsets[:used, None]
    at = offsets.clamp(min=0) + torch.arange(row_bytes, device=messages.device)
    rows[:used] = torch.where(offsets >= 0, messages[at], 0)
    return rows.view(dtype)


def unpack_scales(
    messages: torch.Tensor,
    arranged: Arranged,
    *,
    hidden: int,
    scale_format: ScaleFormat = ScaleFormat.FP32,
    scale_layout: ScaleLayout = ScaleLayout.ROW,
) -> torch.Tensor:
    """Gather the scales of the rows that have arrived in fp8. Waits for nothing.

    Args:
        messages: [bytes] uint8, aligned to 64 bytes: as they were arranged.
        arranged: From `arrange` with `row_bytes` and `scale_bytes` of this H and format.
        hidden: H.
        scale_format: As they were packed.
        scale_layout: Order in memory of the result.

    Returns:
        [R, G] of the format's type, fresh; 1 for padding rows, undefined from `bounds[E_l]` on.
        Column after column it has the strides (1, R rounded up to 16 bytes).

    Raises:
        InputInvalid: A shape, type, device or number is not as stated; nothing was started.
        KernelsUnavailable: No kernels for this device.
    """
    device = messages.device
    check_buffer(messages, device)
    check_range("hidden", hidden, 1, 2**31 - 1)
    check_operand("scale_offsets", arranged.scale_offsets, (None,), (torch.int64,), device=device)
    if not runs_kernel(device):
        return unpack_scales_torch(
            messages, arranged, hidden=hidden, scale_format=scale_format, scale_layout=scale_layout
        )
    scales = _empty_scales(messages, arranged, hidden, scale_format, scale_layout)
    (capacity, groups), dtype = scales.shape, scale_format.dtype
    bits = torch.int32 if scale_format is ScaleFormat.FP32 else torch.uint8
    block_g = min(power_of_two(groups), 64)
    parts = cdiv(groups, block_g)
    launch(
        _unpack_scales_kernel,
        (min(cdiv(capacity, ROWS_OF_SCALES), row_programs(parts)), parts),
        messages.view(bits),
        arranged.scale_offsets,
        arranged.bounds,
        arranged.faults[-1:],
        scales.view(bits),
        len(arranged.counts),
        groups,
        *scales.stride(),
        device=device,
        SCALE_BYTES=dtype.itemsize,
        PADDING=PADDING_SCALE[dtype],
        BLOCK_R=ROWS_OF_SCALES,
        BLOCK_G=block_g,
    )
    return scales


def unpack_scales_torch(
    messages: torch.Tensor,
    arranged: Arranged,
    *,
    hidden: int,
    scale_format: ScaleFormat = ScaleFormat.FP32,
    scale_layout: ScaleLayout = ScaleLayout.ROW,
) -> torch.Tensor:
    """See `unpack_scales`."""
    scales = _empty_scales(messages, arranged, hidden, scale_format, scale_layout)
    dtype, used = scale_format.dtype, 0 if arranged.faults[-1] else int(arranged.bounds[-1])
    offsets = arranged.scale_offsets[:used, None]
    index = torch.arange(scales.shape[1], device=messages.device)
    found = messages.view(dtype)[offsets.clamp(min=0) // dtype.itemsize + index]
    scales[:used] = torch.where(offsets >= 0, found, 1 if dtype is torch.float32 else 127)
    return scales


def _empty_scales(
    messages: torch.Tensor,
    arranged: Arranged,
    hidden: int,
    scale_format: ScaleFormat,
    scale_layout: ScaleLayout,
) -> torch.Tensor:
    capacity, groups = len(arranged.scale_offsets), num_groups(hidden)
    dtype = scale_format.dtype
    if scale_layout is ScaleLayout.ROW:
        return messages.new_empty((capacity, groups), dtype=dtype)
    per_step = 16 // dtype.itemsize
    stride = cdiv(capacity, per_step) * per_step
    columns = messages.new_empty((groups, stride), dtype=dtype)
    return columns.t()[:capacity]
