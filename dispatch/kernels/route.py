"""Route: which choice goes where, in which order. Integers only, no atomics, one fixed result.

Legend: T tokens, K choices of a token, W members, E logical experts, S slots (one per member and
expert that it holds, members ascending, experts ascending), N choices with a slot. A choice is
numbered token * K + k. The result is that of `dispatch.routing`, which the CPU path uses:

    T = 3, K = 2, two members: member 0 holds experts 0 1, member 1 holds 2 3
    topk_ids       0 2 | 2 3 | -1 0          choice numbers 0 1 | 2 3 | 4 5
    order          0 5 1 2 3                 choices sorted by slot, stably
    places         0 2 | 3 4 | -1 1          its inverse; -1: left out
    choice_bounds  0 2 5                     member 0: order[0:2], member 1: order[2:5]
    row_tokens     0 2 0 1                   each token once per member
    row_bounds     0 2 4
    choice_rows    0 1 0 1 1                 where a choice's row is among its member's rows
    targets        0 1 | 1 1 | -1 0          member of each choice
    token_rows     0 0 | 1 -1 | -1 1         choice_rows where a token's row goes first, else -1

Three launches. Programs take runs of whole tokens: each counts its run; one program turns the
counts into where each run begins in each slot; each program numbers its run, comparing every
choice with every earlier one of the run.
"""

from __future__ import annotations

import torch

from dispatch.kernels.column_sums import scan_columns
from dispatch.kernels.language import cdiv, jit, launch, power_of_two, tl
from dispatch.kernels.operands import IDS, check_operand, check_range, runs_kernel
from dispatch.kernels.routed import ExpertSlots, Routed

RUN = 128  # choices of one program, if a token has fewer
CHOICES_MAX = 2**31 - 1  # they are numbered in 32 bits


