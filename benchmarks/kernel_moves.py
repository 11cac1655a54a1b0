"""The kernels that bring rows to their experts and back, on one shape (see `kernel_case`).

What one rank sends goes to W members; what it receives comes from W sources with as many tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.kernel_case import Case, Shape, Tensors
from dispatch.expert_map import ExpertMap
from dispatch.kernels.arrange import arrange, arrange_torch
from dispatch.kernels.arranged import Arranged
from dispatch.kernels.combine import combine, combine_torch
from dispatch.kernels.fp8 import num_groups, quantise, quantise_torch
from dispatch.kernels.locate_results import locate_results, locate_results_torch
from dispatch.kernels.pack import pack, pack_torch
from dispatch.kernels.pack_fp8 import pack_fp8, pack_fp8_torch
from dispatch.kernels.pack_results import pack_results, pack_results_torch
from dispatch.kernels.route import route, route_torch
from dispatch.kernels.routed import ExpertSlots, Routed
from dispatch.kernels.unpack import unpack, unpack_scales, unpack_scales_torch, unpack_torch
from dispatch.layout import HEADER_BYTES, aligned, rows_offset
from dispatch.routing import LayerRoute

BF16 = torch.bfloat16
E4M3 = torch.float8_e4m3fn
RANK_WORD = 8  # of a header: who sends (`dispatch.message`)
ALIGNMENT = 16  # of the rows of an expert

Packing = Callable[..., torch.Tensor]


def moving_cases(shape: Shape, device: torch.device) -> Iterator[Case]:
    """From the choices to the sums."""
    ids, slots = routing_of(shape, device)
    routed = route_torch(ids, slots)
    yield Case(
        kernel="route",
        call=lambda: route(ids, slots),
        reference=lambda: route_torch(ids, slots),
        least_bytes=8 * shape.choices + 6 * 4 * shape.choices,
        defined=defined_of_routed,
        rival=lambda: ids.flatten().sort(stable=True),
    )
    x = torch.randn(shape.tokens, shape.hidden, device=device).to(BF16)
    yield Case(
        kernel="quantise",
        call=lambda: quantise(x),
        reference=lambda: quantise_torch(x),
        least_bytes=x.numel() * 3,
    )
    for fp8 in (False, True):
        yield _packing(shape, x, routed, slots, fp8=fp8)
        yield from _unpacking(shape, x, slots, fp8=fp8)
    yield _locating(shape, routed)
    yield _combining(shape, routed)


def routing_of(shape: Shape, device: torch.device) -> tuple[torch.Tensor, ExpertSlots]:
    """[T, K] different experts of each token, uniformly, and the tables of an even placement."""
    ids = torch.rand(shape.tokens, shape.experts, device=device).topk(shape.topk).indices
    members = range(shape.members)
    placement = ExpertMap.even(num_layers=1, num_logical=shape.experts, ranks=members)
    layer = LayerRoute(placement, members, 0, 0)
    return ids, ExpertSlots.of(layer, shape.experts, device)


def defined_of_routed(routed: Routed) -> Tensors:
    """The tensors of a routing without their undefined ends."""
    choices, rows = int(routed.choice_bounds[-1]), int(routed.row_bounds[-1])
    return (
        routed.counts,
        routed.choice_bounds,
        routed.row_bounds,
        routed.order[:choices],
        routed.choice_rows[:choices],
        routed.row_tokens[:rows],
        routed.places,
        routed.targets,
        routed.token_rows,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """How large rows and messages are.

    Attributes:
        row_bytes: Of a row's elements.
        scale_bytes: Of a row's scales; 0 in bf16.
        message_bytes: Most that a message takes.
    """

    row_bytes: int
    scale_bytes: int
    message_bytes: int

    @classmethod
    def of(cls, shape: Shape, *, fp8: bool) -> Window:
        """For messages of up to T rows."""
        row_bytes = shape.hidden * (1 if fp8 else 2)
        scale_bytes = 4 * num_groups(shape.hidden) if fp8 else 0
        head = rows_offset(shape.experts, shape.choices)
        rows, scales = (aligned(shape.tokens * size) for size in (row_bytes, scale_bytes))
        return cls(row_bytes=row_bytes, scale_bytes=scale_bytes, message_bytes=head + rows + scales)

    def messages(self, number: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Zeroed memory for messages, and where each begins."""
        size = aligned(self.message_bytes)
        memory = torch.zeros(number * size, dtype=torch.uint8, device=device)
        return memory, torch.arange(number, device=device) * size


