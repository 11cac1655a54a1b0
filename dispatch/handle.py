"""What `dispatch` returns: the rows for this rank's experts, and what `combine` needs later."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from dispatch.layout import RowFormat, Rows
from dispatch.message import Stamp
from dispatch.routing import Indices, Routing

Columns = tuple[Rows, ...]  # the parts of a row on its way to an expert, each [n, words]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRows:
    """Rows that arrived for this rank's experts.

    Attributes:
        rows: [R, H], contiguous, grouped by expert, inside by (source rank, token, k). The
            caller's own; it does not alias a receive window.
        counts: Rows of each local expert; they add up to R.
        experts: Logical id of each local expert, ascending, as long as `counts`.
        more: Whether any rank, this one included, has another microbatch in this layer. The same
            on every rank.
    """

    rows: torch.Tensor
    counts: tuple[int, ...]
    experts: tuple[int, ...]
    more: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outgoing:
    """This rank's choices on their way: between routing and the arrival of the others' rows.

    Attributes:
        stamp: The exchange they belong to.
        shared: What the headers of all its messages have in common.
        routing: How they are sent.
        columns: [T, words] each, the tokens' rows; in native form the caller's memory.
        num_tokens: T.
        weights: [T, K] fp32, 0 where a choice is left out. May share the caller's memory.
        num_degraded: Choices left out because nobody holds their expert.
        more: Whether this rank has another microbatch in this layer.
    """

    stamp: Stamp
    shared: bytes
    routing: Routing
    columns: Columns
    num_tokens: int
    weights: torch.Tensor
    num_degraded: int
    more: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reduction:
    """How this rank adds up what its experts return, where it does (`combine: reduced`).

    Attributes:
        slots: [R] of each arrival: row * K + k, rows counted over all sources.
        weights: [rows, K] fp32, 0 where a choice is not for this rank.
        bounds: Source w has rows `bounds[w]` to `bounds[w + 1]`.
    """

    slots: Indices
    weights: torch.Tensor
    bounds: list[int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DispatchHandle:
    """Ties a `combine` to its `dispatch`. Opaque to callers; good for one combine.

    Attributes:
        outgoing: What this rank sent.
        place: [R] row of each arrival, source after source, in the expert rows.
        source_bounds: Source w has `place[source_bounds[w] : source_bounds[w + 1]]`.
        reduction: How this rank adds up; None if the sources do.
    """

    outgoing: Outgoing = field(repr=False)
    place: Indices = field(repr=False)
    source_bounds: list[int]
    reduction: Reduction | None = field(default=None, repr=False)

    @property
    def return_bounds(self) -> list[int]:
        """Rows that go back: source w gets those from bounds[w] to bounds[w + 1]."""
        return self.source_bounds if self.reduction is None else self.reduction.bounds

    @property
    def due_bounds(self) -> list[int]:
        """Rows that come back, by member."""
        routing = self.outgoing.routing
        return routing.choice_bounds if self.reduction is None else routing.row_bounds

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
        results: [R, words] in the order of the `ExpertRows`, or [U, words] sums, source after
            source. May be the caller's memory.
        dtype: Their type; every member's is the same.
        row_format: How they are moved.
    """

    handle: DispatchHandle
    shared: bytes
    results: Rows
    dtype: torch.dtype
    row_format: RowFormat
