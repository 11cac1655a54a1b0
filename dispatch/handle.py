"""What `dispatch` returns: the rows for this rank's experts, and what `combine` needs later."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from dispatch.layout import RowFormat, Rows
from dispatch.message import Stamp
from dispatch.routing import Indices, Routing


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRows:
    """Rows that arrived for this rank's experts.

    Attributes:
        rows: [R, H], contiguous, grouped by expert, inside by (source rank, token, k). The
            caller's own; it does not alias a receive window.
        counts: Rows of each local expert; they add up to R.
        experts: Logical id of each local expert, ascending, as long as `counts`.
    """

    rows: torch.Tensor
    counts: tuple[int, ...]
    experts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outgoing:
    """This rank's choices on their way: between routing and the arrival of the others' rows.

    Attributes:
        stamp: The exchange they belong to.
        shared: What the headers of all its messages have in common.
        routing: How they are sent.
        x: [T, words] the tokens' rows, the caller's memory.
        num_tokens: T.
        weights: [T, K] fp32, 0 where a choice is left out. May share the caller's memory.
        num_degraded: Choices left out because nobody holds their expert.
    """

    stamp: Stamp
    shared: bytes
    routing: Routing
    x: Rows
    num_tokens: int
    weights: torch.Tensor
    num_degraded: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DispatchHandle:
    """Ties a `combine` to its `dispatch`. Opaque to callers; good for one combine.

    Attributes:
        outgoing: What this rank sent.
        place: [R] row of each arrival, source after source, in the expert rows.
        source_bounds: Source w has `place[source_bounds[w] : source_bounds[w + 1]]`.
    """

    outgoing: Outgoing = field(repr=False)
    place: Indices = field(repr=False)
    source_bounds: list[int]

    @property
    def stamp(self) -> Stamp:
        """The exchange it belongs to."""
        return self.outgoing.stamp

    @property
    def num_degraded(self) -> int:
        """Choices left out because nobody holds their expert (policy `degrade`)."""
        return self.outgoing.num_degraded


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Returning:
    """This rank's expert results on their way back.

    Attributes:
        handle: Of the dispatch.
        shared: What the headers of all combine messages have in common.
        results: [R, words] in the order of the `ExpertRows`, the caller's memory.
        dtype: Their type; every member's must be the same.
        row_format: How they are moved.
    """

    handle: DispatchHandle
    shared: bytes
    results: Rows
    dtype: torch.dtype
    row_format: RowFormat
