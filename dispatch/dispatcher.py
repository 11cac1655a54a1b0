"""What a model sees of dispatch, whichever way the rows travel."""

from __future__ import annotations

from typing import Protocol

import torch

from dispatch.handle import DispatchHandle, ExpertRows
from dispatch.statistics import DispatchStatistics


class Dispatcher(Protocol):
    """Sends tokens to their experts and brings the results back.

    A pass is one forward step of the whole group. In it every rank makes the same sequence of
    `dispatch` and `combine` calls, a rank without tokens with T = 0. Not thread-safe.
    """

    def begin_pass(self) -> None:
        """Start a pass.

        Raises:
            CallOrder: A pass is in progress, or the dispatcher is not ready.
        """
        ...

    def dispatch(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, *, layer: int
    ) -> tuple[ExpertRows, DispatchHandle]:
        """Send each token's row to the ranks of its experts; receive the rows for own experts.

        Args:
            x: [T, H] of the layout's type, contiguous, T <= `max_tokens`, 0 is legal.
            topk_ids: [T, K] int64, contiguous; -1 masks a choice. An expert chosen twice by a
                token counts twice.
            topk_weights: [T, K] fp32, contiguous; unchanged until the combine. The weight of a
                masked choice is ignored.
            layer: Counted over the layers with experts.

        Returns:
            The rows for this rank's experts, and the handle for `combine`.

        Raises:
            InputInvalid, CapacityExceeded, ExpertUnowned, CallOrder: Nothing was sent, and the
                state is as before.
            MessageMismatch: Another rank runs something else.
            PassFailed: A member was lost or stayed silent.
        """
        ...

    def combine(self, expert_out: torch.Tensor, handle: DispatchHandle) -> torch.Tensor:
        """Return every token's weighted sum over its experts' results.

        The sum runs in fp32 in the order of the choices and is cast once, so its bits do not
        depend on the placement, the number of ranks or the other tokens.

        Args:
            expert_out: [R, H], contiguous, row i belongs to row i of the `ExpertRows`; bf16, fp16
                or fp32, the same on every rank.
            handle: Of the dispatch just before.

        Returns:
            [T, H] of the layout's type; zeros for a token without choices.

        Raises:
            InputInvalid, StaleEpoch: Nothing was sent, and the state is as before.
            MessageMismatch: Another rank runs something else.
            PassFailed: A member was lost or stayed silent.
        """
        ...

    def end_pass(self) -> None:
        """Finish the pass.

        Raises:
            CallOrder: A dispatch still waits for its combine.
        """
        ...

    def statistics(self) -> DispatchStatistics:
        """Return a snapshot of the counters. Any thread may ask."""
        ...
