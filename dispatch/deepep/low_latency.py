"""DeepEP's low-latency mode: `low_latency_dispatch`, `low_latency_combine`, and what is around."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dispatch.deepep.fp8_rows import check_fp8_width
from dispatch.deepep.lanes import Lanes
from dispatch.deepep.rank_rows import Payload
from dispatch.deepep.settings import EventOverlap
from dispatch.deepep.slabs import (
    LowLatencyHandle,
    PendingSum,
    SlabCast,
    SlabExchange,
    slab_layout,
)
from dispatch.errors import InputInvalid, Unsupported
from dispatch.validation import check_tensor

Hook = Callable[[], None]
NO_MASK = "a new view: a rank that is lost ends the pass by PassFailed, which names it"


def refuse(wanted: object, what: str, instead: str) -> None:
    """Raise `Unsupported` if something was asked for."""
    if wanted:
        raise Unsupported(what=what, instead=instead)


class LowLatencyMode:
    """The low-latency half of a `Buffer`."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Payload, torch.Tensor, LowLatencyHandle, EventOverlap, Hook | None]:
        """Send each token to each of its experts.

        Args:
            x: [T, H] bf16, contiguous.
            topk_idx: [T, K] int64; -1 masks a choice. Unchanged until the combine.
            num_max_dispatch_tokens_per_rank: M >= T, the same on all ranks.
            num_experts: E, the same on all ranks.
            cumulative_local_expert_recv_stats: [E_l] int32, the counts are added to it.
            dispatch_wait_recv_cost_stats: Must be None.
            use_fp8: Return rows in float8_e4m3fn and their scales instead of bf16.
            round_scale: Scales are powers of two.
            use_ue8m0: With `round_scale`: four exponents in an int32 instead of fp32 scales.
            async_finish: Not with a hook. The event has happened when this returns.
            return_recv_hook: Return when everything is sent; the hook receives.

        Returns:
            recv_x (with fp8: and scales), recv_count, handle, event, hook (None if not asked
            for), in the shapes of `dispatch.deepep.slabs`; filled when the hook is called.

        Raises:
            InputInvalid, CapacityExceeded, Unsupported: Nothing was sent.
            CallOrder: Two exchanges of these sizes are in flight; nothing was sent.
            PassFailed: A rank was lost or stayed silent.
        """
        refuse(dispatch_wait_recv_cost_stats is not None, "the time waited for each rank", _WAITED)
        refuse(async_finish and return_recv_hook, "async_finish with a hook", "one of them")
        refuse(use_ue8m0 and not round_scale, "use_ue8m0 without round_scale", "both")
        hidden = _check_rows(x, topk_idx, fp8=use_fp8, packed=use_ue8m0)
        most, stats = num_max_dispatch_tokens_per_rank, cumulative_local_expert_recv_stats
        exchange = self._sent(x, topk_idx, most, num_experts, stats)
        cast = SlabCast(exchange, round_scale=round_scale, packed=use_ue8m0) if use_fp8 else None

        def receive() -> None:
            if exchange.receive():
                if cast is not None:
                    cast.fill()
                if stats is not None:
                    stats.add_(exchange.recv_count)

        if not return_recv_hook:
            receive()
        tables = (exchange.src_info, exchange.layout_range)
        handle = LowLatencyHandle(*tables, most, hidden, num_experts, exchange)
        found: Payload = exchange.recv_x if cast is None else (cast.rows, cast.scales)
        hook = receive if return_recv_hook else None
        return found, exchange.recv_count, handle, EventOverlap(), hook

    def _sent(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        max_tokens: int,
        num_experts: int,
        stats: torch.Tensor | None,
    ) -> SlabExchange:
        carrier = self._lanes.carrier
        num_local = len(self._lanes.experts(num_experts, carrier.rank))
        if stats is not None:
            check_tensor("recv stats", stats, (num_local,), torch.int32)
        lane = self._lanes.of(slab_layout(max_tokens, x.shape[1], topk_idx.shape[1], num_experts))
        exchange = SlabExchange(
            lane.dispatcher,
            x,
            topk_idx,
            size=carrier.size,
            num_local=num_local,
            microbatch=lane.turn,
            max_tokens=max_tokens,
        )
        lane.advance()
        return exchange

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: LowLatencyHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, Hook | None]:
        """Return every token's weighted sum over its experts' results, in fp32, in top-k order.

        Args:
            x: [E_l, M * R, H] bf16, rows where `low_latency_dispatch` put them.
            topk_idx: [T, K] int64, that of the dispatch.
            topk_weights: [T, K] fp32.
            handle: Of the dispatch; good for one combine.
            use_logfmt: Must be false.
            zero_copy: Makes no difference.
            async_finish: Not with a hook.
            return_recv_hook: Return when everything is sent; the hook receives.
            out: [T, H] bf16 to write to.
            combine_wait_recv_cost_stats: Must be None.

        Returns:
            combined_x [T, H] bf16, event, hook.

        Raises:
            InputInvalid, StaleEpoch, CallOrder, Unsupported: Nothing was sent.
            PassFailed: A rank was lost or stayed silent.
        """
        del zero_copy
        refuse(use_logfmt, "logfmt rows", "bf16")
        refuse(combine_wait_recv_cost_stats is not None, "the time waited for each rank", _WAITED)
        refuse(async_finish and return_recv_hook, "async_finish with a hook", "one of them")
        shape = (len(topk_idx), handle.hidden)
        if out is None:
            out = torch.empty(shape, dtype=torch.bfloat16)
        check_tensor("out", out, shape, torch.bfloat16)
        pending: PendingSum = handle.exchange.send(x, topk_idx, topk_weights)
        target = out

        def receive() -> None:
            pending.receive(target)

        if return_recv_hook:
            return out, EventOverlap(), receive
        receive()
        return out, EventOverlap(), None

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> torch.Tensor:
        """Return [E_l, M * R, H] bf16 for the experts' results, uninitialised."""
        return torch.empty_like(handle.exchange.recv_x)

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Return: nothing has to be cleaned, messages carry what they are."""

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Raise `Unsupported`: what one rank observes must not become membership."""
        raise Unsupported(what=f"masking rank {rank_to_mask}", instead=NO_MASK)

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Write zeros: nobody is masked.

        Args:
            mask_status: [R] int32.
        """
        check_tensor("mask_status", mask_status, (self._lanes.carrier.size,), torch.int32)
        mask_status.zero_()

    def low_latency_clean_mask_buffer(self) -> None:
        """Return: nobody is masked."""


def _check_rows(x: torch.Tensor, topk_idx: torch.Tensor, *, fp8: bool, packed: bool) -> int:
    """Accept [T, H] bf16 and [T, K]; return H."""
    if x.ndim != 2 or topk_idx.ndim != 2:
        shapes = f"{list(x.shape)}, {list(topk_idx.shape)}"
        raise InputInvalid(
            name="shapes of x and topk_idx", observed=shapes, expected="[T, H], [T, K]"
        )
    check_tensor("x", x, tuple(x.shape), torch.bfloat16)
    if fp8:
        check_fp8_width(x.shape[1], packed=packed)
    return x.shape[1]


_WAITED = "`waited_s` of the dispatcher's statistics"
