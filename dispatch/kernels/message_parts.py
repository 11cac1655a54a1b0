"""The parts of a dispatch message on a GPU, at the places that `dispatch.layout` draws.

    | header 64 | counts 4*E_w | choices 4*N | pad | rows U*row_bytes | pad | scales U*scale_bytes |

E_w experts of the receiving member, N choices for it, U rows. The last two parts are there in fp8
messages only. Every part begins at a multiple of 64 bytes, apart from the choices. How many choices
and rows there are is known on the device alone, so the kernels find the places themselves.
"""

from __future__ import annotations

import torch

from dispatch.errors import InputInvalid
from dispatch.kernels.language import jit, tl
from dispatch.kernels.operands import check_operand
from dispatch.kernels.routed import ExpertSlots, Routed
from dispatch.layout import ALIGN_BYTES, HEADER_BYTES, aligned, rows_offset

# Words of the header that are written here: experts, choices, rows (see `dispatch.message`).
EXPERTS_WORD = 9


@jit
def round_up(num_bytes: tl.tensor) -> tl.tensor:
    """Return the next multiple of 64."""
    return (num_bytes + 63) // 64 * 64


@jit
def rows_begin(
    offset: tl.tensor,
    member: tl.tensor,
    present: tl.tensor,
    slot_bounds_ptr: tl.tensor,
    choice_bounds_ptr: tl.tensor,
) -> tl.tensor:
    """Return the byte at which the rows for each member begin; `offset` is its message's."""
    experts = tl.load(slot_bounds_ptr + member + 1, mask=present, other=0)
    experts -= tl.load(slot_bounds_ptr + member, mask=present, other=0)
    choices = tl.load(choice_bounds_ptr + member + 1, mask=present, other=0)
    choices -= tl.load(choice_bounds_ptr + member, mask=present, other=0)
    return offset + 64 + round_up(4 * (experts.to(tl.int64) + choices))


