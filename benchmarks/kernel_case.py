"""One kernel on one shape: how it is run, what it must give, and the bytes it must move.

Legend: T tokens, H hidden, E experts of the layer, K choices of a token, W members, I expert width.
The rank holds E / W experts and receives as many rows as it sends: T * K.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

EXACT = 0.0

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
