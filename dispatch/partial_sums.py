"""The reduced combine: every rank adds up what its own experts made of a token.

    exact      one row per (token, choice) travels back; the source adds up in the order of k
    reduced    one row per (token, rank) travels back; the source adds up in the order of ranks

    on the rank of the experts     part = cast(((0 + w[k1] * row[k1]) + w[k2] * row[k2]) + ...)
                                   fp32, k ascending, over the token's choices on this rank
    at the source                  out  = cast((0 + part[rank a]) + part[rank b] + ...)
                                   fp32, ranks ascending, its own among them

Fewer bytes where a token has several experts on a rank. The bits depend on which experts live
together: not bitwise equal across placements, while `exact` is.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from dispatch.arrival import Arrival
from dispatch.handle import Reduction
from dispatch.layout import Rows
from dispatch.routing import Indices, Routing
from dispatch.weighted_sum import WeightedSum


def reduction_of(arrivals: Sequence[Arrival], topk: int) -> Reduction:
    """Return how the choices of all sources are added up.

    Args:
        arrivals: Source after source.
        topk: K.
    """
    bounds = list(accumulate((arrival.num_rows for arrival in arrivals), initial=0))
    slots = [
        arrival.slots + np.int64(begin * topk)
        for arrival, begin in zip(arrivals, bounds, strict=False)
    ]
    weights = np.zeros(bounds[-1] * topk, np.float32)
    all_slots: Indices = np.concatenate(slots)
    weights[all_slots] = np.concatenate([arrival.weights for arrival in arrivals])
    return Reduction(
        slots=all_slots, weights=torch.from_numpy(weights).view(-1, topk), bounds=bounds
    )


def partial_sums(
    total: WeightedSum,
    reduction: Reduction,
    place: Indices,
    results: Rows,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Return [rows of all sources, H] sums.

    Args:
        total: Workspace.
        reduction: What is added up.
        place: [R] row of each choice in `results`.
        results: What the experts returned.
        dtype: Its type.
        out_dtype: Of the sums.
    """
    num_rows, topk = reduction.weights.shape
    total.start(dtype, num_rows, topk, holes=True)
    total.put(reduction.slots, results, place)
    return total.sum(reduction.weights, out_dtype)


def sum_of_parts(
    total: WeightedSum,
    routing: Routing,
    num_tokens: int,
    parts: Sequence[Rows],
    dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Return [T, H] sums over the ranks' parts.

    Args:
        total: Workspace.
        routing: Which token has a part of which member.
        num_tokens: T.
        parts: By member, [U, words] its parts.
        dtype: Their type.
        out_dtype: Of the sums.
    """
    num_members, bounds = len(parts), routing.row_bounds
    total.start(dtype, num_tokens, num_members, holes=True)
    for member, rows in enumerate(parts):
        tokens = routing.row_tokens[bounds[member] : bounds[member + 1]]
        if len(tokens):
            total.put(tokens * num_members + member, rows)
    return total.sum(torch.ones(num_tokens, num_members), out_dtype)
