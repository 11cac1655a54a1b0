"""Choose experts as Qwen, Mixtral and OLMoE do: softmax over all of them, then the k largest.

Legend: T tokens, E experts, K choices of a token.

    router_logits    0   ln 2   ln 4   ln 2       softmax: 1/9 2/9 4/9 2/9
    K = 2            topk_ids 2 1                 expert 1 and 3 are equal: the lower id
    renormalise      topk_weights 2/3 1/3         without: 4/9 2/9

Chosen by logit (`expert_order`): experts that only rounding makes equally probable keep their
order, and the choice rests on bits alone. A NaN or +inf among a token's logits makes all its
weights NaN, as the softmax says; its ids are still K different experts.
"""

from __future__ import annotations

import torch

from dispatch.kernels.expert_order import (
    LOWEST,
    best_first_torch,
    best_of,
    check_choice,
    new_choice,
    order_key,
)
from dispatch.kernels.language import cdiv, jit, launch, power_of_two, tl
from dispatch.kernels.operands import runs_kernel

TILE = 2048  # logits of one program


@jit
def _softmax_topk_kernel(
    logits_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    num_tokens: tl.tensor,
    num_experts: tl.tensor,
    K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LOWEST: tl.constexpr,
) -> None:
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.arange(0, BLOCK_E)[None, :]
    in_tokens = (token < num_tokens)[:, None]
    in_row = in_tokens & (expert < num_experts)
    row = token.to(tl.int64)[:, None]
    # Rows past the end read zeros, so that no lane computes inf - inf.
    outside = tl.where(in_tokens, float("-inf"), 0.0)
    logits = tl.load(logits_ptr + row * num_experts + expert, mask=in_row).to(tl.float32)
    logits = tl.where(in_row, logits, outside)
    left = tl.where(expert < num_experts, order_key(logits), LOWEST)
    peak = tl.max(logits, 1)[:, None]
    exponentials = tl.exp(logits - peak)
    total = tl.sum(exponentials, 1)[:, None]

    ids, weights = best_of(left, exponentials, K, BLOCK_T, BLOCK_E, BLOCK_K, LOWEST)
    weights = weights / total
    if RENORMALISE:
        weights = weights / tl.sum(weights, 1)[:, None]
    choice = tl.arange(0, BLOCK_K)[None, :]
    in_choices = in_tokens & (choice < K)
    tl.store(ids_ptr + row * K + choice, ids, mask=in_choices)
    tl.store(weights_ptr + row * K + choice, weights, mask=in_choices)


def softmax_topk(
    router_logits: torch.Tensor,
    topk: int,
    *,
    renormalise: bool = True,
    id_dtype: torch.dtype = torch.int64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose each token's experts and their weights.

    Args:
        router_logits: [T, E] bf16, fp16 or fp32, contiguous.
        topk: K, 1..E.
        renormalise: Whether the chosen weights are scaled to sum 1.
        id_dtype: int64 or int32.

    Returns:
        topk_ids [T, K], best first, and topk_weights [T, K] fp32.

    Raises:
        InputInvalid: A shape, type or number is not as stated; nothing was started.
        KernelsUnavailable: No kernels for this device.
    """
    check_choice(router_logits, topk, id_dtype)
    num_tokens, num_experts = router_logits.shape
    if not runs_kernel(router_logits.device):
        return softmax_topk_torch(router_logits, topk, renormalise=renormalise, id_dtype=id_dtype)
    ids, weights = new_choice(router_logits, topk, id_dtype)
    block_e = power_of_two(num_experts)
    block_t = max(1, TILE // block_e // 2)
    launch(
        _softmax_topk_kernel,
        (cdiv(num_tokens, block_t),),
        router_logits,
        ids,
        weights,
        num_tokens,
        num_experts,
        device=router_logits.device,
        K=topk,
        RENORMALISE=renormalise,
        BLOCK_T=block_t,
        BLOCK_E=block_e,
        BLOCK_K=power_of_two(topk),
        LOWEST=LOWEST,
    )
    return ids, weights


def softmax_topk_torch(
    router_logits: torch.Tensor,
    topk: int,
    *,
    renormalise: bool = True,
    id_dtype: torch.dtype = torch.int64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `softmax_topk`."""
    logits = router_logits.to(torch.float32)
    ids = best_first_torch(logits)[:, :topk]
    weights = torch.softmax(logits, dim=1).gather(1, ids)
    if renormalise:
        weights = weights / weights.sum(1, keepdim=True)
    return ids.to(id_dtype), weights
