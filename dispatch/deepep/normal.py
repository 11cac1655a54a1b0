"""DeepEP's normal mode: `get_dispatch_layout`, `dispatch`, `combine`."""

from __future__ import annotations

import torch

from dispatch.deepep.lanes import Lanes
from dispatch.deepep.rank_rows import (
    NormalHandle,
    Payload,
    lengthened,
    local_choices,
    payload_shape,
    rank_choices,
    rank_layout,
    read,
    width_of,
    written,
)
from dispatch.deepep.settings import Config, EventOverlap
from dispatch.errors import InputInvalid
from dispatch.validation import check_tensor

Received = tuple[
    Payload,
    torch.Tensor | None,
    torch.Tensor | None,
    list[int] | None,
    NormalHandle | None,
    EventOverlap,
]


class NormalMode:
    """The normal half of a `Buffer`.

    `config`, `previous_event`, `async_finish`, `allocate_on_comm_stream` and the numbers of tokens
    per rank, which follow from `is_token_in_rank`, are accepted and make no difference.
    """

    def __init__(self, lanes: Lanes, max_tokens: int) -> None:
        self._lanes = lanes
        self._max_tokens = max_tokens
        self.rank, self.group_size = lanes.carrier.rank, lanes.carrier.size

    def get_dispatch_layout(  # noqa: D417 - the others make no difference, see the class
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Count where tokens go. Sends nothing.

        Args:
            topk_idx: [T, K] int64, contiguous; -1 masks a choice.
            num_experts: E.

        Returns:
            num_tokens_per_rank [R] int32, None (there are no RDMA ranks), num_tokens_per_expert
            [E] int32, is_token_in_rank [T, R] bool, and an event.

        Raises:
            InputInvalid: An id is no expert, or the tensor is of another kind.
        """
        del previous_event, async_finish, allocate_on_comm_stream
        _check_ids(topk_idx, num_experts)
        chosen = topk_idx[topk_idx >= 0]
        per_expert = torch.bincount(chosen, minlength=num_experts).int()
        owner = torch.full((num_experts + 1,), self.group_size)  # the last is for -1
        for rank in range(self.group_size):
            experts = self._lanes.experts(num_experts, rank)
            owner[experts.start : experts.stop] = rank
        in_rank = torch.zeros(len(topk_idx), self.group_size + 1, dtype=torch.bool)
        in_rank.scatter_(1, owner[topk_idx], True)
        in_rank = in_rank[:, : self.group_size].contiguous()
        return in_rank.sum(0).int(), None, per_expert, in_rank, EventOverlap()

    def dispatch(  # noqa: D417 - the others make no difference, see the class
        self,
        x: Payload,
        handle: NormalHandle | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Received:
        """Send each token to the ranks of its experts, once to each.

        Args:
            x: [T, H] bf16, or ([T, H] float8_e4m3fn, [T, H / 128] fp32 scales).
            handle: Of an earlier dispatch of the same routing; then no layout and no choices.
            is_token_in_rank: [T, R] bool, of `get_dispatch_layout`.
            num_tokens_per_expert: [E]; its length says how many experts there are.
            topk_idx: [T, K] int64 or None.
            topk_weights: [T, K] fp32, with `topk_idx`.
            expert_alignment: The counts in the list are rounded up to a multiple of it.
            num_worst_tokens: Rows of the result, padded; the list of counts is empty then.

        Returns:
            recv_x, recv_topk_idx, recv_topk_weights, num_recv_tokens_per_expert_list, handle,
            event. With a handle given, all but the first and the last are None.

        Raises:
            InputInvalid, CapacityExceeded, CallOrder: Nothing was sent.
            PassFailed: A rank was lost or stayed silent.
        """
        num_tokens, hidden, fp8 = payload_shape(x)
        if handle is not None:
            _check_reuse(handle, hidden, topk_idx)
            check_routing(handle.is_token_in_rank, num_tokens, self.group_size)
            payload, _, _ = self._exchanged(x, handle, None, None, fp8, num_worst_tokens)
            return payload, None, None, None, None, EventOverlap()
        routing, num_experts = _given_layout(is_token_in_rank, num_tokens_per_expert)
        check_routing(routing, num_tokens, self.group_size)
        topk = _check_choices(topk_idx, topk_weights, num_tokens, num_experts)
        handle = NormalHandle(routing, hidden, topk)
        payload, ids, weights = self._exchanged(
            x, handle, topk_idx, topk_weights, fp8, num_worst_tokens
        )
        experts = self._lanes.experts(num_experts, self.rank)
        local, weights, counts = local_choices(ids, weights, experts)
        aligned = [-(-count // expert_alignment) * expert_alignment for count in counts]
        listed = [] if num_worst_tokens else aligned
        if topk_idx is None:
            return payload, None, None, listed, handle, EventOverlap()
        local = lengthened(local, handle.num_rows, -1)
        weights = lengthened(weights, handle.num_rows)
        return payload, local, weights, listed, handle, EventOverlap()

    def _exchanged(
        self,
        x: Payload,
        handle: NormalHandle,
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        fp8: bool,
        num_worst_tokens: int,
    ) -> tuple[Payload, torch.Tensor, torch.Tensor]:
        """Send rows by the handle's routing, return what arrived, and open the handle."""
        hidden, topk = handle.hidden, handle.topk if topk_idx is not None else 0
        width = width_of(hidden, handle.topk)
        arrived = self._send(written(x, topk_idx, topk_weights, width), handle)
        if num_worst_tokens and len(arrived) > num_worst_tokens:
            raise InputInvalid(
                name="num_worst_tokens",
                observed=str(num_worst_tokens),
                expected=f">= {len(arrived)}",
            )
        handle.num_received, handle.num_rows = len(arrived), num_worst_tokens or len(arrived)
        payload, ids, weights = read(arrived, hidden, topk, fp8=fp8)
        if isinstance(payload, tuple):
            rows, scales = (lengthened(part, handle.num_rows) for part in payload)
            return (rows, scales), ids, weights
        return lengthened(payload, handle.num_rows), ids, weights

    def _send(self, rows: torch.Tensor, handle: NormalHandle) -> torch.Tensor:
        lane = self._lanes.of(rank_layout(self.group_size, rows, self._max_tokens))
        ids, ones = rank_choices(handle.is_token_in_rank)
        outgoing = lane.dispatcher.dispatch_send(rows, ids, ones, layer=0, microbatch=lane.turn)
        lane.advance()
        arrived, opened = lane.dispatcher.dispatch_recv(outgoing)
        handle.opened(lane.dispatcher, opened)
        return arrived.rows

    def combine(  # noqa: D417 - the others make no difference, see the class
        self,
        x: torch.Tensor,
        handle: NormalHandle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Sum, without weights, the rows that the ranks return for each token.

        Args:
            x: [n, H] bf16, in the order of `recv_x`.
            handle: Of the dispatch; each dispatch has one combine.
            topk_weights: [n, K] fp32; gathered alike, in an exchange of their own.
            bias: One or two [T, H] bf16, added once, in fp32, to the sum, itself rounded to bf16.

        Returns:
            combined_x [T, H] bf16, combined_topk_weights [T, K] fp32 or None, and an event.

        Raises:
            InputInvalid, CallOrder: Nothing was sent.
            PassFailed: A rank was lost or stayed silent.
        """
        del config, previous_event, async_finish, allocate_on_comm_stream
        hidden, num_tokens = handle.hidden, len(handle.is_token_in_rank)
        check_tensor("x", x, (handle.num_rows, hidden), torch.bfloat16)
        if topk_weights is not None:
            shape = (handle.num_rows, handle.topk)
            check_tensor("topk_weights", topk_weights, shape, torch.float32)
        biases = (bias,) if isinstance(bias, torch.Tensor) else bias or ()
        for each in biases:
            check_tensor("bias", each, (num_tokens, hidden), torch.bfloat16)
        received = handle.num_received
        total = self._summed(x[:received], handle, width_of(hidden, handle.topk))
        for each in biases:
            total = total.float() + each
        weights = None
        if topk_weights is not None:
            weights = self._gathered(topk_weights[:received], handle)
        return total.to(torch.bfloat16), weights, EventOverlap()

    def _summed(self, x: torch.Tensor, handle: NormalHandle, width: int) -> torch.Tensor:
        dispatcher, opened = handle.take()
        rows = torch.zeros(len(x), width, dtype=x.dtype)
        rows[:, : x.shape[1]] = x
        return dispatcher.combine(rows, opened)[:, : x.shape[1]].contiguous()

    def _gathered(self, weights: torch.Tensor, handle: NormalHandle) -> torch.Tensor:
        """Return the sums of weights: rows of fp32, in an exchange with the same routing."""
        num_tokens = len(handle.is_token_in_rank)
        if not handle.topk:
            return torch.zeros(num_tokens, 0)
        self._send(torch.zeros(num_tokens, handle.topk), handle)
        return self._summed(weights, handle, handle.topk)


def check_routing(is_token_in_rank: torch.Tensor, num_tokens: int, num_ranks: int) -> None:
    """Accept where tokens go: [T, R] bool.

    Raises:
        InputInvalid: It is something else.
    """
    check_tensor("is_token_in_rank", is_token_in_rank, (num_tokens, num_ranks), torch.bool)


def _given_layout(
    is_token_in_rank: torch.Tensor | None, num_tokens_per_expert: torch.Tensor | None
) -> tuple[torch.Tensor, int]:
    """Accept both parts of a layout; return where tokens go, and E."""
    if is_token_in_rank is None or num_tokens_per_expert is None:
        raise InputInvalid(
            name="is_token_in_rank, num_tokens_per_expert",
            observed="None",
            expected="those of get_dispatch_layout, or a handle",
        )
    return is_token_in_rank, len(num_tokens_per_expert)


def _check_reuse(handle: NormalHandle, hidden: int, topk_idx: torch.Tensor | None) -> None:
    """Accept a further dispatch with the handle: rows of its size, and no choices."""
    if topk_idx is not None or handle.hidden != hidden:
        raise InputInvalid(
            name="dispatch with a handle",
            observed=f"topk_idx {'None' if topk_idx is None else 'given'}, H {hidden}",
            expected=f"None, H {handle.hidden}",
        )


def _check_ids(topk_idx: torch.Tensor, num_experts: int) -> None:
    if topk_idx.ndim != 2:
        raise InputInvalid(
            name="shape of topk_idx", observed=str(list(topk_idx.shape)), expected="[T, K]"
        )
    check_tensor("topk_idx", topk_idx, tuple(topk_idx.shape), torch.int64)
    if topk_idx.numel():
        low, high = (int(value) for value in topk_idx.aminmax())
        if low < -1 or high >= num_experts:
            raise InputInvalid(
                name="an id in topk_idx",
                observed=str(low if low < -1 else high),
                expected=f"-1..{num_experts - 1}",
            )


def _check_choices(
    topk_idx: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    num_tokens: int,
    num_experts: int,
) -> int:
    """Accept choices with weights, or neither; return K."""
    if topk_idx is None or topk_weights is None:
        if topk_idx is topk_weights:
            return 0
        raise InputInvalid(
            name="topk_idx, topk_weights", observed="one of them", expected="both or neither"
        )
    _check_ids(topk_idx, num_experts)
    shape = (num_tokens, topk_idx.shape[1])
    check_tensor("topk_idx", topk_idx, shape, torch.int64)
    check_tensor("topk_weights", topk_weights, shape, torch.float32)
    return topk_idx.shape[1]