@jit
def _count_kernel(
    ids_ptr: tl.tensor,
    slot_of_expert_ptr: tl.tensor,
    member_of_slot_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    targets_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    run_counts_ptr: tl.tensor,
    run_rows_ptr: tl.tensor,
    num_choices: tl.tensor,
    run: tl.tensor,
    num_experts: tl.tensor,
    num_slots: tl.tensor,
    num_members: tl.tensor,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_W: tl.constexpr,
) -> None:
    program = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    choice = program * run + lane
    valid = (lane < run) & (choice < num_choices)
    ids = tl.load(ids_ptr + choice, mask=valid, other=-1)
    known = (ids >= 0) & (ids < num_experts)
    slot = tl.load(slot_of_expert_ptr + ids, mask=known, other=-1)
    slot = tl.where(slot < 0, num_slots + 1, slot)
    slot = tl.where(known, slot, tl.where(ids == -1, num_slots, num_slots + 2))
    member = tl.load(member_of_slot_ptr + slot, mask=slot < num_slots, other=-1)

    seen = lane < 0  # whether an earlier choice of the token goes to the same member
    for begin in range(0, BLOCK, BLOCK_J):
        other_lane = begin + tl.arange(0, BLOCK_J)
        other = program * run + other_lane
        present = (other_lane < run) & (other < num_choices)
        other_id = tl.load(ids_ptr + other, mask=present, other=-1)
        other_known = (other_id >= 0) & (other_id < num_experts)
        other_slot = tl.load(slot_of_expert_ptr + other_id, mask=other_known, other=-1)
        other_member = tl.load(member_of_slot_ptr + other_slot, mask=other_slot >= 0, other=-1)
        same = (other_lane // K)[None, :] == (lane // K)[:, None]
        same = same & (other_member[None, :] == member[:, None])
        earlier = other_lane[None, :] < lane[:, None]
        seen = seen | (tl.max((same & earlier).to(tl.int32), 1) > 0)
    first = (member >= 0) & (seen == 0)

    tl.store(slots_ptr + choice, slot, mask=valid)
    tl.store(targets_ptr + choice, member, mask=valid)
    tl.store(firsts_ptr + choice, first.to(tl.int8), mask=valid)
    column = tl.arange(0, BLOCK_S)
    counts = tl.histogram(tl.where(valid, slot, num_slots + 3), BLOCK_S)
    width = num_slots + 3
    tl.store(run_counts_ptr + program * width + column, counts, mask=column < width)
    column = tl.arange(0, BLOCK_W)
    rows = tl.histogram(tl.where(valid & first, member, num_members), BLOCK_W)
    tl.store(run_rows_ptr + program * num_members + column, rows, mask=column < num_members)


@jit
def _scan_kernel(
    run_counts_ptr: tl.tensor,
    run_rows_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    row_counts_ptr: tl.tensor,
    row_bounds_ptr: tl.tensor,
    num_runs: tl.tensor,
    num_slots: tl.tensor,
    num_members: tl.tensor,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    if tl.program_id(0) == 0:
        width = num_slots + 3
        scan_columns(run_counts_ptr, counts_ptr, bounds_ptr, num_runs, width, BLOCK_P, BLOCK_C, 1)
    else:
        scan_columns(
            run_rows_ptr, row_counts_ptr, row_bounds_ptr, num_runs, num_members, BLOCK_P, BLOCK_C, 1
        )


@jit
def _place_kernel(
    slots_ptr: tl.tensor,
    targets_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    run_counts_ptr: tl.tensor,
    run_rows_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    row_bounds_ptr: tl.tensor,
    slot_bounds_ptr: tl.tensor,
    choice_bounds_ptr: tl.tensor,
    order_ptr: tl.tensor,
    choice_rows_ptr: tl.tensor,
    row_tokens_ptr: tl.tensor,
    places_ptr: tl.tensor,
    token_rows_ptr: tl.tensor,
    num_choices: tl.tensor,
    run: tl.tensor,
    num_slots: tl.tensor,
    num_members: tl.tensor,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_W: tl.constexpr,
) -> None:
    program = tl.program_id(0).to(tl.int64)
    if program == 0:
        edge = tl.arange(0, BLOCK_W)
        slot_bound = tl.load(slot_bounds_ptr + edge, mask=edge <= num_members, other=0)
        choice_bound = tl.load(bounds_ptr + slot_bound, mask=edge <= num_members, other=0)
        tl.store(choice_bounds_ptr + edge, choice_bound, mask=edge <= num_members)
    lane = tl.arange(0, BLOCK)
    choice = program * run + lane
    valid = (lane < run) & (choice < num_choices)
    slot = tl.load(slots_ptr + choice, mask=valid, other=num_slots)
    member = tl.load(targets_ptr + choice, mask=valid, other=-1)
    first = tl.load(firsts_ptr + choice, mask=valid, other=0) != 0

    place = tl.zeros((BLOCK,), tl.int32)
    row = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, BLOCK, BLOCK_J):
        other_lane = begin + tl.arange(0, BLOCK_J)
        other = program * run + other_lane
        present = (other_lane < run) & (other < num_choices)
        other_slot = tl.load(slots_ptr + other, mask=present, other=-1)
        other_member = tl.load(targets_ptr + other, mask=present, other=-1)
        other_first = tl.load(firsts_ptr + other, mask=present, other=0)
        before = other_lane[None, :] < lane[:, None]
        place += tl.sum((before & (other_slot[None, :] == slot[:, None])).to(tl.int32), 1)
        before = (other_lane // K)[None, :] < (lane // K)[:, None]
        before = before & (other_first != 0)[None, :]
        row += tl.sum((before & (other_member[None, :] == member[:, None])).to(tl.int32), 1)

    sent = valid & (member >= 0)
    width = num_slots + 3
    place += tl.load(bounds_ptr + slot, mask=sent, other=0)
    place += tl.load(run_counts_ptr + program * width + slot, mask=sent, other=0)
    row += tl.load(run_rows_ptr + program * num_members + member, mask=sent, other=0)
    row_begin = tl.load(row_bounds_ptr + member, mask=sent, other=0)
    tl.store(order_ptr + place, choice.to(tl.int32), mask=sent)
    tl.store(choice_rows_ptr + place, row, mask=sent)
    tl.store(row_tokens_ptr + row_begin + row, (choice // K).to(tl.int32), mask=sent & first)
    tl.store(places_ptr + choice, tl.where(sent, place, -1), mask=valid)
    tl.store(token_rows_ptr + choice, tl.where(sent & first, row, -1), mask=valid)


def route(topk_ids: torch.Tensor, slots: ExpertSlots) -> Routed:
    """Number the choices of this rank by slot and its rows by member. Waits for nothing.

    Args:
        topk_ids: [T, K] int64 or int32, contiguous, any values: -1 masks a choice, an id that is
            no expert is counted and left out.
        slots: Of the layer, on the same device.

    Raises:
        InputInvalid: A shape, type or device is not as stated; nothing was started.
        KernelsUnavailable: No kernels for this device.
    """
    check_operand("topk_ids", topk_ids, (None, None), IDS)
    (num_tokens, topk), device = topk_ids.shape, topk_ids.device
    check_range("choices", num_tokens * topk, 0, CHOICES_MAX)
    slots.check(device)
    if not runs_kernel(device):
        return route_torch(topk_ids, slots)
    out = Routed.empty(topk_ids, slots)
    if num_tokens * topk:
        _start(topk_ids, slots, out)
    return out


def _start(topk_ids: torch.Tensor, slots: ExpertSlots, out: Routed) -> None:
    num_choices, topk, device = topk_ids.numel(), topk_ids.shape[1], topk_ids.device
    num_slots, num_members = slots.num_slots, slots.num_members
    run = max(1, RUN // topk) * topk
    num_runs = cdiv(num_choices, run)
    block = power_of_two(run)

    def scratch(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return topk_ids.new_empty(shape, dtype=dtype)

    choice_slots, firsts = scratch(num_choices), scratch(num_choices, dtype=torch.int8)
    run_counts, run_rows = scratch(num_runs, num_slots + 3), scratch(num_runs, num_members)
    bounds, row_counts = scratch(num_slots + 4), scratch(num_members)
    blocks = {"K": topk, "BLOCK": block, "BLOCK_J": min(block, 8)}
    launch(
        _count_kernel, (num_runs,),
        topk_ids, slots.slot_of_expert, slots.member_of_slot, choice_slots, out.targets, firsts,
        run_counts, run_rows,
        num_choices, run, len(slots.slot_of_expert), num_slots, num_members,
        device=device, **blocks,
        BLOCK_S=power_of_two(num_slots + 4), BLOCK_W=power_of_two(num_members + 1),
        num_warps=2,  # a histogram needs an element for each thread, also of AMD's wide warps
    )  # fmt: skip
    launch(
        _scan_kernel, (2,),
        run_counts, run_rows, out.counts, bounds, row_counts, out.row_bounds,
        num_runs, num_slots, num_members,
        device=device, BLOCK_P=32, BLOCK_C=64, num_warps=8,
    )  # fmt: skip
    launch(
        _place_kernel, (num_runs,),
        choice_slots, out.targets, firsts, run_counts, run_rows, bounds, out.row_bounds,
        slots.slot_bounds, out.choice_bounds, out.order, out.choice_rows, out.row_tokens,
        out.places, out.token_rows,
        num_choices, run, num_slots, num_members,
        device=device, **blocks, BLOCK_W=power_of_two(num_members + 1),
    )  # fmt: skip


def route_torch(topk_ids: torch.Tensor, slots: ExpertSlots) -> Routed:
    """See `route`."""
    out = Routed.empty(topk_ids, slots)
    (num_tokens, topk), num_slots, num_members = topk_ids.shape, slots.num_slots, slots.num_members
    if not num_tokens * topk:
        return out
    ids = topk_ids.reshape(-1).long()
    known = (ids >= 0) & (ids < len(slots.slot_of_expert))
    slot = slots.slot_of_expert[torch.where(known, ids, 0)].long()
    slot = torch.where(slot < 0, num_slots + 1, slot)
    slot = torch.where(known, slot, torch.where(ids == -1, num_slots, num_slots + 2))
    counts = torch.bincount(slot, minlength=num_slots + 3)
    ends = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    sent = slot < num_slots
    order = slot.argsort(stable=True)[: int(ends[num_slots])]
    member = torch.where(sent, slots.member_of_slot[torch.where(sent, slot, 0)].long(), -1)
    # One flag per (member, token), as in `dispatch.routing`; the sums number the rows.
    flags = torch.zeros(num_members, num_tokens, dtype=torch.int64, device=ids.device)
    flags[member[order], order // topk] = 1
    numbers = flags.cumsum(1) - 1
    row_of = numbers[member[order], order // topk]
    places = torch.full_like(ids, -1)
    places[order] = torch.arange(len(order), device=ids.device)
    # The first choice of a token at a member is the one that no earlier one equals.
    by_token = member.view(num_tokens, topk)
    same = (by_token.unsqueeze(2) == by_token.unsqueeze(1)).tril(-1).any(2).reshape(-1)
    token_rows = torch.full_like(ids, -1)
    token_rows[order] = row_of
    row_tokens = flags.nonzero()[:, 1]
    out.counts.copy_(counts)
    out.choice_bounds.copy_(ends[slots.slot_bounds.long()])
    out.row_bounds[0] = 0
    out.row_bounds[1:] = flags.sum(1).cumsum(0)
    out.order[: len(order)] = order.int()
    out.choice_rows[: len(order)] = row_of.int()
    out.row_tokens[: len(row_tokens)] = row_tokens.int()
    out.places.copy_(places.view(num_tokens, topk))
    out.targets.copy_(by_token)
    out.token_rows.copy_(torch.where(same | ~sent, -1, token_rows).view(num_tokens, topk))
    return out
