"""What each kernel is given to do: operands of one rank in one layer, and the bytes it must move.

Legend: T tokens, H hidden, E experts of the layer, K choices of a token, W members, I expert width.
The rank holds E / W experts and receives as many rows as it sends: T * K.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from dispatch.expert_map import ExpertMap
from dispatch.kernels.combine import combine, combine_torch
from dispatch.kernels.fp8 import dequantise_torch, quantise, quantise_torch
from dispatch.kernels.grouped_gemm import grouped_gemm, grouped_gemm_torch
from dispatch.kernels.grouped_gemm_fp8 import grouped_gemm_fp8, grouped_gemm_fp8_torch
from dispatch.kernels.pack import pack, pack_torch
from dispatch.kernels.route import route, route_torch
from dispatch.kernels.routed import ExpertSlots, Routed
from dispatch.kernels.sigmoid_topk import sigmoid_topk, sigmoid_topk_torch
from dispatch.kernels.softmax_topk import softmax_topk, softmax_topk_torch
from dispatch.kernels.swiglu import swiglu, swiglu_torch
from dispatch.kernels.swiglu_fp8 import swiglu_fp8, swiglu_fp8_torch
from dispatch.kernels.topk_softmax import topk_softmax, topk_softmax_torch
from dispatch.layout import HEADER_BYTES, aligned, rows_offset
from dispatch.routing import LayerRoute

EXACT = 0.0
BF16 = torch.bfloat16
E4M3 = torch.float8_e4m3fn
ROUNDING = 2.0**-7  # of the largest element: one unit in the last place of bf16, either side
FP32_ROUNDING = 1e-5
FP8_ROUNDING = 0.08  # one unit in the last place of e4m3, from 448 down

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of one rank's part in one layer."""

    tokens: int
    hidden: int
    experts: int
    topk: int
    width: int
    members: int = 8

    @property
    def choices(self) -> int:
        """T * K."""
        return self.tokens * self.topk

    def labels(self) -> dict[str, int]:
        """What a recorded figure says of it."""
        return {
            "tokens": self.tokens,
            "hidden": self.hidden,
            "experts": self.experts,
            "topk": self.topk,
        }


