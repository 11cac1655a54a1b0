"""Arrange: where each arrived row goes, from the counts in the messages. Integers only.

Legend: W sources, E_l experts of this rank, R rows of room, N rows that arrived.

Every source lists its choices by (expert, token, k), so the counts alone fix the order: expert
after expert, inside by source. Each expert's rows begin at a multiple of `alignment`:

    counts      source 0: 2 1    source 1: 1 0    source 2: no message     (two experts)
    arrivals    a0 a1 b2 | a3                     letter = expert
    alignment   2
    bounds      0 4 6
    rows        a0 a1 a3 --  b2 --                -- is padding
    places      0 1 4 2                           row of each arrival
    counts      3 1     source_bounds  0 3 4 4

Messages come from outside. What would be used as an address is compared with what the window has
room for; a source whose message is wrong gets a fault and counts as if it had sent nothing.
"""

from __future__ import annotations

import torch

from dispatch.kernels.arranged import Arranged, Fault
from dispatch.kernels.column_sums import scan_columns
from dispatch.kernels.language import jit, launch, tl
from dispatch.kernels.message_parts import check_buffer, round_up, scales_offset
from dispatch.kernels.operands import check_operand, check_range, runs_kernel
from dispatch.layout import HEADER_BYTES, rows_offset

ROWS_MAX = 2**31 - 1
BLOCK = 512