@jit
def row_targets(
    token: tl.tensor,
    token_rows_ptr: tl.tensor,
    targets_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    slot_bounds_ptr: tl.tensor,
    choice_bounds_ptr: tl.tensor,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Where one token's row goes, [BLOCK_K] each: number of the row in its message, member,
    whether it is sent at all, byte at which that message's rows begin.
    """
    k = tl.arange(0, BLOCK_K)
    number = tl.load(token_rows_ptr + token * K + k, mask=k < K, other=-1)
    member = tl.load(targets_ptr + token * K + k, mask=number >= 0, other=0)
    offset = tl.load(offsets_ptr + member, mask=number >= 0, other=-1)
    sent = offset >= 0
    begin = rows_begin(offset, member, sent, slot_bounds_ptr, choice_bounds_ptr)
    return number.to(tl.int64), member, sent, begin


@jit
def write_choices(
    token: tl.tensor,
    words_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    slot_bounds_ptr: tl.tensor,
    choice_bounds_ptr: tl.tensor,
    choice_rows_ptr: tl.tensor,
    places_ptr: tl.tensor,
    targets_ptr: tl.tensor,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Write the rows of one token's choices into the messages of their members."""
    k = tl.arange(0, BLOCK_K)
    place = tl.load(places_ptr + token * K + k, mask=k < K, other=-1)
    sent = place >= 0
    member = tl.load(targets_ptr + token * K + k, mask=sent, other=0)
    offset = tl.load(offsets_ptr + member, mask=sent, other=-1)
    sent = sent & (offset >= 0)
    experts = tl.load(slot_bounds_ptr + member + 1, mask=sent, other=0)
    experts -= tl.load(slot_bounds_ptr + member, mask=sent, other=0)
    index = place - tl.load(choice_bounds_ptr + member, mask=sent, other=0)
    row = tl.load(choice_rows_ptr + place, mask=sent, other=0)
    tl.store(words_ptr + offset // 4 + 16 + experts + index, row, mask=sent)


@jit
def write_head(
    member: tl.tensor,
    words_ptr: tl.tensor,
    num_bytes_ptr: tl.tensor,
    header_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    slot_bounds_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    choice_bounds_ptr: tl.tensor,
    row_bounds_ptr: tl.tensor,
    row_bytes: tl.tensor,
    scale_bytes: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Write one member's header and counts, and how long its message is."""
    offset = tl.load(offsets_ptr + member)
    slot = tl.load(slot_bounds_ptr + member)
    experts = tl.load(slot_bounds_ptr + member + 1) - slot
    choices = tl.load(choice_bounds_ptr + member + 1) - tl.load(choice_bounds_ptr + member)
    rows = tl.load(row_bounds_ptr + member + 1) - tl.load(row_bounds_ptr + member)
    many = rows.to(tl.int64)
    size = 64 + round_up(4 * (experts.to(tl.int64) + choices)) + many * row_bytes
    if scale_bytes > 0:
        size = round_up(size) + many * scale_bytes
    tl.store(num_bytes_ptr + member, tl.where(offset >= 0, size, 0))
    if offset >= 0:
        word = tl.arange(0, 16)
        value = tl.load(header_ptr + word)
        value = tl.where(word == 9, experts, value)
        value = tl.where(word == 10, choices, value)
        value = tl.where(word == 11, rows, value)
        tl.store(words_ptr + offset // 4 + word, value)
        for first in range(0, experts, BLOCK):
            expert = first + tl.arange(0, BLOCK)
            count = tl.load(counts_ptr + slot + expert, mask=expert < experts, other=0)
            tl.store(words_ptr + offset // 4 + 16 + expert, count, mask=expert < experts)


def check_messages(
    routed: Routed,
    slots: ExpertSlots,
    header: torch.Tensor,
    messages: torch.Tensor,
    offsets: torch.Tensor,
    device: torch.device,
) -> None:
    """Accept where messages are to be written.

    Raises:
        InputInvalid: A shape, type, device or alignment is not as stated.
    """
    slots.check(device)
    num_slots, num_members = slots.num_slots, slots.num_members
    int32 = (torch.int32,)
    check_operand("counts", routed.counts, (num_slots + 3,), int32, device=device)
    check_operand("choice_bounds", routed.choice_bounds, (num_members + 1,), int32, device=device)
    check_operand("header", header, (HEADER_BYTES,), (torch.uint8,), device=device)
    check_operand("offsets", offsets, (num_members,), (torch.int64,), device=device)
    check_buffer(messages, device)


def message_tables(
    routed: Routed, slots: ExpertSlots, header: torch.Tensor, offsets: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return what a kernel reads that writes dispatch messages, in the order it takes them in."""
    return (
        header.view(torch.int32),
        offsets,
        slots.slot_bounds,
        routed.counts,
        routed.choice_bounds,
        routed.row_bounds,
        routed.choice_rows,
        routed.places,
        routed.targets,
        routed.token_rows,
    )


def check_buffer(messages: torch.Tensor, device: torch.device) -> None:
    """Accept a buffer of messages, whose parts all begin at multiples of 64 bytes.

    Raises:
        InputInvalid: A shape, type, device or alignment is not as stated.
    """
    check_operand("messages", messages, (None,), (torch.uint8,), device=device)
    for name, seen in (("bytes", len(messages)), ("address", messages.data_ptr())):
        if seen % ALIGN_BYTES:
            raise InputInvalid(
                name=f"{name} of messages",
                observed=str(seen),
                expected=f"a multiple of {ALIGN_BYTES}",
            )


def write_parts_torch(
    member: int,
    routed: Routed,
    slots: ExpertSlots,
    header: torch.Tensor,
    message: torch.Tensor,
) -> tuple[int, torch.Tensor]:
    """Write header, counts and choices of one member's message.

    Returns:
        Where its rows begin in `message`, and the tokens that they are for.
    """
    edges = slice(member, member + 2)
    slot_begin, slot_end = slots.slot_bounds[edges].tolist()
    begin, end = routed.choice_bounds[edges].tolist()
    row_begin, row_end = routed.row_bounds[edges].tolist()
    num_experts = slot_end - slot_begin
    words = message[: HEADER_BYTES + 4 * (num_experts + end - begin)].view(torch.int32)
    head = header.view(torch.int32).clone()
    sizes = [num_experts, end - begin, row_end - row_begin]
    head[EXPERTS_WORD : EXPERTS_WORD + 3] = torch.tensor(sizes, dtype=torch.int32)
    words[:16] = head
    words[16 : 16 + num_experts] = routed.counts[slot_begin:slot_end]
    words[16 + num_experts :] = routed.choice_rows[begin:end]
    tokens = routed.row_tokens[row_begin:row_end].long()
    return rows_offset(num_experts, end - begin), tokens


def scales_offset(rows_at: int, num_rows: int, row_bytes: int) -> int:
    """Return where the scales of an fp8 message begin."""
    return rows_at + aligned(num_rows * row_bytes)