def tensors_of(result: Any) -> Tensors:
    """One tensor or several, as several."""
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kernel on one shape.

    Attributes:
        kernel: Name of the operation.
        call: Runs the kernel on a GPU, or interpreted.
        reference: The same by torch.
        least_bytes: What has to be read and written at least.
        tolerance: Largest difference, of the largest element; `EXACT`: bit for bit.
        defined: The part of a result that is defined.
        rival: What torch offers for the same purpose, where it does.
        flops: Of products, if there are any.
    """

    kernel: str
    call: Callable[[], Any]
    reference: Callable[[], Any]
    least_bytes: int
    tolerance: float = EXACT
    defined: Callable[[Any], Tensors] = tensors_of
    rival: Callable[[], Any] | None = None
    flops: int = 0
    notes: dict[str, object] = field(default_factory=dict)

    def mismatch(self) -> str | None:
        """What differs between the kernel and its reference, or None."""
        found, due = self.defined(self.call()), self.defined(self.reference())
        if len(found) != len(due):
            return f"{len(found)} results, the reference has {len(due)}"
        for i, (ours, theirs) in enumerate(zip(found, due, strict=True)):
            if ours.shape != theirs.shape or ours.dtype is not theirs.dtype:
                return f"result {i}: {ours.shape} {ours.dtype}, {theirs.shape} {theirs.dtype}"
            if not ours.numel():
                continue
            if self.tolerance == EXACT or not ours.is_floating_point():
                if not torch.equal(bits(ours), bits(theirs)):
                    return f"result {i} differs in {int((bits(ours) != bits(theirs)).sum())} places"
                continue
            difference = (ours.float() - theirs.float()).abs().max()
            allowed = self.tolerance * theirs.float().abs().max()
            if not difference <= allowed:
                return f"result {i} differs by {difference:.3g}, allowed are {allowed:.3g}"
        return None


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(kinds[tensor.itemsize])


def cases(shape: Shape, device: torch.device) -> Iterator[Case]:
    """All kernels on one shape; the operands of one are freed before the next are made."""
    yield from _choosing(shape, device)
    yield from _moving(shape, device)
    yield from _computing(shape, device)


def _choosing(shape: Shape, device: torch.device) -> Iterator[Case]:
    # Scores far enough apart that no rounding of exp changes a choice.
    order = torch.rand(shape.tokens, shape.experts, device=device).argsort(1)
    logits = (order.float() - shape.experts / 2) * (8 / shape.experts)
    moved = 4 * logits.numel() + (8 + 4) * shape.choices
    topk = shape.topk

    def by_torch() -> Tensors:
        weights, ids = torch.topk(torch.softmax(logits, 1), topk)
        return ids, weights / weights.sum(1, keepdim=True)

    pairs = (
        (softmax_topk, softmax_topk_torch, by_torch),
        (topk_softmax, topk_softmax_torch, None),
        (sigmoid_topk, sigmoid_topk_torch, None),
    )
    for operation, reference, rival in pairs:
        yield Case(
            kernel=operation.__name__,
            call=lambda run=operation: run(logits, topk),
            reference=lambda run=reference: run(logits, topk),
            least_bytes=moved,
            tolerance=FP32_ROUNDING,
            rival=rival,
        )


def routing_of(shape: Shape, device: torch.device) -> tuple[torch.Tensor, ExpertSlots]:
    """[T, K] different experts of each token, uniformly, and the tables of an even placement."""
    ids = torch.rand(shape.tokens, shape.experts, device=device).topk(shape.topk).indices
    members = range(shape.members)
    placement = ExpertMap.even(num_layers=1, num_logical=shape.experts, ranks=members)
    layer = LayerRoute(placement, members, 0, 0)
    return ids, ExpertSlots.of(layer, shape.experts, device)


def defined_of(routed: Routed) -> Tensors:
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


def _moving(shape: Shape, device: torch.device) -> Iterator[Case]:
    ids, slots = routing_of(shape, device)
    routed = route_torch(ids, slots)
    yield Case(
        kernel="route",
        call=lambda: route(ids, slots),
        reference=lambda: route_torch(ids, slots),
        least_bytes=8 * shape.choices + 6 * 4 * shape.choices,
        defined=defined_of,
        rival=lambda: ids.flatten().sort(stable=True),
    )
    x = torch.randn(shape.tokens, shape.hidden, device=device).to(BF16)
    yield _packing(shape, x, routed, slots)
    yield Case(
        kernel="quantise",
        call=lambda: quantise(x),
        reference=lambda: quantise_torch(x),
        least_bytes=x.numel() * 3,
    )
    rows = torch.randn(shape.choices, shape.hidden, device=device).to(BF16)
    weights = torch.rand(shape.tokens, shape.topk, device=device)
    places = routed.places

    def by_torch() -> torch.Tensor:
        return (rows[places.flatten()].view(*places.shape, -1) * weights.unsqueeze(2)).sum(1)

    yield Case(
        kernel="combine",
        call=lambda: combine(rows, places, weights),
        reference=lambda: combine_torch(rows, places, weights),
        least_bytes=(shape.choices + shape.tokens) * shape.hidden * 2 + 8 * shape.choices,
        rival=by_torch,
    )


def _packing(shape: Shape, x: torch.Tensor, routed: Routed, slots: ExpertSlots) -> Case:
    device, row_bytes = x.device, shape.hidden * 2
    largest = rows_offset(shape.experts, shape.choices) + shape.tokens * row_bytes
    offsets = torch.arange(shape.members, device=device) * aligned(largest)
    messages = torch.zeros(shape.members * aligned(largest), dtype=torch.uint8, device=device)
    header = torch.zeros(HEADER_BYTES, dtype=torch.uint8, device=device)
    num_rows = int(routed.row_bounds[-1])
    row_tokens = routed.row_tokens[:num_rows].long()

    def run(operation: Callable[..., torch.Tensor]) -> Tensors:
        sizes = operation(x, routed, slots, header=header, messages=messages, offsets=offsets)
        return sizes, messages

    def checked(operation: Callable[..., torch.Tensor]) -> Tensors:
        messages.zero_()
        return run(operation)

    def fresh(result: Tensors) -> Tensors:
        return result[0], result[1].clone()

    return Case(
        kernel="pack",
        call=lambda: run(pack),
        reference=lambda: checked(pack_torch),
        least_bytes=(shape.tokens + num_rows) * row_bytes + 4 * 5 * shape.choices,
        defined=fresh,
        rival=lambda: x.index_select(0, row_tokens),
        notes={"rows": num_rows},
    )


def even_bounds(shape: Shape, device: torch.device) -> torch.Tensor:
    """[E / W + 1] int32: T * K rows spread over the rank's experts by chance."""
    experts = shape.experts // shape.members
    chosen = torch.randint(0, experts, (shape.choices,))
    counts = torch.bincount(chosen, minlength=experts)
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32).to(device)


