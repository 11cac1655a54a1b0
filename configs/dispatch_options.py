"""What travels in token dispatch, and where results are added up."""

from __future__ import annotations

from enum import StrEnum


class CombineMode(StrEnum):
    """`exact`: sums at the source, the same bits for every placement. `reduced`: fewer bytes."""

    EXACT = "exact"
    REDUCED = "reduced"


class DispatchWire(StrEnum):
    """What rows are on their way to the experts; `fp8`: e4m3, a scale for 128 elements."""

    NATIVE = "native"
    FP8 = "fp8"


class CombineWire(StrEnum):
    """What results are on their way back; `native`: what the experts return."""

    NATIVE = "native"
    BF16 = "bf16"
