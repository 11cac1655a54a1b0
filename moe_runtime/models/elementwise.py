"""Norm, activation and router choice: row by row, the same bits in any batch.

Elementwise kernels compute whole vectors and then a tail, one element at a time, with another
implementation of `exp`; which elements are the tail depends on the size of the whole tensor and on
the number of threads. Plain arithmetic is rounded correctly in both, so it is safe; `silu` and
`sigmoid` are not. Here `silu` is written with `exp` alone, whose kernel has one implementation.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from configs.schema import Exactness

CHUNK_ELEMENTS = 1 << 16  # at a time: the float32 temporaries stay in the cache


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Normalise the last dimension of x [..., D] to a root mean square of one, times weight [D]."""
    return functional.rms_norm(x, (x.shape[-1],), weight, epsilon)


def silu_and_mul(gate_up: torch.Tensor, exactness: Exactness) -> torch.Tensor:
    """`silu(gate) * up`.

    Args:
        gate_up: [R, 2I], gate first.
        exactness: `bitwise` computes in float32 and rounds once.

    Returns:
        [R, I], contiguous, of the same dtype.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    if exactness is Exactness.TOLERANT:
        return functional.silu(gate).mul_(up)
    out = torch.empty(gate.shape, dtype=gate_up.dtype)
    rows = max(1, CHUNK_ELEMENTS // gate.shape[1])
    pieces = (torch.split(tensor, rows) for tensor in (gate, up, out))
    for part, factor, target in zip(*pieces, strict=True):
        wide = part.to(torch.float32)
        denominator = wide.neg().exp_().add_(1.0)
        target.copy_(torch.div(wide, denominator).mul_(factor))
    return out


def choose_experts(
    router_logits: torch.Tensor, topk: int, *, renormalise: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose each token's experts: softmax over all, the k largest, optionally scaled to sum 1.

    Args:
        router_logits: [T, E] of the model's dtype.
        topk: K.
        renormalise: Whether the chosen weights are scaled to sum 1.

    Returns:
        [T, K] int64 ids in descending order of weight, and [T, K] float32 weights, rounded to the
        model's dtype as the reference does.
    """
    probabilities = functional.softmax(router_logits, dim=-1, dtype=torch.float32)
    weights, ids = torch.topk(probabilities, topk, dim=-1)
    if renormalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    if router_logits.dtype != torch.float32:
        weights = weights.to(router_logits.dtype).to(torch.float32)
    return ids, weights
