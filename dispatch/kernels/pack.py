"""Pack: a rank's rows into one message per member, whole messages in one launch.

Legend: T tokens, H hidden, K choices of a token, W members.

    tokens a b c, member 0 gets a and c, member 1 gets a and b (the example of `route`):

    to member 0   | header | 2 0    | 0 1     | pad | a c  |
    to member 1   | header | 2 1    | 0 1 1   | pad | a b  |
                             counts   choices         rows

A row is read once and written once to each member that has any of its token's experts. Rows are
moved as words of up to 8 bytes, so not a bit changes, whatever the type. The messages are those
of the CPU path, byte for byte; the bytes between their parts are left as they are.
"""

from __future__ import annotations

import torch

from dispatch.kernels.language import cdiv, jit, launch, power_of_two, tl
from dispatch.kernels.message_parts import (
    check_messages,
    message_tables,
    row_targets,
    write_choices,
    write_head,
    write_parts_torch,
)
from dispatch.kernels.operands import FLOATS, check_operand, check_range, runs_kernel
from dispatch.kernels.routed import ExpertSlots, Routed

WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)  # a row is a run of the widest
BLOCK = 512  # words that a program moves
PROGRAMS = 8192  # that share rows whose number only the device knows


@jit
def _pack_kernel(
    rows_ptr: tl.tensor,
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
    row_words: tl.tensor,
    K: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if token < num_tokens:
        column = part * BLOCK + tl.arange(0, BLOCK)
        source = token * row_words
        if UNIT == 2:
            source = tl.multiple_of(source, 2)
        row = tl.load(rows_ptr + source + column, mask=column < row_words)
        k = tl.arange(0, BLOCK_K)
        number, _, sent, begin = row_targets(
            token, token_rows_ptr, targets_ptr, offsets_ptr, slot_bounds_ptr, choice_bounds_ptr,
            K, BLOCK_K,
        )  # fmt: skip
        # In pairs of words, where a row has whole ones: then 16 bytes are moved at a time.
        at = (begin // WORD_BYTES + number * row_words) // UNIT
        at = tl.where(sent, at, -1)
        for choice in range(K):
            target = tl.sum(tl.where(k == choice, at, 0), 0)
            if target >= 0:
                tl.store(messages_ptr + target * UNIT + column, row, mask=column < row_words)
        if part == 0:
            write_choices(
                token, words_ptr, offsets_ptr, slot_bounds_ptr, choice_bounds_ptr,
                choice_rows_ptr, places_ptr, targets_ptr, K, BLOCK_K,
            )  # fmt: skip
    elif part == 0:
        write_head(
            token - num_tokens, words_ptr, num_bytes_ptr, header_ptr, offsets_ptr,
            slot_bounds_ptr, counts_ptr, choice_bounds_ptr, row_bounds_ptr,
            row_words * WORD_BYTES, 0, 128,
        )  # fmt: skip


def word_type(row_bytes: int, *addresses: int) -> torch.dtype:
    """Return the widest type that rows at these addresses are a run of."""
    return next(
        word
        for word in WORDS
        if not any(number % word.itemsize for number in (row_bytes, *addresses))
    )


def row_programs(parts: int) -> int:
    """Return how many programs share the rows, each of `parts` parts."""
    return max(1, PROGRAMS // parts)


def pack(
    x: torch.Tensor,
    routed: Routed,
    slots: ExpertSlots,
    *,
    header: torch.Tensor,
    messages: torch.Tensor,
    offsets: torch.Tensor,
) -> torch.Tensor:
    """Write this rank's dispatch messages. Waits for nothing.

    Args:
        x: [T, H] bf16, fp16 or fp32, contiguous; any H.
        routed: From `route` with the same tokens.
        slots: The tables that it was routed with.
        header: [64] uint8: of `dispatch.message`, with any numbers of experts, choices and rows.
        messages: [bytes] uint8, aligned to 64 bytes; written to. Bounds are not checked on the
            device: room for the largest message at each offset is the caller's promise.
        offsets: [W] int64: where each member's message begins, a multiple of 64; -1 writes none.

    Returns:
        [W] int64: bytes of each message, 0 where none was written.

    Raises:
        InputInvalid: A shape, type, device or alignment is not as stated; nothing was started.
        KernelsUnavailable: No kernels for this device.
    """
    check_operand("x", x, (len(routed.places), None), FLOATS)
    check_range("hidden", x.shape[1], 1, 2**31 - 1)
    check_messages(routed, slots, header, messages, offsets, x.device)
    if not runs_kernel(x.device):
        return pack_torch(x, routed, slots, header=header, messages=messages, offsets=offsets)
    (num_tokens, hidden), topk = x.shape, routed.places.shape[1]
    row_bytes = hidden * x.itemsize
    word = word_type(row_bytes, x.data_ptr())
    row_words = row_bytes // word.itemsize
    num_bytes = torch.empty_like(offsets)
    launch(
        _pack_kernel,
        (num_tokens + slots.num_members, cdiv(row_words, BLOCK) if num_tokens else 1),
        x.detach().view(torch.uint8).view(word),
        messages.view(torch.int32),
        messages.view(word),
        num_bytes,
        *message_tables(routed, slots, header, offsets),
        num_tokens,
        row_words,
        device=x.device,
        K=topk,
        WORD_BYTES=word.itemsize,
        UNIT=2 if row_bytes % 16 == 0 and x.data_ptr() % 16 == 0 else 1,
        BLOCK=BLOCK,
        BLOCK_K=power_of_two(topk),
    )
    return num_bytes


def pack_torch(
    x: torch.Tensor,
    routed: Routed,
    slots: ExpertSlots,
    *,
    header: torch.Tensor,
    messages: torch.Tensor,
    offsets: torch.Tensor,
) -> torch.Tensor:
    """See `pack`."""
    row_bytes = x.shape[1] * x.itemsize
    rows = x.detach().view(torch.uint8)
    num_bytes = torch.zeros_like(offsets)
    for member, offset in enumerate(offsets.tolist()):
        if offset < 0:
            continue
        message = messages[offset:]
        begin, tokens = write_parts_torch(member, routed, slots, header, message)
        end = begin + len(tokens) * row_bytes
        message[begin:end].view(len(tokens), row_bytes).copy_(rows[tokens])
        num_bytes[member] = end
    return num_bytes
