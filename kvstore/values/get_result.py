"""What became of one get."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class GetOutcome(StrEnum):
    """Of one key."""

    HIT = "hit"
    MISS = "miss"  # not in the pool: no error, and not an empty value
    CORRUPT = "corrupt"  # no copy has the right bytes; they are dropped now
    UNREACHABLE = "unreachable"  # it is in the pool, but no copy could be read in time


@dataclass(frozen=True, slots=True)
class GetResult:
    """True if it was a hit.

    Attributes:
        outcome: What became of it.
        value: The bytes, if they were not read into a target.
        nbytes: How many there are; 0 unless it was a hit.
    """

    outcome: GetOutcome
    value: bytes | None = None
    nbytes: int = 0

    def __bool__(self) -> bool:
        return self.outcome is GetOutcome.HIT


MISS = GetResult(GetOutcome.MISS)
