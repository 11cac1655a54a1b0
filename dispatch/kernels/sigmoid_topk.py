"""Choose experts as DeepSeek-V3 and GLM-4.5 do: by sigmoid plus a learned bias, group by group.

Legend: T tokens, E experts in G groups of E / G neighbours, K choices of a token.

    score         sigmoid(logit)
    preference    score + bias
    group         the sum of its two highest preferences
    choice        the K highest preferences in the best groups
    weight        score, without the bias; optionally scaled to sum 1; times `scale`

    4 experts, 2 groups, 1 of them taken, K = 1
    logits        ln 3    0     0     0          scores       .75   .5 |  .5   .5
    bias          0       0     .125  .25        preferences  .75   .5 | .625  .75
                                                 groups          1.25  |   1.375
    topk_ids 3    topk_weights 1  (.5 if not renormalised)

Preferences, and the sums of groups, are ordered as `expert_order` says. A NaN among a token's
logits makes all its weights NaN; its ids are still K different experts.
"""

from __future__ import annotations

import torch

from dispatch.errors import InputInvalid
from dispatch.kernels.expert_order import (
    LOWEST,
    best_first_torch,
    best_of,
    new_choice,
    order_key,
)
from dispatch.kernels.language import jit, launch, power_of_two, tl
from dispatch.kernels.operands import (
    FLOATS,
    IDS,
    check_member,
    check_operand,
    check_range,
    runs_kernel,
)

SUM_MIN = 1e-20  # added to the sum that weights are divided by: all scores may be 0


