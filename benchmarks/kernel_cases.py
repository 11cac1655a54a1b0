"""What each kernel is given to do: operands of one rank in one layer (see `kernel_case`)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.kernel_case import Case, Shape, Tensors
from benchmarks.kernel_moves import moving_cases
from dispatch.kernels.fp8 import dequantise_torch
from dispatch.kernels.grouped_gemm import grouped_gemm, grouped_gemm_torch
from dispatch.kernels.grouped_gemm_fp8 import grouped_gemm_fp8, grouped_gemm_fp8_torch
from dispatch.kernels.sigmoid_topk import sigmoid_topk, sigmoid_topk_torch
from dispatch.kernels.softmax_topk import softmax_topk, softmax_topk_torch
from dispatch.kernels.swiglu import swiglu, swiglu_torch
from dispatch.kernels.swiglu_fp8 import swiglu_fp8, swiglu_fp8_torch
from dispatch.kernels.topk_softmax import topk_softmax, topk_softmax_torch

BF16 = torch.bfloat16
E4M3 = torch.float8_e4m3fn
ROUNDING = 2.0**-7  # of the largest element: one unit in the last place of bf16, either side
FP32_ROUNDING = 1e-5
FP8_ROUNDING = 0.08  # one unit in the last place of e4m3, from 448 down


def cases(shape: Shape, device: torch.device) -> Iterator[Case]:
    """All kernels on one shape; the operands of one are freed before the next are made."""
    yield from _choosing(shape, device)
    yield from moving_cases(shape, device)
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