def _computing(shape: Shape, device: torch.device) -> Iterator[Case]:
    bounds = even_bounds(shape, device)
    yield from _activation(shape, bounds)
    yield _gemm(shape, bounds)
    if device.type == "cpu" or fp8_products(device):
        yield _gemm_fp8(shape, bounds)


def fp8_products(device: torch.device) -> bool:
    """Whether the GPU has e4m3 in its matrix units."""
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 9)


def _activation(shape: Shape, bounds: torch.Tensor) -> Iterator[Case]:
    gate_up = torch.randn(shape.choices, 2 * shape.width, device=bounds.device).to(BF16)

    def by_torch() -> torch.Tensor:
        gate, up = gate_up.chunk(2, 1)
        return torch.nn.functional.silu(gate) * up

    yield Case(
        kernel="swiglu",
        call=lambda: swiglu(gate_up, bounds),
        reference=lambda: swiglu_torch(gate_up, bounds),
        least_bytes=3 * shape.choices * shape.width * 2,
        tolerance=ROUNDING,
        rival=by_torch,
    )
    yield Case(
        kernel="swiglu_fp8",
        call=lambda: swiglu_fp8(gate_up, bounds),
        reference=lambda: swiglu_fp8_torch(gate_up, bounds),
        least_bytes=5 * shape.choices * shape.width,
        tolerance=FP8_ROUNDING,
        defined=lambda result: (dequantise_torch(*result, torch.float32),),
    )


def _products(shape: Shape, bounds: torch.Tensor, itemsize: int) -> dict[str, int]:
    """Bytes and operations of the first product of the experts: [T * K, H] by [2I, H]."""
    used = int((bounds.diff() > 0).sum())
    columns, hidden = 2 * shape.width, shape.hidden
    read = (used * columns + shape.choices) * hidden * itemsize
    return {
        "least_bytes": read + shape.choices * columns * 2,
        "flops": 2 * shape.choices * columns * hidden,
    }


def _gemm(shape: Shape, bounds: torch.Tensor) -> Case:
    device, experts = bounds.device, len(bounds) - 1
    rows = torch.randn(shape.choices, shape.hidden, device=device).to(BF16)
    weights = torch.randn(experts, 2 * shape.width, shape.hidden, device=device, dtype=BF16)
    grouped_mm = getattr(torch.nn.functional, "grouped_mm", None)
    ends, transposed = bounds[1:].contiguous(), weights.transpose(1, 2)
    return Case(
        kernel="grouped_gemm",
        call=lambda: grouped_gemm(rows, weights, bounds),
        reference=lambda: grouped_gemm_torch(rows, weights, bounds),
        tolerance=ROUNDING,
        rival=grouped_mm and (lambda: grouped_mm(rows, transposed, offs=ends)),
        **_products(shape, bounds, 2),
    )


def _gemm_fp8(shape: Shape, bounds: torch.Tensor) -> Case:
    device, experts = bounds.device, len(bounds) - 1
    blocks, columns = -(-shape.hidden // 128), 2 * shape.width
    operands = (
        torch.randn(shape.choices, shape.hidden, device=device).to(E4M3),
        torch.rand(shape.choices, blocks, device=device) + 0.5,
        torch.randn(experts, columns, shape.hidden, device=device, dtype=BF16).to(E4M3),
        torch.rand(experts, -(-columns // 128), blocks, device=device) + 0.5,
        bounds,
    )
    return Case(
        kernel="grouped_gemm_fp8",
        call=lambda: grouped_gemm_fp8(*operands),
        reference=lambda: grouped_gemm_fp8_torch(*operands),
        tolerance=ROUNDING,
        **_products(shape, bounds, 1),
    )