@jit
def _survey_kernel(
    words_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    header_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    faults_ptr: tl.tensor,
    num_experts: tl.tensor,
    window_bytes: tl.tensor,
    row_bytes: tl.tensor,
    scale_bytes: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    source = tl.program_id(0)
    offset = tl.load(offsets_ptr + source)
    present = offset >= 0
    words_ptr += tl.where(present, offset, 0) // 4
    word = tl.arange(0, 16)
    seen = tl.load(words_ptr + word, mask=present & (word < 16), other=0)
    due = tl.load(header_ptr + word)
    due = tl.where(word == 8, tl.load(ranks_ptr + source), due)
    differs = tl.sum(((seen != due) & (word < 9)).to(tl.int32), 0)
    experts = tl.sum(tl.where(word == 9, seen, 0), 0)
    choices = tl.sum(tl.where(word == 10, seen, 0), 0)
    rows = tl.sum(tl.where(word == 11, seen, 0), 0)
    size = 64 + round_up(4 * (num_experts + choices.to(tl.int64))) + rows.to(tl.int64) * row_bytes
    if scale_bytes > 0:
        size = round_up(size) + rows.to(tl.int64) * scale_bytes
    unfit = (experts != num_experts) | (choices < 0) | (rows < 0) | (size > window_bytes)
    fault = tl.where(differs > 0, 1, tl.where(unfit, 2, 0))

    readable = present & (fault == 0)
    total = tl.zeros((), tl.int64)
    wrong = tl.zeros((), tl.int32)
    for first in range(0, num_experts, BLOCK):
        expert = first + tl.arange(0, BLOCK)
        inside = (expert < num_experts) & readable
        count = tl.load(words_ptr + 16 + expert, mask=inside, other=0)
        wrong += tl.sum((count < 0).to(tl.int32), 0)
        total += tl.sum(count.to(tl.int64), 0)
    for first in range(0, tl.where(readable, choices, 0), BLOCK):
        choice = first + tl.arange(0, BLOCK)
        row = tl.load(words_ptr + 16 + num_experts + choice, mask=choice < choices, other=0)
        wrong += tl.sum(((choice < choices) & ((row < 0) | (row >= rows))).to(tl.int32), 0)
    fault = tl.where(readable & ((wrong > 0) | (total != choices)), 3, fault)
    fault = tl.where(present, fault, 0)

    accepted = present & (fault == 0)
    for first in range(0, num_experts, BLOCK):
        expert = first + tl.arange(0, BLOCK)
        inside = expert < num_experts
        count = tl.load(words_ptr + 16 + expert, mask=inside & accepted, other=0)
        tl.store(counts_ptr + source.to(tl.int64) * num_experts + expert, count, mask=inside)
    tl.store(totals_ptr + source, tl.where(accepted, choices, 0))
    tl.store(faults_ptr + source, fault)


@jit
def _sum_kernel(
    before_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    source_totals_ptr: tl.tensor,
    scratch_ptr: tl.tensor,
    source_bounds_ptr: tl.tensor,
    num_sources: tl.tensor,
    num_experts: tl.tensor,
    ALIGN: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    if tl.program_id(0) == 0:
        scan_columns(
            before_ptr, counts_ptr, bounds_ptr, num_sources, num_experts, BLOCK_P, BLOCK_C, ALIGN
        )
    else:
        scan_columns(
            source_totals_ptr, scratch_ptr, source_bounds_ptr, 1, num_sources, 1, BLOCK_C, 1
        )


@jit
def _place_arrivals_kernel(
    words_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    own_counts_ptr: tl.tensor,
    before_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    source_bounds_ptr: tl.tensor,
    row_offsets_ptr: tl.tensor,
    scale_offsets_ptr: tl.tensor,
    places_ptr: tl.tensor,
    faults_ptr: tl.tensor,
    num_sources: tl.tensor,
    num_experts: tl.tensor,
    capacity: tl.tensor,
    row_bytes: tl.tensor,
    scale_bytes: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    source = tl.program_id(0)
    expert = tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    begin = tl.load(bounds_ptr + expert)
    if source == num_sources:
        end = tl.load(bounds_ptr + expert + 1)
        for first in range(begin + tl.load(counts_ptr + expert), end, BLOCK):
            inside = (first + lane < end) & (first + lane < capacity)
            tl.store(row_offsets_ptr + first + lane, (lane * 0 - 1).to(tl.int64), mask=inside)
            tl.store(scale_offsets_ptr + first + lane, (lane * 0 - 1).to(tl.int64), mask=inside)
        if expert == 0:
            used = tl.load(bounds_ptr + num_experts)
            tl.store(faults_ptr + num_sources, (used > capacity).to(tl.int32))
    else:
        own_ptr = own_counts_ptr + source.to(tl.int64) * num_experts
        count = tl.load(own_ptr + expert)
        skipped = tl.zeros((), tl.int32)
        choices = tl.zeros((), tl.int32)
        for first in range(0, num_experts, BLOCK):
            other = tl.load(own_ptr + first + lane, mask=first + lane < num_experts, other=0)
            skipped += tl.sum(tl.where(first + lane < expert, other, 0), 0)
            choices += tl.sum(other, 0)
        offset = tl.load(offsets_ptr + source)
        words_ptr += tl.maximum(offset, 0) // 4
        num_rows = tl.load(words_ptr + 11, mask=count > 0, other=0).to(tl.int64)
        rows_at = offset + 64 + round_up(4 * (num_experts + choices.to(tl.int64)))
        scales_at = round_up(rows_at + num_rows * row_bytes)
        begin += tl.load(before_ptr + source.to(tl.int64) * num_experts + expert)
        arrival = tl.load(source_bounds_ptr + source) + skipped
        for first in range(0, count, BLOCK):
            index = first + lane
            inside = index < count
            row = tl.load(words_ptr + 16 + num_experts + skipped + index, mask=inside, other=0)
            row = row.to(tl.int64)
            inside = inside & (begin + index < capacity)
            tl.store(row_offsets_ptr + begin + index, rows_at + row * row_bytes, mask=inside)
            tl.store(scale_offsets_ptr + begin + index, scales_at + row * scale_bytes, mask=inside)
            inside = inside & (arrival + index < capacity)
            tl.store(places_ptr + arrival + index, begin + index, mask=inside)


def arrange(
    messages: torch.Tensor,
    offsets: torch.Tensor,
    *,
    header: torch.Tensor,
    ranks: torch.Tensor,
    num_experts: int,
    window_bytes: int,
    row_bytes: int,
    scale_bytes: int = 0,
    alignment: int = 1,
    capacity: int,
) -> Arranged:
    """Find out where each arrived row goes. Waits for nothing.

    Args:
        messages: [bytes] uint8, aligned to 64 bytes: where the messages have arrived. This rank's
            own is one of them.
        offsets: [W] int64: where each source's message begins, a multiple of 64; -1 for none.
        header: [64] uint8: of `dispatch.message`; its first 32 bytes are compared.
        ranks: [W] int32: who the sources say they are.
        num_experts: E_l, at least 1.
        window_bytes: Room of a message.
        row_bytes: Bytes of a row.
        scale_bytes: Bytes of a row's scales; 0 where messages have none.
        alignment: Of the first row of each expert.
        capacity: R. Enough in any case: all choices that can arrive + E_l * (alignment - 1).

    Raises:
        InputInvalid: A shape, type, device or number is not as stated; nothing was started.
        KernelsUnavailable: No kernels for this device.
    """
    device = messages.device
    check_buffer(messages, device)
    check_operand("offsets", offsets, (None,), (torch.int64,), device=device)
    check_operand("header", header, (HEADER_BYTES,), (torch.uint8,), device=device)
    check_operand("ranks", ranks, (len(offsets),), (torch.int32,), device=device)
    for name, value in (
        ("num_experts", num_experts),
        ("row_bytes", row_bytes),
        ("alignment", alignment),
        ("capacity", capacity),
    ):
        check_range(name, value, 1, ROWS_MAX)
    check_range("scale_bytes", scale_bytes, 0, ROWS_MAX)
    if not runs_kernel(device):
        return arrange_torch(
            messages, offsets, header=header, ranks=ranks, num_experts=num_experts,
            window_bytes=window_bytes, row_bytes=row_bytes, scale_bytes=scale_bytes,
            alignment=alignment, capacity=capacity,
        )  # fmt: skip
    num_sources = len(offsets)
    out = Arranged.empty(offsets, num_experts, capacity)
    own_counts = offsets.new_empty((num_sources, num_experts), dtype=torch.int32)
    totals = torch.empty_like(ranks)
    words = messages.view(torch.int32)
    launch(
        _survey_kernel, (num_sources,),
        words, offsets, header.view(torch.int32), ranks, own_counts, totals, out.faults,
        num_experts, window_bytes, row_bytes, scale_bytes,
        device=device, BLOCK=BLOCK,
    )  # fmt: skip
    before = own_counts.clone()
    launch(
        _sum_kernel, (2,),
        before, out.counts, out.bounds, totals, torch.empty_like(totals), out.source_bounds,
        num_sources, num_experts,
        device=device, ALIGN=alignment, BLOCK_P=16, BLOCK_C=32,
    )  # fmt: skip
    launch(
        _place_arrivals_kernel, (num_sources + 1, num_experts),
        words, offsets, own_counts, before, out.counts, out.bounds, out.source_bounds,
        out.row_offsets, out.scale_offsets, out.places, out.faults,
        num_sources, num_experts, capacity, row_bytes, scale_bytes,
        device=device, BLOCK=128,
    )  # fmt: skip
    return out


def arrange_torch(
    messages: torch.Tensor,
    offsets: torch.Tensor,
    *,
    header: torch.Tensor,
    ranks: torch.Tensor,
    num_experts: int,
    window_bytes: int,
    row_bytes: int,
    scale_bytes: int = 0,
    alignment: int = 1,
    capacity: int,
) -> Arranged:
    """See `arrange`."""
    out = Arranged.empty(offsets, num_experts, capacity)
    counts = torch.zeros(len(offsets), num_experts, dtype=torch.int64)
    rows, scales = [offsets[:0]], [offsets[:0]]
    out.faults.zero_()
    for source, (offset, rank) in enumerate(zip(offsets.tolist(), ranks.tolist(), strict=True)):
        if offset < 0:
            continue
        words = messages[offset : offset + window_bytes // 4 * 4].view(torch.int32)
        fault, own, choices = _read_torch(
            words, header, rank, num_experts, window_bytes, row_bytes, scale_bytes
        )
        out.faults[source] = fault
        if fault is Fault.NONE:
            counts[source] = own
            rows_at = offset + rows_offset(num_experts, len(choices))
            rows.append(rows_at + choices * row_bytes)
            scales_at = scales_offset(rows_at, int(words[11]), row_bytes)
            scales.append(scales_at + choices * scale_bytes)
    totals = counts.sum(0)
    shares = (totals + alignment - 1) // alignment * alignment
    out.counts.copy_(totals)
    out.bounds[0] = 0
    out.bounds[1:] = shares.cumsum(0)
    out.source_bounds[0] = 0
    out.source_bounds[1:] = counts.sum(1).cumsum(0)
    used = int(out.bounds[-1])
    out.faults[-1] = int(used > capacity)
    if used <= capacity:
        experts = torch.arange(num_experts).repeat(len(offsets))
        experts = experts.repeat_interleave(counts.view(-1))
        order = experts.argsort(stable=True)
        # Behind the rows of earlier experts without padding, plus the padding of these.
        gaps = (shares - totals).cumsum(0) - (shares - totals)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order)) + gaps[experts[order]]
        out.places[: len(order)] = places.int()
        for found, parts in ((out.row_offsets, rows), (out.scale_offsets, scales)):
            found[:used] = -1
            found[places] = torch.cat(parts)
    return out


def _read_torch(
    words: torch.Tensor,
    header: torch.Tensor,
    rank: int,
    num_experts: int,
    window_bytes: int,
    row_bytes: int,
    scale_bytes: int,
) -> tuple[Fault, torch.Tensor, torch.Tensor]:
    """Return what is wrong with a message; its counts and choices, int64, if nothing is."""
    nothing = words.new_empty(0, dtype=torch.int64)
    due = [*header.view(torch.int32)[:8].tolist(), rank]
    if words[:9].tolist() != due:
        return Fault.HEADER, nothing, nothing
    seen_experts, num_choices, num_rows = words[9:12].tolist()
    if seen_experts != num_experts or num_choices < 0 or num_rows < 0:
        return Fault.SIZES, nothing, nothing
    size = rows_offset(num_experts, num_choices) + num_rows * row_bytes
    if scale_bytes:
        size = scales_offset(size, 0, 0) + num_rows * scale_bytes
    if size > window_bytes:
        return Fault.SIZES, nothing, nothing
    counts = words[16 : 16 + num_experts].long()
    choices = words[16 + num_experts : 16 + num_experts + num_choices].long()
    fits = bool((counts >= 0).all() & (choices >= 0).all() & (choices < num_rows).all())
    if not fits or int(counts.sum()) != num_choices:
        return Fault.CONTENT, nothing, nothing
    return Fault.NONE, counts, choices
