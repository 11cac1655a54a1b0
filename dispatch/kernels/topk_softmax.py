"""Choose experts as GPT-OSS does: the k largest logits, then softmax over those alone.

Legend: T tokens, E experts, K choices of a token.

    router_logits    0   ln 2   ln 4   ln 2
    K = 2            topk_ids 2 1                 experts 1 and 3 are equal: the lower id
                     topk_weights 2/3 1/3         e^(ln 4) : e^(ln 2)

The same numbers as a renormalised `softmax_topk`, but for rounding. A NaN among a token's logits,
chosen or not, makes all its weights NaN; so does a chosen +inf. Ids are always K different experts.
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

TILE = 1024  # logits of one program


@jit
def _topk_softmax_kernel(
    logits_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    num_tokens: tl.tensor,
    num_experts: tl.tensor,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LOWEST: tl.constexpr,
) -> None:
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.arange(0, BLOCK_E)[None, :]
    choice = tl.arange(0, BLOCK_K)[None, :]
    in_tokens = (token < num_tokens)[:, None]
    row = token.to(tl.int64)[:, None]
    in_row = in_tokens & (expert < num_experts)
    logits = tl.load(logits_ptr + row * num_experts + expert, mask=in_row, other=0.0)
    logits = logits.to(tl.float32)
    key = tl.where(expert < num_experts, order_key(logits), LOWEST)
    ids, chosen = best_of(key, logits, K, BLOCK_T, BLOCK_E, BLOCK_K, LOWEST)

    chosen = tl.where(choice < K, chosen, float("-inf"))
    exponentials = tl.exp(chosen - tl.max(chosen, 1)[:, None])
    weights = exponentials / tl.sum(exponentials, 1)[:, None]
    num_absent = tl.sum((logits != logits).to(tl.int32), 1)[:, None]
    weights = tl.where(num_absent > 0, float("nan"), weights)
    in_choices = in_tokens & (choice < K)
    tl.store(ids_ptr + row * K + choice, ids, mask=in_choices)
    tl.store(weights_ptr + row * K + choice, weights, mask=in_choices)


def topk_softmax(
    router_logits: torch.Tensor, topk: int, *, id_dtype: torch.dtype = torch.int64
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose each token's experts and their weights.

    Args:
        router_logits: [T, E] bf16, fp16 or fp32, contiguous, with the router's bias if it has one.
        topk: K, 1..E.
        id_dtype: int64 or int32.

    Returns:
        topk_ids [T, K], best first, and topk_weights [T, K] fp32, which add up to 1.

    Raises:
        InputInvalid: A shape, type or number is not as stated; nothing was started.
        KernelsUnavailable: No kernels for this device.
    """
    check_choice(router_logits, topk, id_dtype)
    num_tokens, num_experts = router_logits.shape
    if not runs_kernel(router_logits.device):
        return topk_softmax_torch(router_logits, topk, id_dtype=id_dtype)
    ids, weights = new_choice(router_logits, topk, id_dtype)
    block_e = power_of_two(num_experts)
    block_t = max(1, TILE // block_e)
    launch(
        _topk_softmax_kernel,
        (cdiv(num_tokens, block_t),),
        router_logits,
        ids,
        weights,
        num_tokens,
        num_experts,
        device=router_logits.device,
        K=topk,
        BLOCK_T=block_t,
        BLOCK_E=block_e,
        BLOCK_K=power_of_two(topk),
        LOWEST=LOWEST,
    )
    return ids, weights


def topk_softmax_torch(
    router_logits: torch.Tensor, topk: int, *, id_dtype: torch.dtype = torch.int64
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `topk_softmax`."""
    logits = router_logits.to(torch.float32)
    ids = best_first_torch(logits)[:, :topk]
    weights = torch.softmax(logits.gather(1, ids), dim=1)
    absent = logits.isnan().any(1, keepdim=True)
    return ids.to(id_dtype), torch.where(absent, torch.nan, weights)
