"""Rotary position embedding from a table that is computed once.

    y[i]       = x[i] * cos - x[i + D/2] * sin        i < D/2
    y[i + D/2] = x[i + D/2] * cos + x[i] * sin

The table is indexed by position, so the angle of a position has the same bits in every batch.
"""

from __future__ import annotations

import torch

from moe_runtime.models.spec import ModelSpec


class Rotary:
    """Cosines and signed sines of all positions. Read-only after construction."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        exponent = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
        frequency = 1.0 / (spec.rope_theta**exponent)
        position = torch.arange(spec.max_position_embeddings, dtype=torch.float32)
        angle = torch.outer(position, frequency)
        cos, sin = angle.cos(), angle.sin()
        # The sign of the first half is kept in the table: see `apply`.
        self._cos = torch.cat((cos, cos), dim=-1).to(dtype)
        self._sin = torch.cat((-sin, sin), dim=-1).to(dtype)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of the table for positions [T] int64: two tensors [T, 1, D]."""
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate heads.

    Separate products and a sum, never a fused multiply-add: whether that is contracted differs
    between the vector and the tail part of a kernel.

    Args:
        x: [T, heads, D].
        cos: [T, 1, D].
        sin: [T, 1, D], the first half negated.

    Returns:
        [T, heads, D], contiguous.
    """
    halves = x.view(*x.shape[:-1], 2, -1).flip(-2).view(x.shape)
    return (x * cos).add_(halves.mul_(sin))
