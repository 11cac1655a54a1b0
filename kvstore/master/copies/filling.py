"""How fast a node that joined is filled: a budget of bytes that grows with time.

                     mean
    old nodes  ██████████|███
    joined     ██        |      gets bytes_per_s, from the fullest, until it is near the mean

Everything at once would take the joined node's and the others' bandwidth away from readers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

BURST_S: Final = 1.0  # the budget is never more than this much time's


class Fill(NamedTuple):
    """How full one segment is."""

    segment: int
    used_bytes: int
    capacity_bytes: int

    @property
    def share(self) -> float:
        """Of its capacity, in use."""
        return self.used_bytes / self.capacity_bytes if self.capacity_bytes else 1.0


class Budget:
    """Bytes that may be moved by now. Not thread-safe.

    Args:
        bytes_per_s: How fast it grows; 0: there is never one.
    """

    def __init__(self, bytes_per_s: int) -> None:
        self._rate = bytes_per_s
        self._left = 0.0
        self._at_s: float | None = None

    def left(self, now: float) -> int:
        """Return what may be spent now."""
        since_s = 0.0 if self._at_s is None else now - self._at_s
        self._at_s = now
        self._left = min(self._left + self._rate * since_s, self._rate * BURST_S)
        return int(self._left)

    def spend(self, nbytes: int) -> None:
        """Take bytes out; the last block may overdraw it, and is paid back by waiting."""
        self._left -= nbytes


def transfers(
    fills: Sequence[Fill], *, targets: Sequence[int] | None, tolerance: float, nbytes_max: int
) -> list[tuple[int, int, int]]:
    """Return (source, target, bytes) that bring the fill shares together.

    The fullest gives to the emptiest until all targets are within `tolerance` of the mean share,
    or `nbytes_max` is used up. Nobody gives below the mean or gets above it.

    Args:
        fills: All segments of one medium that count.
        targets: Which may get something; None: all.
        tolerance: As a share.
        nbytes_max: Most bytes in all.
    """
    capacity = sum(fill.capacity_bytes for fill in fills)
    if not capacity or nbytes_max <= 0:
        return []
    mean = sum(fill.used_bytes for fill in fills) / capacity
    gives = {f.segment: int(f.used_bytes - mean * f.capacity_bytes) for f in fills}
    getters = [
        fill
        for fill in sorted(fills, key=lambda f: (f.share, f.segment))
        if (targets is None or fill.segment in targets) and fill.share < mean - tolerance
    ]
    givers = [
        f.segment for f in sorted(fills, key=lambda f: (-f.share, f.segment)) if f.share > mean
    ]
    plan: list[tuple[int, int, int]] = []
    for getter in getters:
        missing = -gives[getter.segment]
        for giver in givers:
            nbytes = min(missing, gives[giver], nbytes_max)
            if nbytes > 0:
                plan.append((giver, getter.segment, nbytes))
                gives[giver] -= nbytes
                missing -= nbytes
                nbytes_max -= nbytes
    return plan
