"""Pack in fp8: as `pack`, with each row converted on the way, once, whoever gets it.

Legend: T tokens, H hidden, G groups of a row, K choices of a token, W members.

    | header | counts | choices | pad | rows U * H | pad | scales U * G * 4 (ue8m0: U * G) |

    one token, one member, hidden 2     x  1 -2     row  76 FE (224 -448)     scale  2 / 448

Elements and scales are those of `fp8`, bit for bit.
"""

from __future__ import annotations

import torch

from dispatch.kernels.fp8 import GROUPS, ScaleFormat, num_groups, quantise_torch, quantised
from dispatch.kernels.language import cdiv, jit, launch, power_of_two, tl
from dispatch.kernels.message_parts import (
    check_messages,
    message_tables,
    round_up,
    row_targets,
    scales_offset,
    write_choices,
    write_head,
    write_parts_torch,
)
from dispatch.kernels.operands import FLOATS, check_operand, check_range, runs_kernel
from dispatch.kernels.routed import ExpertSlots, Routed


@jit
def _pack_fp8_kernel(
    x_ptr: tl.tensor,
    words_ptr: tl.tensor,
    messages_ptr: tl.tensor,
    num_bytes_ptr: tl.tensor,
    header_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    slot_bounds_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    choice_bounds_ptr: tl.tensor,
    row_bounds_ptr: tl.tensor,
    choice_rows_ptr: tl.tensor,
    places_ptr: tl.tensor,
    targets_ptr: tl.tensor,
    token_rows_ptr: tl.tensor,
    num_tokens: tl.tensor,
    hidden: tl.tensor,
    groups_of_row: tl.tensor,
    K: tl.constexpr,
    UE8M0: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    UNIT: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if token < num_tokens:
        group = part * GROUPS + tl.arange(0, GROUPS)
        column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
        values = tl.load(x_ptr + token * hidden + column, mask=column < hidden, other=0.0)
        narrow, scale = quantised(values.to(tl.float32), UE8M0)
        bits = tl.reshape(scale.to(tl.int32, bitcast=True), (GROUPS,))
        k = tl.arange(0, BLOCK_K)
        number, member, sent, begin = row_targets(
            token, token_rows_ptr, targets_ptr, offsets_ptr, slot_bounds_ptr, choice_bounds_ptr,
            K, BLOCK_K,
        )  # fmt: skip
        rows = tl.load(row_bounds_ptr + member + 1, mask=sent, other=0).to(tl.int64)
        rows -= tl.load(row_bounds_ptr + member, mask=sent, other=0)
        scales = round_up(begin + rows * hidden) // SCALE_BYTES + number * groups_of_row
        at = tl.where(sent, (begin + number * hidden) // UNIT, -1)
        for choice in range(K):
            target = tl.sum(tl.where(k == choice, at, 0), 0)
            if target >= 0:
                tl.store(messages_ptr + target * UNIT + column, narrow, mask=column < hidden)
                scale_at = tl.sum(tl.where(k == choice, scales, 0), 0) + group
                if UE8M0:
                    exponent = (bits >> 23).to(tl.uint8)
                    tl.store(messages_ptr + scale_at, exponent, mask=group < groups_of_row)
                else:
                    tl.store(words_ptr + scale_at, bits, mask=group < groups_of_row)
        if part == 0:
            write_choices(
                token, words_ptr, offsets_ptr, slot_bounds_ptr, choice_bounds_ptr,
                choice_rows_ptr, places_ptr, targets_ptr, K, BLOCK_K,
            )  # fmt: skip
    elif part == 0:
        write_head(
            token - num_tokens, words_ptr, num_bytes_ptr, header_ptr, offsets_ptr,
            slot_bounds_ptr, counts_ptr, choice_bounds_ptr, row_bounds_ptr,
            hidden, groups_of_row * SCALE_BYTES, 128,
        )  # fmt: skip


def pack_fp8(
    x: torch.Tensor,
    routed: Routed,
    slots: ExpertSlots,
    *,
    header: torch.Tensor,
    messages: torch.Tensor,
    offsets: torch.Tensor,
    scale_format: ScaleFormat = ScaleFormat.FP32,
) -> torch.Tensor:
    """Write this rank's dispatch messages with rows in fp8. Waits for nothing.

    Args:
        x: [T, H] bf16, fp16 or fp32, contiguous; any H.
        routed: From `route` with the same tokens.
        slots: The tables that it was routed with.
        header: [64] uint8, as for `pack`.
        messages: [bytes] uint8, aligned to 64 bytes, as for `pack`.
        offsets: [W] int64, as for `pack`.
        scale_format: How the scales are written.

    Returns:
        [W] int64: bytes of each message, 0 where none was written.

    Raises:
        InputInvalid: A shape, type, device or alignment is not as stated; nothing was started.
        KernelsUnavailable: No kernels for this device.
    """
    check_operand("x", x, (len(routed.places), None), FLOATS)
    check_range("hidden", x.shape[1], 1, 2**31 - 1)
    check_messages(routed, slots, header, messages, offsets, x.device)
    if not runs_kernel(x.device, converts_fp8=True):
        return pack_fp8_torch(
            x, routed, slots, header=header, messages=messages, offsets=offsets,
            scale_format=scale_format,
        )  # fmt: skip
    (num_tokens, hidden), topk = x.shape, routed.places.shape[1]
    groups = num_groups(hidden)
    num_bytes = torch.empty_like(offsets)
    launch(
        _pack_fp8_kernel,
        (num_tokens + slots.num_members, cdiv(groups, GROUPS) if num_tokens else 1),
        x,
        messages.view(torch.int32),
        messages,
        num_bytes,
        *message_tables(routed, slots, header, offsets),
        num_tokens,
        hidden,
        groups,
        device=x.device,
        K=topk,
        UE8M0=scale_format is ScaleFormat.UE8M0,
        SCALE_BYTES=scale_format.dtype.itemsize,
        UNIT=16 if hidden % 16 == 0 else 1,
        GROUPS=GROUPS,
        BLOCK_K=power_of_two(topk),
    )
    return num_bytes


def pack_fp8_torch(
    x: torch.Tensor,
    routed: Routed,
    slots: ExpertSlots,
    *,
    header: torch.Tensor,
    messages: torch.Tensor,
    offsets: torch.Tensor,
    scale_format: ScaleFormat = ScaleFormat.FP32,
) -> torch.Tensor:
    """See `pack_fp8`."""
    rows, scales = quantise_torch(x, scale_format)
    rows, scales = rows.view(torch.uint8), scales.view(torch.uint8)
    num_bytes = torch.zeros_like(offsets)
    for member, offset in enumerate(offsets.tolist()):
        if offset < 0:
            continue
        message = messages[offset:]
        begin, tokens = write_parts_torch(member, routed, slots, header, message)
        for part in (rows, scales):
            row_bytes = part.shape[1]
            end = begin + len(tokens) * row_bytes
            message[begin:end].view(len(tokens), row_bytes).copy_(part[tokens])
            begin = scales_offset(begin, len(tokens), row_bytes)
        num_bytes[member] = end
    return num_bytes
