"""An expert exchange between threads: an independent, plain stand-in for `dispatch`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

WAIT_S = 30.0


@dataclass(frozen=True)
class ArrivedRows:
    rows: torch.Tensor
    counts: tuple[int, ...]
    experts: tuple[int, ...]


class Exchange:
    """Shared by `num_ranks` dispatchers; `experts_of(rank, layer)` is the placement."""

    def __init__(self, num_ranks: int, experts_of: Callable[[int, int], Sequence[int]]) -> None:
        self.num_ranks = num_ranks
        self.experts_of = experts_of
        self.barrier = threading.Barrier(num_ranks, timeout=WAIT_S)
        self.sent: list[Any] = [None] * num_ranks
        self.results: list[dict[tuple[int, int, int], torch.Tensor]] = [
            {} for _ in range(num_ranks)
        ]

    def dispatcher(self, rank: int) -> ExchangeDispatcher:
        return ExchangeDispatcher(self, rank)


class ExchangeDispatcher:
    def __init__(self, exchange: Exchange, rank: int) -> None:
        self.exchange = exchange
        self.rank = rank

    def dispatch(self, x, topk_ids, topk_weights, *, layer):
        exchange = self.exchange
        exchange.sent[self.rank] = (x, topk_ids)
        exchange.barrier.wait()
        experts = tuple(exchange.experts_of(self.rank, layer))
        rows, keys, counts = [x.new_empty(0, x.shape[1])], [], []
        for expert in experts:
            before = len(keys)
            for source, (their_x, their_ids) in enumerate(exchange.sent):
                for token, k in (their_ids == expert).nonzero().tolist():
                    rows.append(their_x[token : token + 1])
                    keys.append((source, token, k))
            counts.append(len(keys) - before)
        arrived = ArrivedRows(torch.cat(rows), tuple(counts), experts)
        return arrived, (keys, topk_ids, topk_weights)

    def combine(self, expert_out, handle):
        exchange, (keys, ids, weights) = self.exchange, handle
        exchange.results[self.rank] = dict(zip(keys, expert_out.unbind(0), strict=True))
        exchange.barrier.wait()
        found = {key: row for results in exchange.results for key, row in results.items()}
        total = torch.zeros(len(ids), expert_out.shape[1], dtype=torch.float32)
        for token in range(len(ids)):
            for k in range(ids.shape[1]):
                row = found[(self.rank, token, k)].to(torch.float32)
                total[token] += weights[token, k] * row
        exchange.barrier.wait()
        return total.to(expert_out.dtype)