def _packing(
    shape: Shape, x: torch.Tensor, routed: Routed, slots: ExpertSlots, *, fp8: bool
) -> Case:
    window = Window.of(shape, fp8=fp8)
    messages, offsets = window.messages(shape.members, x.device)
    header = torch.zeros(HEADER_BYTES, dtype=torch.uint8, device=x.device)
    num_rows = int(routed.row_bounds[-1])
    row_tokens = routed.row_tokens[:num_rows].long()

    def run(operation: Packing) -> Tensors:
        sizes = operation(x, routed, slots, header=header, messages=messages, offsets=offsets)
        return sizes, messages

    def on_zeros(operation: Packing) -> Tensors:
        messages.zero_()
        return run(operation)

    sent = window.row_bytes + window.scale_bytes
    return Case(
        kernel="pack_fp8" if fp8 else "pack",
        call=lambda: run(pack_fp8 if fp8 else pack),
        reference=lambda: on_zeros(pack_fp8_torch if fp8 else pack_torch),
        least_bytes=shape.tokens * shape.hidden * 2 + num_rows * sent + 20 * shape.choices,
        defined=lambda result: (result[0], result[1].clone()),
        rival=None if fp8 else lambda: x.index_select(0, row_tokens),
        notes={"rows": num_rows},
    )


def defined_of_arranged(arranged: Arranged, *, fp8: bool) -> Tensors:
    """The tensors of an arrangement without their undefined ends."""
    used, arrived = int(arranged.bounds[-1]), int(arranged.source_bounds[-1])
    return (
        arranged.counts,
        arranged.bounds,
        arranged.row_offsets[:used],
        arranged.scale_offsets[: used if fp8 else 0],
        arranged.places[:arrived],
        arranged.source_bounds,
        arranged.faults,
    )


def _unpacking(shape: Shape, x: torch.Tensor, slots: ExpertSlots, *, fp8: bool) -> Iterator[Case]:
    """This rank is member 0 and gets one message from each of W sources."""
    window, device = Window.of(shape, fp8=fp8), x.device
    messages, offsets = window.messages(shape.members, device)
    header = torch.zeros(HEADER_BYTES, dtype=torch.uint8, device=device)
    num_arrived = 0
    for source in range(shape.members):
        own = header.clone()
        own.view(torch.int32)[RANK_WORD] = source
        ids, _ = routing_of(shape, device)
        routed = route_torch(ids, slots)
        targets = torch.full_like(offsets, -1)
        targets[0] = offsets[source]
        operation = pack_fp8_torch if fp8 else pack_torch
        operation(x, routed, slots, header=own, messages=messages, offsets=targets)
        num_arrived += int(routed.choice_bounds[1])
    num_experts = int(slots.slot_bounds[1])
    run = partial(
        _with_arguments,
        messages,
        offsets,
        header=header,
        ranks=torch.arange(shape.members, dtype=torch.int32, device=device),
        num_experts=num_experts,
        window_bytes=aligned(window.message_bytes),
        row_bytes=window.row_bytes,
        scale_bytes=window.scale_bytes,
        alignment=ALIGNMENT,
        capacity=num_arrived + num_experts * (ALIGNMENT - 1),
    )
    arranged = run(arrange_torch)
    assert not arranged.faults.any(), "the messages are good ones"
    used, notes = int(arranged.bounds[-1]), {"rows": num_arrived}
    if not fp8:
        yield Case(
            kernel="arrange",
            call=lambda: run(arrange),
            reference=lambda: run(arrange_torch),
            least_bytes=4 * num_arrived + (8 + 4) * used,
            defined=partial(defined_of_arranged, fp8=False),
            notes=notes,
        )
        yield _returning(shape, arranged)
    shown = {"hidden": shape.hidden, "dtype": E4M3 if fp8 else BF16}
    yield Case(
        kernel="unpack_fp8_rows" if fp8 else "unpack",
        call=lambda: unpack(messages, arranged, **shown),
        reference=lambda: unpack_torch(messages, arranged, **shown),
        least_bytes=(num_arrived + used) * window.row_bytes,
        defined=lambda rows: (rows[:used],),
        notes=notes,
    )
    if fp8:
        yield Case(
            kernel="unpack_scales",
            call=lambda: unpack_scales(messages, arranged, hidden=shape.hidden),
            reference=lambda: unpack_scales_torch(messages, arranged, hidden=shape.hidden),
            least_bytes=(num_arrived + used) * window.scale_bytes,
            defined=lambda scales: (scales[:used],),
            notes=notes,
        )


