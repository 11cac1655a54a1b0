"""The low-latency shapes of DeepEP: one slab of fixed size for each local expert.

    E_l local experts   R ranks   M most tokens of a rank   H hidden

    recv_x        [E_l, M * R, H]    rows of an expert from the front; behind them anything
    recv_count    [E_l] int32        how many there are
    src_info      [E_l, M * R] int32    token of its source rank that each row is
    layout_range  [E_l, R] int64     begin << 32 | count: the rows of a source rank are together

A row travels with four more words that say which token it is. Experts are split as evenly as they
can be; E need not divide by R, only all slabs of one rank have the same size.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from dispatch.deepep.fp8_rows import GROUP, PACKED_GROUP, column_major, pack_exponents, to_fp8
from dispatch.dispatcher import Dispatcher
from dispatch.errors import CallOrder, InputInvalid
from dispatch.handle import DispatchHandle, ExpertRows, Outgoing
from dispatch.layout import DispatchLayout
from dispatch.validation import check_tensor

ORIGIN_WORDS = 4  # of bf16: the token as int32, and as much again, so that rows stay 8-aligned


class LowLatencyHandle(NamedTuple):
    """What `low_latency_combine` needs; the first five as in DeepEP.

    Attributes:
        src_info: See the module.
        layout_range: See the module.
        num_max_dispatch_tokens_per_rank: M.
        hidden: H.
        num_experts: E.
        exchange: For `low_latency_combine` only.
    """

    src_info: torch.Tensor
    layout_range: torch.Tensor
    num_max_dispatch_tokens_per_rank: int
    hidden: int
    num_experts: int
    exchange: SlabExchange


def slab_layout(max_tokens: int, hidden: int, topk: int, num_experts: int) -> DispatchLayout:
    """Return the sizes of an exchange in the low-latency shapes.

    Raises:
        InputInvalid: They are not possible.
    """
    return DispatchLayout(
        hidden=hidden + ORIGIN_WORDS,
        topk=topk,
        num_logical=num_experts,
        num_layers=1,
        dtype=torch.bfloat16,
        max_tokens=max_tokens,
        combine_dtype=torch.bfloat16,
        microbatches=2,
    )


class SlabExchange:
    """One dispatch and its combine. Made by `low_latency_dispatch`; holds its messages' memory.

    Args:
        dispatcher: In a pass, of `slab_layout`.
        size: Ranks of the group.
        num_local: Experts of this rank.
        x: [T, H] bf16.
        topk_idx: [T, K] int64.
        microbatch: Of the dispatcher.
        max_tokens: M.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        *,
        size: int,
        num_local: int,
        microbatch: int,
        max_tokens: int,
    ) -> None:
        num_tokens, self._hidden = x.shape
        self._dispatcher = dispatcher
        self._topk_idx = topk_idx
        slab = max_tokens * size
        self.recv_x = torch.empty(num_local, slab, self._hidden, dtype=torch.bfloat16)
        self.recv_count = torch.zeros(num_local, dtype=torch.int32)
        self.src_info = torch.zeros(num_local, slab, dtype=torch.int32)
        self.layout_range = torch.zeros(num_local, size, dtype=torch.int64)
        self._arrived: tuple[ExpertRows, DispatchHandle] | None = None
        origin = torch.zeros(num_tokens, ORIGIN_WORDS // 2, dtype=torch.int32)
        origin[:, 0] = torch.arange(num_tokens)
        # The weights are known only at the combine: until then there is room for them.
        weights = torch.zeros(topk_idx.shape, dtype=torch.float32)
        stamped = torch.cat([x, origin.view(torch.bfloat16)], 1)
        self._outgoing: Outgoing = dispatcher.dispatch_send(
            stamped, topk_idx, weights, layer=0, microbatch=microbatch
        )

    def receive(self) -> bool:
        """Fill `recv_x` and the tables; the second time do nothing and return False."""
        if self._arrived is not None:
            return False
        rows, handle = self._arrived = self._dispatcher.dispatch_recv(self._outgoing)
        hidden = self._hidden
        tokens = rows.rows[:, hidden : hidden + 2].contiguous().view(torch.int32).flatten()
        begin = 0
        for i, count in enumerate(rows.counts):
            self.recv_x[i, :count] = rows.rows[begin : begin + count, :hidden]
            self.src_info[i, :count] = tokens[begin : begin + count]
            begin += count
        self.recv_count.copy_(torch.tensor(rows.counts, dtype=torch.int32))
        self.layout_range.copy_(_ranges(rows.counts, handle))
        return True

    def send(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor
    ) -> PendingSum:
        """Send the results of the experts back.

        Args:
            x: [E_l, M * R, H] bf16, contiguous.
            topk_idx: Of the dispatch.
            topk_weights: [T, K] fp32.

        Raises:
            CallOrder: The rows were not received yet.
            InputInvalid, StaleEpoch: Nothing was sent.
        """
        if self._arrived is None:
            raise CallOrder(
                call="low_latency_combine", state="waiting for the hook of its dispatch"
            )
        check_tensor("x", x, tuple(self.recv_x.shape), torch.bfloat16)
        check_tensor("topk_weights", topk_weights, tuple(self._topk_idx.shape), torch.float32)
        if not torch.equal(topk_idx, self._topk_idx):
            raise InputInvalid(
                name="topk_idx", observed="another routing", expected="that of the dispatch"
            )
        rows, handle = self._arrived
        packed = torch.zeros(len(rows.rows), self._hidden + ORIGIN_WORDS, dtype=torch.bfloat16)
        begin = 0
        for i, count in enumerate(rows.counts):
            packed[begin : begin + count, : self._hidden] = x[i, :count]
            begin += count
        weights = handle.outgoing.weights
        weights.copy_(torch.where(topk_idx >= 0, topk_weights, 0.0))
        return PendingSum(self._dispatcher, packed, handle, self._hidden)


class SlabCast:
    """The fp8 form of a `SlabExchange`. The cast is done where the rows arrive: the same values.

    Attributes:
        rows: [E_l, M * R, H] float8_e4m3fn.
        scales: [E_l, M * R, H / 128] fp32, or [.., H / 512] int32 of packed exponents; the rows of
            a column are next to each other.
    """

    def __init__(self, exchange: SlabExchange, *, round_scale: bool, packed: bool) -> None:
        self._exchange, self._round_scale, self._packed = exchange, round_scale, packed
        num_local, slab, hidden = exchange.recv_x.shape
        self.rows = torch.empty(num_local, slab, hidden, dtype=torch.float8_e4m3fn)
        width = hidden // (PACKED_GROUP if packed else GROUP)
        kind = torch.int32 if packed else torch.float32
        self.scales = column_major(torch.empty(num_local, slab, width, dtype=kind))

    def fill(self) -> None:
        """Cast what arrived."""
        for i, count in enumerate(self._exchange.recv_count.tolist()):
            rows, scales = to_fp8(self._exchange.recv_x[i, :count], round_scale=self._round_scale)
            self.rows[i, :count] = rows
            self.scales[i, :count] = pack_exponents(scales) if self._packed else scales


class PendingSum:
    """A combine whose messages are on their way."""

    def __init__(
        self, dispatcher: Dispatcher, packed: torch.Tensor, handle: DispatchHandle, hidden: int
    ) -> None:
        self._dispatcher = dispatcher
        self._returning = dispatcher.combine_send(packed, handle)
        self._hidden = hidden
        self._done = False

    def receive(self, out: torch.Tensor) -> None:
        """Write the sums to `out`, [T, H] bf16; the second time does nothing."""
        if not self._done:
            self._done = True
            out.copy_(self._dispatcher.combine_recv(self._returning)[:, : self._hidden])


def _ranges(counts: tuple[int, ...], handle: DispatchHandle) -> torch.Tensor:
    """Return begin << 32 | count, [E_l, R], from where each source's arrivals were put."""
    ends = np.cumsum(counts)
    num_sources, num_local = len(handle.source_bounds) - 1, len(counts)
    table = np.zeros((num_sources, num_local), np.int64)
    for source in range(num_sources):
        begin, end = handle.source_bounds[source : source + 2]
        experts = np.searchsorted(ends, handle.place[begin:end], side="right")
        table[source] = np.bincount(experts, minlength=num_local)
    begins = np.cumsum(table, 0) - table
    return torch.from_numpy((begins << 32 | table).T.copy())
