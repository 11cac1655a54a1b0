"""The order in which a token prefers experts: higher score first, among equals the lower id.

    score    3.0   NaN   -0.0   3.0   0.0   -inf
    rank     0     5      2     1     3      4         NaN comes last, -0 equals 0

The order is one of bits, so the same experts are chosen on every device.
"""

from __future__ import annotations

import torch

from dispatch.kernels.language import jit, tl
from dispatch.kernels.operands import FLOATS, IDS, check_member, check_operand, check_range

LOWEST = -(2**31)  # below the key of every score


@jit
def order_key(score: tl.tensor) -> tl.tensor:
    """Return int32 keys that compare as the fp32 scores do, NaN as LOWEST + 1."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    # Negative numbers grow downwards: with the other bits turned over they compare as integers.
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(score != score, -2147483647, key)


@jit
def best_of(
    key: tl.tensor,
    value: tl.tensor,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LOWEST: tl.constexpr,
) -> tl.tensor:
    """Return the positions of each row's K highest keys, and `value` there: [BLOCK_T, BLOCK_K].

    Column k is the k-th best; columns from K on are zeros.
    """
    position = tl.arange(0, BLOCK_E)[None, :]
    column = tl.arange(0, BLOCK_K)[None, :]
    chosen = tl.zeros((BLOCK_T, BLOCK_K), tl.int32)
    picked = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    for k in range(K):
        highest = tl.max(key, 1)[:, None]
        best = tl.min(tl.where(key == highest, position, BLOCK_E), 1)[:, None]
        there = tl.sum(tl.where(position == best, value, 0.0), 1)[:, None]
        chosen = tl.where(column == k, best, chosen)
        picked = tl.where(column == k, there, picked)
        key = tl.where(position == best, LOWEST, key)
    return chosen, picked


def check_choice(router_logits: torch.Tensor, topk: int, id_dtype: torch.dtype) -> None:
    """Accept what a choice among all experts is made from.

    Raises:
        InputInvalid: Logits, K or the type of ids.
    """
    check_operand("router_logits", router_logits, (None, None), FLOATS)
    check_range("topk", topk, 1, router_logits.shape[1])
    check_member("id_dtype", id_dtype, IDS)


def new_choice(
    router_logits: torch.Tensor, topk: int, id_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return topk_ids [T, K] and topk_weights [T, K] fp32 to be written into."""
    shape = len(router_logits), topk
    ids = router_logits.new_empty(shape, dtype=id_dtype)
    return ids, router_logits.new_empty(shape, dtype=torch.float32)


def best_first_torch(scores: torch.Tensor) -> torch.Tensor:
    """Return the positions of each row's scores, [T, E] int64, best first.

    Args:
        scores: [T, E] fp32.
    """
    absent = scores.isnan()
    by_score = torch.where(absent, -torch.inf, scores).sort(dim=1, descending=True, stable=True)
    last = absent.gather(1, by_score.indices).to(torch.int8).sort(dim=1, stable=True)
    return by_score.indices.gather(1, last.indices)
