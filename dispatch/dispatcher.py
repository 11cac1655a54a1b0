"""What a model sees of dispatch, whichever way the rows travel."""

from __future__ import annotations

from typing import Protocol

import torch

from dispatch.handle import DispatchHandle, ExpertRows, Outgoing, Returning
from dispatch.statistics import DispatchStatistics


class Dispatcher(Protocol):
    """Sends tokens to their experts and brings the results back.

    A pass is one forward step of the whole group. In it every rank makes the same sequence of
    calls for each microbatch, a rank without tokens with T = 0. Not thread-safe.

    `dispatch` and `combine` are made of halves. What is computed between a send and its receive
    overlaps with the messages' way and with the other ranks:

        A: dispatch_send | shared experts | dispatch_recv | experts | combine_send | ... | recv

    With `layout.microbatches` of 2 two exchanges may be in flight, each under its own number and
    in windows of its own: A's messages travel while B computes.

        A: dispatch_send              dispatch_recv experts combine_send               combine_recv
        B:               dispatch_send                                   dispatch_recv experts ...

    A rank need not know beforehand how many microbatches another one needs: what it sends first
    says whether more will follow (`more`), so ranks with few tokens pay for one only.

    The halves of different microbatches may be called in any order, so long as no rank waits for
    what another sends only after waiting itself: sends before receives, or the same order
    everywhere.
    """

    def begin_pass(self) -> None:
        """Start a pass.

        Raises:
            CallOrder: A pass is in progress, or the dispatcher is not ready.
        """
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
    ) -> Outgoing:
        """Send each token's row to the ranks of its experts.

        Args:
            x: [T, H] of the layout's type, contiguous, T <= `max_tokens`, 0 is legal; unchanged
                until `dispatch_recv` has returned.
            topk_ids: [T, K] int64, contiguous; -1 masks a choice. An expert chosen twice by a
                token counts twice.
            topk_weights: [T, K] fp32, contiguous; unchanged until the combine. The weight of a
                masked choice is ignored.
            layer: Counted over the layers with experts.
            microbatch: Below `layout.microbatches`; must not have another exchange in flight.
            more: Tell all ranks that this one has another microbatch in this layer: the
                `ExpertRows` of every rank say so, and all can take part in it.

        Returns:
            What `dispatch_recv` has to be given.

        Raises:
            InputInvalid, CapacityExceeded, ExpertUnowned, CallOrder: Nothing was sent, and the
                state is as before.
            PassFailed: A member was lost.
        """
        ...

    def dispatch_recv(
        self, outgoing: Outgoing, *, timeout_s: float | None = None
    ) -> tuple[ExpertRows, DispatchHandle]:
        """Receive the rows for own experts.

        Args:
            outgoing: Of the `dispatch_send`.
            timeout_s: Longest time that this call may wait, whatever arrives meanwhile; default:
                as long as messages keep arriving.

        Returns:
            The rows for this rank's experts, and the handle for the combine.

        Raises:
            StaleEpoch: `outgoing` is of another epoch, or was received. The state is as before.
            MessageMismatch: Another rank runs something else.
            PassFailed: A member was lost or stayed silent; names it.
        """
        ...

    def combine_send(self, expert_out: torch.Tensor, handle: DispatchHandle) -> Returning:
        """Send the experts' results back to the tokens' ranks.

        Args:
            expert_out: [R, H], contiguous, row i belongs to row i of the `ExpertRows`; bf16, fp16
                or fp32, the same on every rank; unchanged until `combine_recv` has returned.
            handle: Of the `dispatch_recv` of this microbatch.

        Returns:
            What `combine_recv` has to be given.

        Raises:
            InputInvalid, StaleEpoch: Nothing was sent, and the state is as before.
            PassFailed: A member was lost.
        """
        ...

    def combine_recv(self, returning: Returning, *, timeout_s: float | None = None) -> torch.Tensor:
        """Return every token's weighted sum over its experts' results.

        The sum runs in fp32 in the order of the choices and is cast once, so its bits do not
        depend on the placement, the number of ranks or the other tokens.

        Args:
            returning: Of the `combine_send`.
            timeout_s: As of `dispatch_recv`.

        Returns:
            [T, H] of the layout's type; zeros for a token without choices.

        Raises:
            StaleEpoch, MessageMismatch, PassFailed: As of `dispatch_recv`.
        """
        ...

    def dispatch(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        layer: int,
        microbatch: int = 0,
        timeout_s: float | None = None,
    ) -> tuple[ExpertRows, DispatchHandle]:
        """Send and receive: `dispatch_send`, then `dispatch_recv`."""
        outgoing = self.dispatch_send(x, topk_ids, topk_weights, layer=layer, microbatch=microbatch)
        return self.dispatch_recv(outgoing, timeout_s=timeout_s)

    def combine(
        self, expert_out: torch.Tensor, handle: DispatchHandle, *, timeout_s: float | None = None
    ) -> torch.Tensor:
        """Send and receive: `combine_send`, then `combine_recv`."""
        return self.combine_recv(self.combine_send(expert_out, handle), timeout_s=timeout_s)

    def end_pass(self) -> None:
        """Finish the pass.

        Raises:
            CallOrder: A dispatch still waits for its combine.
        """
        ...

    def statistics(self) -> DispatchStatistics:
        """Return a snapshot of the counters. Any thread may ask."""
        ...
