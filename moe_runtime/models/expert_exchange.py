"""One layer's tokens through the experts of all ranks, at once or as two overlapping halves.

    at once     dispatch | experts | combine
    in halves   A: send  recv         experts  send                        recv
                B:             send                  recv  experts  send         recv
                               B's rows travel while A's are computed, A's results while B's are

Halves let the wire and the processor work at the same time, but the experts' weights are read once
for each: they pay where a pass has many tokens. Every rank has to take part in both halves, and
none knows how many tokens another one has. So a rank with more than `microbatch_tokens` says in its
first message that a second half follows, and all ranks, which hold that message, make the same
calls. The bits are the same either way: a token's result depends on that token alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class ExpertRowsLike(Protocol):
    """Rows that arrived for this rank's experts (`dispatch.ExpertRows`)."""

    @property
    def rows(self) -> torch.Tensor:
        """[R, H], grouped by expert."""
        ...

    @property
    def counts(self) -> tuple[int, ...]:
        """Rows of each expert of this rank."""
        ...

    @property
    def experts(self) -> tuple[int, ...]:
        """Logical ids, as `counts`."""
        ...

    @property
    def more(self) -> bool:
        """Whether any rank has another microbatch in this layer."""
        ...


class ExpertDispatcher(Protocol):
    """What a forward step needs of `dispatch`: any of its dispatchers."""

    def dispatch(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, *, layer: int
    ) -> tuple[Any, Any]:
        """Send rows to their experts; returns this rank's `ExpertRows` and a handle."""
        ...

    def combine(self, expert_out: torch.Tensor, handle: Any) -> torch.Tensor:
        """Bring the results back and add them up: [T, H]."""
        ...

    def dispatch_send(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        layer: int,
        microbatch: int = 0,
        more: bool = False,
    ) -> Any:
        """The first half of `dispatch`."""
        ...

    def dispatch_recv(self, outgoing: Any) -> tuple[Any, Any]:
        """The second half of `dispatch`."""
        ...

    def combine_send(self, expert_out: torch.Tensor, handle: Any) -> Any:
        """The first half of `combine`."""
        ...

    def combine_recv(self, returning: Any) -> torch.Tensor:
        """The second half of `combine`."""
        ...


Experts = Callable[[ExpertRowsLike], torch.Tensor]  # rows -> [R, H]


def through_experts(
    dispatcher: ExpertDispatcher,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    layer: int,
    experts: Experts,
    microbatch_tokens: int | None = None,
) -> torch.Tensor:
    """Return the weighted sums of the experts' results.

    Args:
        dispatcher: In a pass; with room for two microbatches if there may be two.
        x: [T, H], T = 0 is legal.
        topk_ids: [T, K] int64.
        topk_weights: [T, K] fp32.
        layer: Ordinal among the layers with experts.
        experts: Computes the rows of this rank's experts.
        microbatch_tokens: Most tokens that are sent at once; None: all. The same on every rank.

    Returns:
        [T, H].

    Raises:
        DispatchError: Whatever the dispatcher raises.
    """
    tokens = (x, topk_ids, topk_weights)
    if microbatch_tokens is None:
        arrived, handle = dispatcher.dispatch(*tokens, layer=layer)
        return dispatcher.combine(experts(arrived), handle)
    num_tokens = x.shape[0]
    cut = num_tokens if num_tokens <= microbatch_tokens else -(-num_tokens // 2)
    first, second = zip(*((part[:cut], part[cut:]) for part in tokens), strict=True)
    sent = dispatcher.dispatch_send(*first, layer=layer, more=cut < num_tokens)
    arrived, handle = dispatcher.dispatch_recv(sent)
    if not arrived.more:
        return dispatcher.combine(experts(arrived), handle)
    sent = dispatcher.dispatch_send(*second, layer=layer, microbatch=1)
    returning = dispatcher.combine_send(experts(arrived), handle)
    arrived, handle = dispatcher.dispatch_recv(sent)
    last = dispatcher.combine_send(experts(arrived), handle)
    return torch.cat((dispatcher.combine_recv(returning), dispatcher.combine_recv(last)))
