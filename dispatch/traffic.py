"""What an exchange costs: messages and bytes, predicted from the routing alone.

For a source s and a receiver r, s != r, with N choices of s for experts of r, of U tokens:

    messages        1 dispatch and 1 combine per ordered pair, whatever N
    dispatch(s, r)  64 + ceil64(4 * (E_r + c * N)) + rows of U tokens
    combine(r, s)   64 + M * H * itemsize of the results on the wire

               exact   reduced               native                fp8
    c            1        2       rows   U * H * itemsize   ceil64(U * H) + U * ceil(H / 128) * 4
    M            N        U

Not counted: what a window's growth adds once, a note of at most 512 bytes and a grant
(`dispatch.growth`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from dispatch.expert_map import ExpertMap
from dispatch.layout import DispatchLayout
from dispatch.routing import Indices


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What one rank sends in one exchange.

    Attributes:
        messages: Writes with an immediate.
        dispatch_bytes: In dispatch messages.
        combine_bytes: In combine messages.
    """

    messages: int
    dispatch_bytes: float
    combine_bytes: float

    @property
    def nbytes(self) -> float:
        """All bytes."""
        return self.dispatch_bytes + self.combine_bytes


def traffic_of(
    layout: DispatchLayout,
    expert_map: ExpertMap,
    layer: int,
    rank: int,
    topk_ids: Mapping[int, Indices],
    *,
    dtype: torch.dtype | None = None,
) -> Traffic:
    """Return exactly what a rank sends.

    Args:
        layout: Sizes and options.
        expert_map: Where the experts live.
        layer: Which layer.
        rank: Who sends.
        topk_ids: Rank -> [T, K] choices, of all members.
        dtype: Of what the experts return; default: the layout's type.
    """
    dispatch_bytes = combine_bytes = 0
    others = [other for other in topk_ids if other != rank]
    for other in others:
        experts = expert_map.experts_of(other, layer) if other in expert_map.placement else ()
        choices, tokens = _pair(expert_map, layer, rank, other, topk_ids[rank])
        dispatch_bytes += layout.dispatch_bytes(len(experts), choices, tokens)
        choices, tokens = _pair(expert_map, layer, other, rank, topk_ids[other])
        rows = tokens if layout.reduced else choices
        combine_bytes += layout.combine_bytes(rows, dtype or layout.dtype)
    return Traffic(
        messages=2 * len(others), dispatch_bytes=dispatch_bytes, combine_bytes=combine_bytes
    )


def _pair(
    expert_map: ExpertMap, layer: int, source: int, target: int, topk_ids: Indices
) -> tuple[int, int]:
    """Return N and U of a pair of ranks."""
    there = expert_map.route(layer, source) == target
    chosen = (topk_ids >= 0) & there[topk_ids.clip(0)]
    return int(chosen.sum()), int(chosen.any(1).sum())


def even_traffic(
    layout: DispatchLayout,
    *,
    num_ranks: int,
    num_tokens: int,
    dtype: torch.dtype | None = None,
) -> Traffic:
    """Return what a rank sends on average if routing is even, paddings left out.

    Every rank has `num_tokens` tokens, E / W experts, and each token chooses K different ones:

        N = T * K / W        U = T * (1 - C(E - E / W, K) / C(E, K))

    Args:
        layout: Sizes and options.
        num_ranks: W; should divide E.
        num_tokens: T.
        dtype: Of what the experts return; default: the layout's type.
    """
    experts, topk = layout.num_logical, layout.topk
    here = experts // num_ranks
    choices = num_tokens * topk / num_ranks
    none = math.comb(experts - here, topk) / math.comb(experts, topk)
    tokens = num_tokens * (1 - none)
    empty = layout.dispatch_bytes(here, 0, 0)
    index_bytes = 4 * choices * (2 if layout.reduced else 1)
    itemsize = layout.returned_dtype(dtype or layout.dtype).itemsize
    rows = tokens if layout.reduced else choices
    others = num_ranks - 1
    return Traffic(
        messages=2 * others,
        dispatch_bytes=others * (empty + index_bytes + tokens * sum(layout.column_bytes)),
        combine_bytes=others * (64 + rows * layout.hidden * itemsize),
    )
