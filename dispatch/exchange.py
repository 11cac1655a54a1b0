"""What one rank does in an exchange, whatever carries the messages.

    send           check the input, route it                     integers only
    write_dispatch one peer's message into a buffer              gather
    receive        everybody's messages -> rows of my experts    gather
    write_combine  one peer's results into a buffer              gather
    finish         everybody's results -> weighted sums          scatter, elementwise sum

The dispatchers differ only in how the buffers travel. This rank's own rows are never put into a
message. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from configs.schema import MissingExperts
from dispatch import native
from dispatch.errors import ExpertUnowned, InputInvalid, MessageMismatch
from dispatch.expert_map import ExpertMap
from dispatch.handle import DispatchHandle, ExpertRows, Outgoing, Returning
from dispatch.layout import HEADER_BYTES, Bytes, DispatchLayout, RowFormat, Rows
from dispatch.layout import rows_offset as offset_of_rows
from dispatch.message import Stamp, read_header, write_header
from dispatch.missing import without_missing
from dispatch.routing import ExpertMajor, Indices, LayerRoute, SlotNumbers
from dispatch.statistics import Counters
from dispatch.validation import check_choices, check_expert_out, id_out_of_range
from dispatch.weighted_sum import WeightedSum

_NO_INDICES: Indices = np.empty(0, np.int64)


class Exchange:
    """The tables of one epoch and the work on them.

    Args:
        layout: Sizes.
        expert_map: Where the experts live.
        members: All ranks that take part. Experts of other ranks count as missing.
        rank: This rank.
        missing_experts: What to do with a choice whose expert nobody holds.
        counters: Where to count.
        weighted_sum: Workspace of the combine.

    Raises:
        InputInvalid: The map does not fit the layout, or `rank` is no member.
    """

    def __init__(
        self,
        layout: DispatchLayout,
        expert_map: ExpertMap,
        members: Sequence[int],
        rank: int,
        *,
        missing_experts: MissingExperts,
        counters: Counters,
        weighted_sum: WeightedSum,
    ) -> None:
        for name in ("num_layers", "num_logical"):
            observed, expected = getattr(expert_map, name), getattr(layout, name)
            if observed != expected:
                raise InputInvalid(
                    name=f"{name} of the expert map", observed=str(observed), expected=str(expected)
                )
        self.members = tuple(sorted(members))
        self.rank = rank
        if rank not in self.members:
            raise InputInvalid(name="rank", observed=str(rank), expected=f"one of {self.members}")
        self.me = self.members.index(rank)
        self._layout = layout
        self._policy = missing_experts
        self._counters = counters
        self._weighted_sum = weighted_sum
        self._format = RowFormat(layout.row_bytes)
        self._no_rows = self._format.view(np.empty(0, np.uint8), 0, 0)
        self._arrivals = self._no_rows
        self.routes = [
            LayerRoute(expert_map, self.members, rank, layer) for layer in range(layout.num_layers)
        ]
        self.experts: list[tuple[int, ...]] = [
            tuple(route.slot_experts[slice(*route.slot_bounds[self.me : self.me + 2])].tolist())
            for route in self.routes
        ]
        self._majors = [ExpertMajor(len(self.members), len(experts)) for experts in self.experts]
        counters.adopt(self.members, rank, self.routes)

    def experts_of(self, member: int, layer: int) -> int:
        """Return how many experts the member at this position holds in `layer`."""
        bounds = self.routes[layer].slot_bounds
        return bounds[member + 1] - bounds[member]

    def send(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        stamp: Stamp,
    ) -> Outgoing:
        """Check the arguments of a dispatch and route its choices.

        Raises:
            InputInvalid, CapacityExceeded, ExpertUnowned: Nothing was sent yet.
        """
        ids = check_choices(self._layout, x, topk_ids, topk_weights)
        route = self.routes[stamp.layer]
        num_tokens, topk = ids.shape
        slots = route.slots(ids)
        routing = route.route(slots, num_tokens, topk)
        if routing.num_invalid:
            raise id_out_of_range(self._layout, ids)
        weights = topk_weights
        if routing.num_missing and self._policy is MissingExperts.WAIT:
            missing = np.unique(ids.reshape(-1)[slots > route.num_slots])
            raise ExpertUnowned(
                epoch=stamp.epoch, layer=stamp.layer, experts=tuple(missing.tolist())
            )
        if routing.num_masked or routing.num_missing:
            weights = self._weights_of_the_rest(topk_weights, slots, route.num_slots)
        self._counters.routed(stamp.layer, routing, num_tokens, routing.num_missing)
        return Outgoing(
            stamp=stamp,
            shared=stamp.header(self._layout.dtype, self._layout.hidden),
            routing=routing,
            x=self._format.of(x),
            num_tokens=num_tokens,
            weights=weights,
            num_degraded=routing.num_missing,
        )

    def _weights_of_the_rest(
        self, topk_weights: torch.Tensor, slots: SlotNumbers, num_slots: int
    ) -> torch.Tensor:
        shape = tuple(topk_weights.shape)
        masked = (slots == num_slots).reshape(shape)
        missing = (slots > num_slots).reshape(shape)
        return torch.from_numpy(without_missing(topk_weights.detach().numpy(), masked, missing))

    def dispatch_bytes(self, outgoing: Outgoing, member: int) -> int:
        """Return the size of the dispatch message for one member."""
        routing = outgoing.routing
        begin, end = routing.choice_bounds[member : member + 2]
        row_begin, row_end = routing.row_bounds[member : member + 2]
        num_experts = self.experts_of(member, outgoing.stamp.layer)
        return self._layout.dispatch_bytes(num_experts, end - begin, row_end - row_begin)

    def write_dispatch(self, outgoing: Outgoing, member: int, buffer: Bytes) -> int:
        """Write the dispatch message for one other member; return its size in bytes."""
        routing, stamp = outgoing.routing, outgoing.stamp
        slot_begin, slot_end = self.routes[stamp.layer].slot_bounds[member : member + 2]
        begin, end = routing.choice_bounds[member : member + 2]
        row_begin, row_end = routing.row_bounds[member : member + 2]
        num_experts = slot_end - slot_begin
        write_header(
            buffer, outgoing.shared, self.rank, num_experts, end - begin, row_end - row_begin
        )
        index = np.ndarray((num_experts + end - begin,), np.int32, buffer, HEADER_BYTES)
        index[:num_experts] = routing.counts[slot_begin:slot_end]
        offset = offset_of_rows(num_experts, end - begin)
        if begin == end:
            return offset
        index[num_experts:] = routing.choice_rows[begin:end]
        rows = self._format.view(buffer, offset, row_end - row_begin)
        outgoing.x.take(routing.row_tokens[row_begin:row_end], 0, rows, "clip")
        return offset + (row_end - row_begin) * self._format.row_bytes

    def receive(
        self, outgoing: Outgoing, buffers: Mapping[int, Bytes]
    ) -> tuple[ExpertRows, DispatchHandle]:
        """Put the rows of all members in the order of this rank's experts.

        Args:
            outgoing: This rank's own choices; those for its own experts are taken from here.
            buffers: Position of each other member -> its dispatch message. Not used after the
                return.

        Raises:
            MessageMismatch: A message is not the one that is due, or contradicts itself.
        """
        layer, me = outgoing.stamp.layer, self.me
        experts = self.experts[layer]
        counts = np.zeros((len(self.members), len(experts)), np.int64)
        parts: list[Rows] = []
        indices: list[npt.NDArray[np.integer]] = []
        bounds, num_rows = [0], 0
        for member in range(len(self.members)):
            if member == me:
                index, rows = self._own(outgoing, counts[member])
            else:
                index, rows = self._arrived(outgoing, member, buffers[member], counts[member])
            bounds.append(bounds[-1] + len(index))
            if len(index):
                parts.append(rows)
                indices.append(index)
                num_rows += len(rows)
        gather, place = self._majors[layer].arrange(counts)
        out = torch.empty(len(gather), self._layout.hidden, dtype=self._layout.dtype)
        if parts:
            self._gather(parts, indices, num_rows, gather, out)
        totals = counts.sum(0)
        self._counters.received(layer, totals)
        rows_out = ExpertRows(rows=out, counts=tuple(totals.tolist()), experts=experts)
        return rows_out, DispatchHandle(outgoing=outgoing, place=place, source_bounds=bounds)

    def _gather(
        self,
        parts: list[Rows],
        indices: list[npt.NDArray[np.integer]],
        num_rows: int,
        gather: Indices,
        out: torch.Tensor,
    ) -> None:
        """Set row i of `out` to the gather[i]-th of all rows that the indices list."""
        row_bytes = self._format.row_bytes
        if native.compiled is not None:
            addresses = [
                native.addresses(rows, index, row_bytes)
                for rows, index in zip(parts, indices, strict=True)
            ]
            all_rows = addresses[0] if len(addresses) == 1 else np.concatenate(addresses)
            native.compiled.gather_rows(out.data_ptr(), all_rows[gather], row_bytes)
            return
        if len(parts) == 1:
            arrived, index = parts[0], indices[0]
        else:
            begins = accumulate(map(len, parts), initial=0)
            index = np.concatenate([i + n for i, n in zip(indices, begins, strict=False)])
            arrived = self._side_by_side(parts, num_rows)
        arrived.take(index[gather], 0, self._format.of(out), "clip")

    def _side_by_side(self, parts: list[Rows], num_rows: int) -> Rows:
        """Return the parts as one array, valid until the next call."""
        if len(self._arrivals) < num_rows:
            # Grown in powers of two and kept: fresh memory costs several times the copy.
            self._arrivals = np.empty(
                (1 << num_rows.bit_length(), self._format.width), self._format.word
            )
        return np.concatenate(parts, out=self._arrivals[:num_rows])

    def _own(self, outgoing: Outgoing, counts: Indices) -> tuple[npt.NDArray[np.integer], Rows]:
        routing = outgoing.routing
        begin, end = routing.choice_bounds[self.me : self.me + 2]
        slots = self.routes[outgoing.stamp.layer].slot_bounds[self.me : self.me + 2]
        counts[:] = routing.counts[slice(*slots)]
        return routing.choice_tokens[begin:end], outgoing.x

    def _arrived(
        self, outgoing: Outgoing, member: int, buffer: Bytes, counts: Indices
    ) -> tuple[npt.NDArray[np.integer], Rows]:
        """Check a dispatch message, fill in its counts, return its choices' rows."""
        layout, source, num_experts = self._layout, self.members[member], len(counts)
        num_choices, num_rows = read_header(buffer, outgoing.shared, source, num_experts)
        if not num_choices:
            return _NO_INDICES, self._no_rows
        if num_choices > layout.choices_max or num_rows > layout.max_tokens:
            raise MessageMismatch(
                source=source,
                name="choices and rows",
                observed=(num_choices, num_rows),
                expected=f"at most ({layout.choices_max}, {layout.max_tokens})",
            )
        numbers = np.ndarray((num_experts + num_choices,), np.uint32, buffer, HEADER_BYTES)
        counts[:] = numbers[:num_experts]
        index = numbers[num_experts:]
        # What is read here is used as an address: one cheap look at either end.
        num_counted, row_max = int(np.add.reduce(counts)), int(np.maximum.reduce(index))
        if num_counted != num_choices or row_max >= num_rows:
            raise MessageMismatch(
                source=source,
                name="sum of counts and highest row",
                observed=(num_counted, row_max),
                expected=(num_choices, f"below {num_rows}"),
            )
        rows = self._format.view(buffer, offset_of_rows(num_experts, num_choices), num_rows)
        return index.view(np.int32), rows

    def returning(
        self, expert_out: torch.Tensor, handle: DispatchHandle, stamp: Stamp
    ) -> Returning:
        """Check the arguments of a combine.

        Args:
            expert_out: What the experts returned.
            handle: Of the dispatch.
            stamp: Of the combine.

        Raises:
            InputInvalid: Nothing was sent yet.
        """
        layout, dtype = self._layout, expert_out.dtype
        check_expert_out(layout, expert_out, len(handle.place))
        row_format = self._format
        if dtype is not layout.dtype:
            row_format = RowFormat(layout.hidden * dtype.itemsize)
        return Returning(
            handle=handle,
            shared=stamp.header(dtype, layout.hidden),
            results=row_format.of(expert_out),
            dtype=dtype,
            row_format=row_format,
        )

    def combine_bytes(self, returning: Returning, member: int) -> int:
        """Return the size of the combine message for one member."""
        begin, end = returning.handle.source_bounds[member : member + 2]
        return self._layout.combine_bytes(end - begin, returning.dtype)

    def due_bytes(self, returning: Returning, member: int) -> int:
        """Return the size of the combine message that one member sends."""
        begin, end = returning.handle.outgoing.routing.choice_bounds[member : member + 2]
        return self._layout.combine_bytes(end - begin, returning.dtype)

    def write_combine(self, returning: Returning, member: int, buffer: Bytes) -> int:
        """Write the combine message for one other member; return its size in bytes."""
        handle, row_format = returning.handle, returning.row_format
        begin, end = handle.source_bounds[member : member + 2]
        write_header(buffer, returning.shared, self.rank, 0, end - begin, end - begin)
        if begin == end:
            return HEADER_BYTES
        rows = row_format.view(buffer, HEADER_BYTES, end - begin)
        returning.results.take(handle.place[begin:end], 0, rows, "clip")
        return HEADER_BYTES + (end - begin) * row_format.row_bytes

    def finish(self, returning: Returning, buffers: Mapping[int, Bytes]) -> torch.Tensor:
        """Return the weighted sums: [T, H] of the layout's type.

        Args:
            returning: This rank's results, of which it takes those for its own tokens.
            buffers: Position of each other member -> its combine message. Not used after the
                return.

        Raises:
            MessageMismatch: A message is not the one that is due.
        """
        handle, results = returning.handle, returning.results
        outgoing = handle.outgoing
        order, bounds = outgoing.routing.order, outgoing.routing.choice_bounds
        num_all = outgoing.num_tokens * self._layout.topk
        total = self._weighted_sum
        # Left-out choices: their weight is 0 and so is their row.
        total.start(
            returning.dtype,
            outgoing.num_tokens,
            self._layout.topk,
            holes=len(order) < num_all,
        )
        for member in range(len(self.members)):
            begin, end = bounds[member : member + 2]
            if member != self.me:
                rows = self._returned(returning, member, buffers[member], end - begin)
                if begin < end:
                    total.put(order[begin:end], rows)
            elif begin < end:
                own_begin, own_end = handle.source_bounds[member : member + 2]
                total.put(order[begin:end], results, handle.place[own_begin:own_end])
        return total.sum(outgoing.weights, self._layout.dtype)

    def _returned(self, returning: Returning, member: int, buffer: Bytes, num_due: int) -> Rows:
        source = self.members[member]
        found = read_header(buffer, returning.shared, source, 0)
        if found != (num_due, num_due):
            raise MessageMismatch(
                source=source, name="choices and rows", observed=found, expected=(num_due, num_due)
            )
        return returning.row_format.view(buffer, HEADER_BYTES, num_due)