def _with_arguments(
    first: object, second: object, operation: Callable[..., Any], **named: object
) -> Any:
    return operation(first, second, **named)


def _returning(shape: Shape, arranged: Arranged) -> Case:
    bounds, device = arranged.source_bounds, arranged.bounds.device
    results = torch.randn(len(arranged.places), shape.hidden, device=device).to(BF16)
    header = torch.zeros(HEADER_BYTES, dtype=torch.uint8, device=device)
    size = aligned(HEADER_BYTES + int(bounds.diff().max()) * shape.hidden * 2)
    messages = torch.zeros(shape.members * size, dtype=torch.uint8, device=device)
    offsets = torch.arange(shape.members, device=device) * size
    num_arrived = int(bounds[-1])

    def run(operation: Packing) -> Tensors:
        sizes = operation(results, arranged, header=header, messages=messages, offsets=offsets)
        return sizes, messages

    def on_zeros(operation: Packing) -> Tensors:
        messages.zero_()
        return run(operation)

    return Case(
        kernel="pack_results",
        call=lambda: run(pack_results),
        reference=lambda: on_zeros(pack_results_torch),
        least_bytes=2 * num_arrived * shape.hidden * 2,
        defined=lambda result: (result[0], result[1].clone()),
        notes={"rows": num_arrived},
    )


def _locating(shape: Shape, routed: Routed) -> Case:
    device, row_bytes = routed.places.device, shape.hidden * 2
    # A header and the rows, in whole rows whose bytes are a multiple of 64.
    rows = int(routed.choice_bounds.diff().max()) + -(-HEADER_BYTES // row_bytes)
    window_rows = -(-rows // 32) * 32
    size = shape.members * window_rows * row_bytes + HEADER_BYTES
    run = partial(
        _with_arguments,
        torch.zeros(size, dtype=torch.uint8, device=device),
        routed,
        header=torch.zeros(HEADER_BYTES, dtype=torch.uint8, device=device),
        ranks=torch.zeros(shape.members, dtype=torch.int32, device=device),
        window_rows=window_rows,
        row_bytes=row_bytes,
    )
    return Case(
        kernel="locate_results",
        call=lambda: run(locate_results),
        reference=lambda: run(locate_results_torch),
        least_bytes=(8 + 8) * shape.choices,
    )


def _combining(shape: Shape, routed: Routed) -> Case:
    places, device = routed.places, routed.places.device
    rows = torch.randn(shape.choices, shape.hidden, device=device).to(BF16)
    weights = torch.rand(shape.tokens, shape.topk, device=device)

    def by_torch() -> torch.Tensor:
        return (rows[places.flatten()].view(*places.shape, -1) * weights.unsqueeze(2)).sum(1)

    return Case(
        kernel="combine",
        call=lambda: combine(rows, places, weights),
        reference=lambda: combine_torch(rows, places, weights),
        least_bytes=(shape.choices + shape.tokens) * shape.hidden * 2 + 8 * shape.choices,
        rival=by_torch,
    )
