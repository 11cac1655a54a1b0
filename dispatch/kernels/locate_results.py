"""Locate results: where each choice's result lies among the combine messages that have arrived.

Legend: T tokens, K choices of a token, W members, N choices with a slot.

Every member returns its rows in the order in which it was told the choices, so what `route` has
found says where they are. The windows are laid out in rows: each begins a whole number of rows
after the first one, so that `combine` reads all of them as one array, without a copy:

    messages       | header | r r r ... | header | r r ...      rows of 64 bytes, windows of 4
    window_rows    0                      4                     row where a member's begin
    places         0 2 | 3 4 | -1 1                             (the example of `route`)
    choice_bounds  0 2 5
    slots          0 4 | 5 6 | -1 1                             rows behind the first header
"""

from __future__ import annotations

import torch

from dispatch.kernels.language import cdiv, jit, launch, tl
from dispatch.kernels.message_parts import check_buffer
from dispatch.kernels.operands import check_operand, check_range, runs_kernel
from dispatch.kernels.routed import Routed
from dispatch.layout import HEADER_BYTES

BLOCK = 256


@jit
def _locate_results_kernel(
    words_ptr: tl.tensor,
    header_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    places_ptr: tl.tensor,
    targets_ptr: tl.tensor,
    choice_bounds_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    faults_ptr: tl.tensor,
    num_choices: tl.tensor,
    num_members: tl.tensor,
    window_rows: tl.tensor,
    row_bytes: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    if program < num_members:
        word = tl.arange(0, 16)
        begin = program.to(tl.int64) * window_rows * row_bytes // 4
        seen = tl.load(words_ptr + begin + word)
        due = tl.load(header_ptr + word)
        rows = tl.load(choice_bounds_ptr + program + 1) - tl.load(choice_bounds_ptr + program)
        due = tl.where(word == 8, tl.load(ranks_ptr + program), due)
        due = tl.where(word == 9, 0, due)
        due = tl.where((word == 10) | (word == 11), rows, due)
        differs = tl.sum(((seen != due) & (word < 12)).to(tl.int32), 0)
        tl.store(faults_ptr + program, (differs > 0).to(tl.int32))
    else:
        choice = (program - num_members).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        valid = choice < num_choices
        place = tl.load(places_ptr + choice, mask=valid, other=-1).to(tl.int64)
        member = tl.load(targets_ptr + choice, mask=place >= 0, other=0).to(tl.int64)
        first = tl.load(choice_bounds_ptr + member, mask=place >= 0, other=0)
        slot = member * window_rows + place - first
        tl.store(slots_ptr + choice, tl.where(place >= 0, slot, -1), mask=valid)


def locate_results(
    messages: torch.Tensor,
    routed: Routed,
    *,
    header: torch.Tensor,
    ranks: torch.Tensor,
    window_rows: int,
    row_bytes: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the result of each choice, and compare the messages' headers. Waits for nothing.

    Args:
        messages: [bytes] uint8, aligned to 64 bytes: member w's message begins at byte
            `w * window_rows * row_bytes`.
        routed: Of the dispatch.
        header: [64] uint8: of `dispatch.message`; its first 32 bytes are compared.
        ranks: [W] int32: who the members say they are.
        window_rows: Rows of room from one message to the next; their bytes are a multiple of 64.
        row_bytes: Bytes of a result.

    Returns:
        slots [T, K] int64: rows of `messages` behind its first 64 bytes, -1 for a choice that was
        left out; and faults [W] int32: 1 for a message that is not the one that is due.

    Raises:
        InputInvalid: A shape, type, device or number is not as stated; nothing was started.
        KernelsUnavailable: No kernels for this device.
    """
    device, num_members = messages.device, len(routed.choice_bounds) - 1
    check_buffer(messages, device)
    check_operand("header", header, (HEADER_BYTES,), (torch.uint8,), device=device)
    check_operand("ranks", ranks, (num_members,), (torch.int32,), device=device)
    check_operand("places", routed.places, (None, None), (torch.int32,), device=device)
    check_range("row_bytes", row_bytes, 1, 2**31 - 1)
    check_range("window_rows", window_rows, 1, 2**31 - 1)
    stride = window_rows * row_bytes
    check_range("bytes between messages that are no multiple of 64", stride % 64, 0, 0)
    check_range("bytes of the last header", (num_members - 1) * stride + 64, 64, len(messages))
    if not runs_kernel(device):
        return locate_results_torch(
            messages, routed, header=header, ranks=ranks, window_rows=window_rows,
            row_bytes=row_bytes,
        )  # fmt: skip
    slots = torch.empty_like(routed.places, dtype=torch.int64)
    faults = torch.empty_like(ranks)
    num_choices = routed.places.numel()
    launch(
        _locate_results_kernel,
        (num_members + cdiv(num_choices, BLOCK),),
        messages.view(torch.int32),
        header.view(torch.int32),
        ranks,
        routed.places,
        routed.targets,
        routed.choice_bounds,
        slots,
        faults,
        num_choices,
        num_members,
        window_rows,
        row_bytes,
        device=device,
        BLOCK=BLOCK,
    )
    return slots, faults


def locate_results_torch(
    messages: torch.Tensor,
    routed: Routed,
    *,
    header: torch.Tensor,
    ranks: torch.Tensor,
    window_rows: int,
    row_bytes: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `locate_results`."""
    faults = torch.zeros_like(ranks)
    due = header.view(torch.int32)[:12].clone()
    rows = routed.choice_bounds.diff()
    for member, rank in enumerate(ranks.tolist()):
        begin = member * window_rows * row_bytes
        count = int(rows[member])
        due[8:] = torch.tensor([rank, 0, count, count], dtype=torch.int32)
        seen = messages[begin : begin + 48].view(torch.int32)
        faults[member] = int(not torch.equal(seen, due))
    members = routed.targets.clamp(min=0).long()
    slots = members * window_rows + routed.places - routed.choice_bounds[members]
    return torch.where(routed.places >= 0, slots, -1), faults
