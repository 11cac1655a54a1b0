"""What one rank does in an exchange of tensors on a GPU, whatever carries the messages.

    send            route and pack             tokens -> one message per member
    receive         arrange and unpack         everybody's messages -> rows of my experts
    send_results    pack_results               rows -> one message per source
    finish          locate_results, combine    everybody's results -> weighted sums

The counterpart of `dispatch.exchange`, with the same messages and the same bits, made of the
operations of `dispatch.kernels`. Nothing waits for the device, so there is room for the worst case
everywhere. `check` waits, and says which message was wrong.

    outgoing(parity)   [W, bytes]   row w is to be written to ...
    incoming(parity)   [W, bytes]   ... row `me` of this on member w. A rank's own message is put
                                    there directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np
import torch

from dispatch.errors import CapacityExceeded, InputInvalid, MessageMismatch
from dispatch.expert_map import ExpertMap
from dispatch.kernels.arrange import arrange
from dispatch.kernels.arranged import Arranged, Fault
from dispatch.kernels.combine import combine
from dispatch.kernels.locate_results import locate_results
from dispatch.kernels.operands import check_operand
from dispatch.kernels.pack import pack
from dispatch.kernels.pack_fp8 import pack_fp8
from dispatch.kernels.pack_results import pack_results
from dispatch.kernels.route import route
from dispatch.kernels.routed import ExpertSlots, Routed
from dispatch.kernels.unpack import unpack, unpack_scales
from dispatch.layout import ALIGN_BYTES, DTYPES, HEADER_BYTES, DispatchLayout
from dispatch.message import Stamp, write_header
from dispatch.routing import LayerRoute


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sent:
    """Ties the calls of one exchange together.

    Attributes:
        stamp: Of the dispatch.
        routed: Where the choices went.
        weights: [T, K] fp32, the caller's; unchanged until `finish`.
        num_bytes: [W] int64, of the messages.
    """

    stamp: Stamp
    routed: Routed
    weights: torch.Tensor
    num_bytes: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Received:
    """Rows for this rank's experts.

    Attributes:
        rows: [R, H] of the layout's type, or float8_e4m3fn.
        scales: [R, G] fp32 of fp8 rows, else None.
        arranged: Expert e has the rows `[arranged.bounds[e], arranged.bounds[e + 1])`, of which
            those from its count on are zeros.
    """

    rows: torch.Tensor
    scales: torch.Tensor | None
    arranged: Arranged


class DeviceExchange:
    """The tables and message buffers of one epoch on one device. Not thread-safe.

    Args:
        layout: Sizes; `combine` must be exact.
        expert_map: Where the experts live.
        members: All ranks that take part.
        rank: This rank.
        device: Where the tensors are.
        alignment: Of the first row of each expert; what the grouped matrix product wants.
        capacity: R, most rows that arrive, padding included; default: for the worst case.

    Raises:
        InputInvalid: The layout asks for what is not here, or `rank` is no member.
    """

    def __init__(
        self,
        layout: DispatchLayout,
        expert_map: ExpertMap,
        members: Sequence[int],
        rank: int,
        *,
        device: torch.device,
        alignment: int = 128,
        capacity: int | None = None,
    ) -> None:
        self.members = tuple(sorted(members))
        if rank not in self.members:
            raise InputInvalid(name="rank", observed=str(rank), expected=f"one of {self.members}")
        if layout.reduced:
            raise InputInvalid(name="combine", observed="reduced", expected="exact")
        self.me, self._rank = self.members.index(rank), rank
        self._layout, self._device, self._alignment = layout, device, alignment
        routes = [LayerRoute(expert_map, self.members, rank, n) for n in range(layout.num_layers)]
        self._slots = [ExpertSlots.of(route, layout.num_logical, device) for route in routes]
        held = [np.diff(route.slot_bounds) for route in routes]
        self._held = [int(counts[self.me]) for counts in held]
        num_members, most = len(self.members), max(int(counts.max()) for counts in held)
        worst = num_members * layout.choices_max + max(self._held) * (alignment - 1)
        self._capacity = worst if capacity is None else capacity
        self._ranks = torch.tensor(self.members, dtype=torch.int32, device=device)
        self._strides = layout.dispatch_window_bytes(most), self._combine_stride()
        # Outgoing windows, then incoming ones: a rank's own message needs no copy in between.
        self._buffers = [_aligned(2 * num_members * stride, device) for stride in self._strides]

    def _window_rows(self, row_bytes: int) -> int:
        """Rows from one combine message to the next, so that both rows and headers are aligned."""
        step = ALIGN_BYTES // gcd(row_bytes, ALIGN_BYTES)
        rows = self._layout.choices_max - (-HEADER_BYTES // row_bytes)
        return -(-rows // step) * step

    def _combine_stride(self) -> int:
        layout = self._layout
        widest = max(layout.dtype.itemsize, layout.combine_dtype.itemsize)
        sizes = {dtype.itemsize * layout.hidden for dtype in DTYPES if dtype.itemsize <= widest}
        return max(self._window_rows(row_bytes) * row_bytes for row_bytes in sizes)

    def outgoing(self, parity: int) -> torch.Tensor:
        """Return the messages to the members: [W, bytes] uint8; 0 for dispatch, 1 for combine."""
        return self._buffers[parity].view(2, len(self.members), -1)[0]

    def incoming(self, parity: int) -> torch.Tensor:
        """Return where the members' messages arrive: [W, bytes] uint8."""
        return self._buffers[parity].view(2, len(self.members), -1)[1]

    def _offsets(self, parity: int) -> torch.Tensor:
        num_members, stride = len(self.members), self._strides[parity]
        offsets = torch.arange(num_members, device=self._device) * stride
        offsets[self.me] += num_members * stride
        return offsets

    def _header(self, stamp: Stamp, dtype: torch.dtype) -> torch.Tensor:
        head = np.zeros(HEADER_BYTES, np.uint8)
        write_header(head, stamp.header(dtype, self._layout.hidden), self._rank, 0, 0, 0)
        return torch.from_numpy(head).to(self._device)

    def send(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, stamp: Stamp
    ) -> Sent:
        """Write the dispatch messages to `outgoing(0)`.

        Args:
            x: [T, H] of the layout's type, contiguous, T <= `max_tokens`.
            topk_ids: [T, K] int64 or int32, contiguous; -1 masks a choice.
            topk_weights: [T, K] fp32, contiguous.
            stamp: Of the dispatch.

        Raises:
            InputInvalid, CapacityExceeded: Nothing was started.
        """
        layout, device = self._layout, self._device
        check_operand("x", x, (None, layout.hidden), (layout.dtype,), device=device)
        num_tokens = len(x)
        if num_tokens > layout.max_tokens:
            raise CapacityExceeded(num_tokens=num_tokens, max_tokens=layout.max_tokens)
        sizes, fp32 = (num_tokens, layout.topk), (torch.float32,)
        check_operand("topk_weights", topk_weights, sizes, fp32, device=device)
        check_operand("topk_ids", topk_ids, sizes, (torch.int64, torch.int32), device=device)
        slots = self._slots[stamp.layer]
        routed = route(topk_ids, slots)
        num_bytes = (pack_fp8 if layout.fp8 else pack)(
            x,
            routed,
            slots,
            header=self._header(stamp, layout.dtype),
            messages=self._buffers[0],
            offsets=self._offsets(0),
        )
        return Sent(stamp=stamp, routed=routed, weights=topk_weights, num_bytes=num_bytes)

    def receive(self, sent: Sent) -> Received:
        """Put the rows in `incoming(0)` in the order of this rank's experts."""
        layout, num_experts = self._layout, self._held[sent.stamp.layer]
        dtype = torch.float8_e4m3fn if layout.fp8 else layout.dtype
        offsets = torch.arange(len(self.members), device=self._device) * self._strides[0]
        if not num_experts:
            arranged = Arranged.empty(offsets, 0, 0)
            arranged.faults.zero_()
            arranged.source_bounds.zero_()
            rows = torch.empty(0, layout.hidden, dtype=dtype, device=self._device)
            return Received(rows=rows, scales=None, arranged=arranged)
        messages = self.incoming(0).reshape(-1)
        columns = layout.column_bytes
        arranged = arrange(
            messages,
            offsets,
            header=self._header(sent.stamp, layout.dtype),
            ranks=self._ranks,
            num_experts=num_experts,
            window_bytes=self._strides[0],
            row_bytes=columns[0],
            scale_bytes=columns[1] if layout.fp8 else 0,
            alignment=self._alignment,
            capacity=self._capacity,
        )
        rows = unpack(messages, arranged, hidden=layout.hidden, dtype=dtype)
        scales = unpack_scales(messages, arranged, hidden=layout.hidden) if layout.fp8 else None
        return Received(rows=rows, scales=scales, arranged=arranged)

    def send_results(
        self, results: torch.Tensor, received: Received, sent: Sent
    ) -> tuple[torch.dtype, torch.Tensor]:
        """Write the combine messages to `outgoing(1)`.

        Args:
            results: [R, H] bf16, fp16 or fp32, contiguous: row i belongs to row i of `received`.
            received: From `receive`.
            sent: From `send`.

        Returns:
            In which type they travel, the same on every member; and [W] int64, their sizes.

        Raises:
            InputInvalid: Nothing was started.
        """
        dtype = self._layout.returned_dtype(results.dtype)
        row_bytes = self._layout.hidden * dtype.itemsize
        stride = self._window_rows(row_bytes) * row_bytes
        if stride > self._strides[1]:
            raise InputInvalid(
                name="dtype of results",
                observed=str(results.dtype),
                expected=f"not wider than {self._layout.combine_dtype}",
            )
        num_bytes = pack_results(
            results.to(dtype),
            received.arranged,
            header=self._header(sent.stamp.answer(), dtype),
            messages=self._buffers[1],
            offsets=self._result_offsets(stride),
        )
        return dtype, num_bytes

    def _result_offsets(self, stride: int) -> torch.Tensor:
        # Outgoing windows are as far apart as the buffer says; the incoming ones, where a message
        # is read, follow row by row.
        offsets = self._offsets(1)
        offsets[self.me] = len(self.members) * self._strides[1] + self.me * stride
        return offsets

    def result_offset(self, dtype: torch.dtype) -> int:
        """Return at which byte of all of a member's `incoming(1)` this rank's message goes."""
        return self.result_window(self.me, dtype)[0]

    def result_window(self, member: int, dtype: torch.dtype) -> tuple[int, int]:
        """Return offset and bytes of what one member may write to in `incoming(1)`.

        Args:
            member: Its position.
            dtype: In which type results travel.
        """
        row_bytes = self._layout.hidden * dtype.itemsize
        nbytes = self._window_rows(row_bytes) * row_bytes
        return member * nbytes, nbytes

    def finish(self, sent: Sent, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum the results in `incoming(1)`.

        Args:
            sent: From `send`.
            dtype: In which type the results travelled.

        Returns:
            [T, H] of the layout's type: weighted sums in fp32 in top-k order, rounded once. And
            [W] int32, what `check` takes.
        """
        layout, messages = self._layout, self.incoming(1).reshape(-1)
        row_bytes = layout.hidden * dtype.itemsize
        window_rows = self._window_rows(row_bytes)
        slots, faults = locate_results(
            messages,
            sent.routed,
            header=self._header(sent.stamp.answer(), dtype),
            ranks=self._ranks,
            window_rows=window_rows,
            row_bytes=row_bytes,
        )
        num_rows = (len(messages) - HEADER_BYTES) // row_bytes
        whole = messages[HEADER_BYTES : HEADER_BYTES + num_rows * row_bytes]
        rows = whole.view(dtype).view(num_rows, layout.hidden)
        return combine(rows, slots, sent.weights, out_dtype=layout.dtype), faults

    def check(self, faults: torch.Tensor) -> None:
        """Wait for the device, and accept the messages of a phase.

        Args:
            faults: `Arranged.faults`, or from `finish`.

        Raises:
            MessageMismatch: A message was not the one that was due, or contradicted itself.
            InputInvalid: More rows arrived than `capacity` has room for.
        """
        found = faults.tolist()
        for rank, fault in zip(self.members, found, strict=False):
            if fault:
                raise MessageMismatch(
                    source=rank, name="message", observed=Fault(fault).name.lower(), expected="none"
                )
        if len(found) > len(self.members) and found[-1]:
            raise InputInvalid(
                name="rows that arrived",
                observed=f"more than {self._capacity}",
                expected="within capacity",
            )


def _aligned(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return zeroed memory that begins at a multiple of 64 bytes."""
    whole = torch.zeros(num_bytes + ALIGN_BYTES, dtype=torch.uint8, device=device)
    begin = -whole.data_ptr() % ALIGN_BYTES
    return whole[begin : begin + num_bytes]