@jit
def _group_keys(
    preference: tl.tensor,
    key: tl.tensor,
    group_size: tl.tensor,
    GROUPS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_G: tl.constexpr,
    LOWEST: tl.constexpr,
) -> tl.tensor:
    """Return the order of the groups: [1, BLOCK_G] int32."""
    expert = tl.arange(0, BLOCK_E)[None, :]
    group = tl.arange(0, BLOCK_G)[None, :]
    sums = tl.zeros((1, BLOCK_G), tl.float32)
    for g in range(GROUPS):
        inside = tl.where(expert // group_size == g, key, LOWEST)
        _, two = best_of(inside, preference, 2, 1, BLOCK_E, 2, LOWEST)
        # Of a group of one, the second best is an expert that is not in it.
        second = tl.where((tl.arange(0, 2)[None, :] == 0) | (group_size > 1), two, 0.0)
        sums = tl.where(group == g, tl.sum(second, 1)[:, None], sums)
    return tl.where(group < GROUPS, order_key(sums), LOWEST)


@jit
def _sigmoid_topk_kernel(
    logits_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    num_experts: tl.tensor,
    group_size: tl.tensor,
    scale: tl.tensor,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RENORMALISE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_G: tl.constexpr,
    LOWEST: tl.constexpr,
    SUM_MIN: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK_E)[None, :]
    choice = tl.arange(0, BLOCK_K)[None, :]
    in_row = expert < num_experts
    logits = tl.load(logits_ptr + token * num_experts + expert, mask=in_row, other=0.0)
    logits = logits.to(tl.float32)
    score = 1.0 / (1.0 + tl.exp(-logits))
    preference = score
    if HAS_BIAS:
        preference += tl.load(bias_ptr + expert, mask=in_row, other=0.0)
    key = tl.where(in_row, order_key(preference), LOWEST)
    if GROUPS > TOPK_GROUPS:
        groups = _group_keys(preference, key, group_size, GROUPS, BLOCK_E, BLOCK_G, LOWEST)
        zeros = tl.zeros((1, BLOCK_G), tl.float32)
        taken, _ = best_of(groups, zeros, TOPK_GROUPS, 1, BLOCK_G, BLOCK_G, LOWEST)
        allowed = expert < 0
        for g in range(TOPK_GROUPS):
            of_group = tl.sum(tl.where(tl.arange(0, BLOCK_G)[None, :] == g, taken, 0), 1)[:, None]
            allowed = allowed | (expert // group_size == of_group)
        key = tl.where(allowed, key, LOWEST)
    ids, weights = best_of(key, score, K, 1, BLOCK_E, BLOCK_K, LOWEST)
    if RENORMALISE:
        weights = weights / (tl.sum(weights, 1)[:, None] + SUM_MIN)
    num_absent = tl.sum((logits != logits).to(tl.int32), 1)[:, None]
    weights = tl.where(num_absent > 0, float("nan"), weights * scale)
    tl.store(ids_ptr + token * K + choice, ids, mask=choice < K)
    tl.store(weights_ptr + token * K + choice, weights, mask=choice < K)


def sigmoid_topk(
    router_logits: torch.Tensor,
    topk: int,
    *,
    bias: torch.Tensor | None = None,
    num_groups: int = 1,
    topk_groups: int = 1,
    renormalise: bool = True,
    scale: float = 1.0,
    id_dtype: torch.dtype = torch.int64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose each token's experts and their weights.

    Args:
        router_logits: [T, E] bf16, fp16 or fp32, contiguous.
        topk: K, at most the experts of `topk_groups` groups.
        bias: [E] fp32, added for the choice only.
        num_groups: G, a divisor of E.
        topk_groups: Groups to choose from, 1..G.
        renormalise: Whether the chosen weights are scaled to sum 1.
        scale: What the weights are multiplied by at the end.
        id_dtype: int64 or int32.

    Returns:
        topk_ids [T, K], highest preference first, and topk_weights [T, K] fp32.

    Raises:
        InputInvalid: A shape, type or number is not as stated; nothing was started.
        KernelsUnavailable: No kernels for this device.
    """
    check_operand("router_logits", router_logits, (None, None), FLOATS)
    num_tokens, num_experts = router_logits.shape
    device = router_logits.device
    if bias is not None:
        check_operand("bias", bias, (num_experts,), (torch.float32,), device=device)
    _check_groups(num_experts, num_groups, topk_groups, topk)
    check_member("id_dtype", id_dtype, IDS)
    if not runs_kernel(device):
        return sigmoid_topk_torch(
            router_logits, topk, bias=bias, num_groups=num_groups, topk_groups=topk_groups,
            renormalise=renormalise, scale=scale, id_dtype=id_dtype,
        )  # fmt: skip
    ids, weights = new_choice(router_logits, topk, id_dtype)
    launch(
        _sigmoid_topk_kernel,
        (num_tokens,),
        router_logits,
        router_logits if bias is None else bias,
        ids,
        weights,
        num_experts,
        num_experts // num_groups,
        float(scale),
        device=device,
        K=topk,
        GROUPS=num_groups,
        TOPK_GROUPS=topk_groups,
        HAS_BIAS=bias is not None,
        RENORMALISE=renormalise,
        BLOCK_E=power_of_two(num_experts),
        BLOCK_K=power_of_two(topk),
        BLOCK_G=power_of_two(num_groups),
        LOWEST=LOWEST,
        SUM_MIN=SUM_MIN,
        num_warps=2,
    )
    return ids, weights


def _check_groups(num_experts: int, num_groups: int, topk_groups: int, topk: int) -> None:
    """Accept groups of one size, and no more choices than there are experts in `topk_groups`."""
    check_range("num_groups", num_groups, 1, num_experts)
    if num_experts % num_groups:
        raise InputInvalid(
            name="num_groups", observed=str(num_groups), expected=f"a divisor of {num_experts}"
        )
    check_range("topk_groups", topk_groups, 1, num_groups)
    check_range("topk", topk, 1, num_experts // num_groups * topk_groups)


def sigmoid_topk_torch(
    router_logits: torch.Tensor,
    topk: int,
    *,
    bias: torch.Tensor | None = None,
    num_groups: int = 1,
    topk_groups: int = 1,
    renormalise: bool = True,
    scale: float = 1.0,
    id_dtype: torch.dtype = torch.int64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `sigmoid_topk`."""
    logits = router_logits.to(torch.float32)
    num_tokens, num_experts = logits.shape
    scores = torch.sigmoid(logits)
    preferences = scores if bias is None else scores + bias
    order = best_first_torch(preferences)
    if topk_groups < num_groups:
        group_size = num_experts // num_groups
        grouped = preferences.view(num_tokens * num_groups, group_size)
        two = grouped.gather(1, best_first_torch(grouped)[:, :2]).sum(1)
        best = best_first_torch(two.view(num_tokens, num_groups))[:, :topk_groups]
        taken = torch.zeros(num_tokens, num_groups, dtype=torch.bool, device=logits.device)
        allowed = taken.scatter_(1, best, True).repeat_interleave(group_size, dim=1)
        # Stable: those of the groups that are taken first, each part in its order.
        others = (~allowed).gather(1, order).to(torch.int8)
        order = order.gather(1, others.sort(dim=1, stable=True).indices)
    ids = order[:, :topk]
    weights = scores.gather(1, ids)
    if renormalise:
        weights = weights / (weights.sum(1, keepdim=True) + SUM_MIN)
    absent = logits.isnan().any(1, keepdim=True)
    return ids.to(id_dtype), torch.where(absent, torch.nan, weights * scale)
