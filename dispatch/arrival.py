"""Dispatch messages: what is written for one member, and what is read from one.

Legend: E_r experts of the receiver, N choices, U rows, K choices of a token.

    exact     | header 64 | counts 4*E_r | choices 4*N |               pad | rows |
    reduced   | header 64 | counts 4*E_r | choices 4*N | weights 4*N | pad | rows |
    fp8       rows are | elements U*H | pad | scales 4*U*G |, G = ceil(H / 128)

A choice is the number of its row in the message. Where the receiver adds up (`reduced`) it is
row * K + k, so that the receiver knows the order of the sum, and has its weight beside it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dispatch import native
from dispatch.errors import MessageMismatch
from dispatch.handle import Columns, Outgoing
from dispatch.layout import HEADER_BYTES, INDEX_BYTES, Bytes, DispatchLayout, RowFormat, aligned
from dispatch.message import read_header, write_header
from dispatch.routing import Indices

Index = npt.NDArray[np.integer]
Weights = npt.NDArray[np.float32]
NO_INDICES: Indices = np.empty(0, np.int64)
NO_WEIGHTS: Weights = np.empty(0, np.float32)


class Arrival(NamedTuple):
    """The choices of one source for this rank's experts, by (expert, token, k).

    Attributes:
        rows: [N] row of each choice in `columns`.
        columns: What the rows consist of.
        num_rows: U, rows that these choices are about.
        slots: [N] row * K + k, rows counted from 0; only where this rank adds up.
        weights: [N] fp32; only where this rank adds up.
    """

    rows: Index
    columns: Columns
    num_rows: int
    slots: Index
    weights: Weights


class DispatchMessages:
    """Writes and reads the messages of one rank. Not thread-safe.

    Args:
        layout: Sizes.
        rank: Who writes.
    """

    def __init__(self, layout: DispatchLayout, rank: int) -> None:
        self._layout = layout
        self._rank = rank
        self.formats = tuple(map(RowFormat, layout.column_bytes))
        empty = np.empty(0, np.uint8)
        self._nothing = Arrival(
            NO_INDICES, tuple(f.view(empty, 0, 0) for f in self.formats), 0, NO_INDICES, NO_WEIGHTS
        )

    def columns(self, buffer: Bytes, num_experts: int, num_choices: int, num_rows: int) -> Columns:
        """Return the rows of a message, sharing its memory."""
        offset, found = self._layout.rows_offset(num_experts, num_choices), []
        for row_format in self.formats:
            found.append(row_format.view(buffer, aligned(offset), num_rows))
            offset = aligned(offset) + num_rows * row_format.row_bytes
        return tuple(found)

    def write(
        self, buffer: Bytes, outgoing: Outgoing, slots: slice, member: int, weights: Weights | None
    ) -> int:
        """Write the message for one member.

        Args:
            buffer: At least as long as the message.
            outgoing: The routed choices.
            slots: Those of the member's experts.
            member: Its position.
            weights: [T * K] of all choices, if the receiver adds up.

        Returns:
            The size of the message.
        """
        routing = outgoing.routing
        begin, end = routing.choice_bounds[member : member + 2]
        row_begin, row_end = routing.row_bounds[member : member + 2]
        num_experts, num_choices, num_rows = (
            slots.stop - slots.start,
            end - begin,
            row_end - row_begin,
        )
        write_header(
            buffer,
            outgoing.shared,
            self._rank,
            num_experts,
            num_choices,
            num_rows,
            more=outgoing.more,
        )
        index = np.ndarray((num_experts + num_choices,), np.int32, buffer, HEADER_BYTES)
        index[:num_experts] = routing.counts[slots]
        if num_choices:
            index[num_experts:] = routing.choice_rows[begin:end]
            if weights is not None:
                order, topk = routing.order[begin:end], self._layout.topk
                index[num_experts:] *= topk
                index[num_experts:] += (order % topk).astype(np.int32)
                at = HEADER_BYTES + INDEX_BYTES * len(index)
                np.ndarray((num_choices,), np.float32, buffer, at)[:] = weights[order]
            rows = self.columns(buffer, num_experts, num_choices, num_rows)
            for source, target in zip(outgoing.columns, rows, strict=True):
                native.take_rows(source, routing.row_tokens[row_begin:row_end], target)
        return self._layout.dispatch_bytes(num_experts, num_choices, num_rows)

    def read(self, buffer: Bytes, shared: bytes, source: int, counts: Indices) -> Arrival:
        """Check a message and fill in its counts.

        Raises:
            MessageMismatch: It is not the one that is due, or contradicts itself.
        """
        layout, num_experts = self._layout, len(counts)
        num_choices, num_rows = read_header(buffer, shared, source, num_experts)
        if not num_choices:
            return self._nothing
        nbytes = layout.dispatch_bytes(num_experts, num_choices, num_rows)
        if num_choices > layout.choices_max or num_rows > layout.max_tokens or nbytes > len(buffer):
            raise MessageMismatch(
                source=source,
                name="choices, rows and bytes",
                observed=(num_choices, num_rows, nbytes),
                expected=f"at most ({layout.choices_max}, {layout.max_tokens}, {len(buffer)})",
            )
        numbers = np.ndarray((num_experts + num_choices,), np.uint32, buffer, HEADER_BYTES)
        counts[:] = numbers[:num_experts]
        slots = index = numbers[num_experts:]
        weights = NO_WEIGHTS
        if layout.reduced:
            index = slots // np.uint32(layout.topk)
            at = HEADER_BYTES + INDEX_BYTES * len(numbers)
            # Needed until the combine, when the window may hold another message.
            weights = np.ndarray((num_choices,), np.float32, buffer, at).copy()
            slots = slots.astype(np.int64)
        # What is read here is used as an address: one cheap look at either end.
        num_counted, row_max = int(np.add.reduce(counts)), int(np.maximum.reduce(index))
        if num_counted != num_choices or row_max >= num_rows:
            raise MessageMismatch(
                source=source,
                name="sum of counts and highest row",
                observed=(num_counted, row_max),
                expected=(num_choices, f"below {num_rows}"),
            )
        columns = self.columns(buffer, num_experts, num_choices, num_rows)
        return Arrival(index.view(np.int32), columns, num_rows, slots, weights)
