"""What `arrange` returns: where the arrived rows go, and which messages were wrong."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch


class Fault(IntEnum):
    """What is wrong with a message."""

    NONE = 0
    HEADER = 1  # of another exchange, or another source's
    SIZES = 2  # other experts than ours, or longer than the window
    CONTENT = 3  # counts that do not add up, or a choice of a row that is not there


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arranged:
    """Where the arrived rows go (see the example of `arrange`).

    Attributes:
        counts: [E_l] int32, rows of each expert without padding.
        bounds: [E_l + 1] int32: expert e has the rows `[bounds[e], bounds[e + 1])`, of which those
            after its count are padding.
        row_offsets: [R] int64: byte of the row in `messages`, -1 for padding. Undefined from
            `bounds[E_l]` on.
        scale_offsets: [R] int64: the same for its scales.
        places: [R] int32: row of each arrival, source after source; N of them defined.
        source_bounds: [W + 1] int32: source w has `places[source_bounds[w] : ...[w + 1]]`.
        faults: [W + 1] int32: `Fault` of each source's message; last 1 if R was too small, in
            which case nothing else is defined.
    """

    counts: torch.Tensor
    bounds: torch.Tensor
    row_offsets: torch.Tensor
    scale_offsets: torch.Tensor
    places: torch.Tensor
    source_bounds: torch.Tensor
    faults: torch.Tensor

    @classmethod
    def empty(cls, offsets: torch.Tensor, num_experts: int, capacity: int) -> Arranged:
        """Return results to be filled in."""

        def empty(size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return offsets.new_empty(size, dtype=dtype)

        return cls(
            counts=empty(num_experts),
            bounds=empty(num_experts + 1),
            row_offsets=empty(capacity, torch.int64),
            scale_offsets=empty(capacity, torch.int64),
            places=empty(capacity),
            source_bounds=empty(len(offsets) + 1),
            faults=empty(len(offsets) + 1),
        )
