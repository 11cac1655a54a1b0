"""The slow truth about a MoE layer: one token, one choice, one row at a time. Knows no ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from dispatch import Dispatcher, DispatchLayout, ExpertMap

Expert = Callable[[torch.Tensor, int, int], torch.Tensor]


def scale_expert(rows: torch.Tensor, layer: int, expert: int) -> torch.Tensor:
    """A cheap expert whose result tells experts and layers apart; the same bits row by row."""
    factor = 1.0 + 0.37 * expert - 0.11 * layer
    return (rows.to(torch.float32) * factor + 0.25 * expert).to(rows.dtype)


def identity_expert(rows: torch.Tensor, layer: int, expert: int) -> torch.Tensor:
    del layer, expert
    return rows.clone()


def reference(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    layer: int,
    expert_fn: Expert = scale_expert,
    combine_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return what dispatch, experts and combine must give, bit by bit."""
    out = torch.zeros_like(x)
    for token in range(len(x)):
        total = torch.zeros(x.shape[1], dtype=torch.float32)
        for k in range(topk_ids.shape[1]):
            expert = int(topk_ids[token, k])
            if expert < 0:
                continue
            row = expert_fn(x[token : token + 1], layer, expert)[0]
            if combine_dtype is not None:
                row = row.to(combine_dtype)
            weighted = row.to(torch.float32) * topk_weights[token, k]
            total = total + weighted
        out[token] = total.to(x.dtype)
    return out


def run_experts(
    rows: torch.Tensor,
    counts: tuple[int, ...],
    experts: tuple[int, ...],
    layer: int,
    expert_fn: Expert = scale_expert,
    combine_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """What a rank's experts make of their rows."""
    parts, begin = [], 0
    for count, expert in zip(counts, experts, strict=True):
        parts.append(expert_fn(rows[begin : begin + count], layer, expert))
        begin += count
    assert begin == len(rows)
    out = torch.cat(parts) if parts else rows.clone()
    return out if combine_dtype is None else out.to(combine_dtype)


def run_layer(
    dispatcher: Dispatcher,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    layer: int,
    expert_fn: Expert = scale_expert,
    combine_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    arrived, handle = dispatcher.dispatch(x, ids, weights, layer=layer)
    out = run_experts(
        arrived.rows, arrived.counts, arrived.experts, layer, expert_fn, combine_dtype
    )
    return dispatcher.combine(out, handle)


def draw_tokens(
    layout: DispatchLayout,
    num_tokens: int,
    generator: torch.Generator,
    *,
    masked: float = 0.1,
    hot: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random rows, ids (duplicates happen, -1 with probability `masked`) and weights.

    `hot`: every choice that is not masked is this expert.
    """
    shape = (num_tokens, layout.topk)
    x = torch.randn(num_tokens, layout.hidden, generator=generator).to(layout.dtype)
    ids = torch.randint(0, layout.num_logical, shape, generator=generator)
    if hot is not None:
        ids.fill_(hot)
    ids[torch.rand(shape, generator=generator) < masked] = -1
    return x, ids, torch.rand(shape, generator=generator)


def draw_map(
    layout: DispatchLayout, ranks: list[int], generator: torch.Generator, *, instances_max: int = 2
) -> ExpertMap:
    """A random placement: uneven, with several instances, perhaps with ranks without experts."""

    def integer(bound: int) -> int:
        return int(torch.randint(0, bound, (1,), generator=generator))

    layers_of: Mapping[int, list[set[int]]] = {
        rank: [set() for _ in range(layout.num_layers)] for rank in ranks
    }
    for layer in range(layout.num_layers):
        for expert in range(layout.num_logical):
            for _ in range(1 + integer(instances_max)):
                layers_of[ranks[integer(len(ranks))]][layer].add(expert)
    return ExpertMap(
        num_layers=layout.num_layers,
        num_logical=layout.num_logical,
        placement={r: tuple(tuple(sorted(s)) for s in ls) for r, ls in layers_of.items()},
    )
