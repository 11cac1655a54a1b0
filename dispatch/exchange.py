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
import torch

from configs.schema import MissingExperts
from dispatch import native
from dispatch.arrival import NO_INDICES, NO_WEIGHTS, Arrival, DispatchMessages, Weights
from dispatch.errors import ExpertUnowned, InputInvalid, MessageMismatch
from dispatch.expert_map import ExpertMap
from dispatch.handle import DispatchHandle, ExpertRows, Outgoing, Returning
from dispatch.layout import HEADER_BYTES, Bytes, DispatchLayout, RowFormat, Rows
from dispatch.message import Stamp, more_of, read_header, write_header
from dispatch.missing import without_missing
from dispatch.partial_sums import partial_sums, reduction_of, sum_of_parts
from dispatch.routing import ExpertMajor, Indices, LayerRoute, SlotNumbers
from dispatch.row_memory import RowMemory
from dispatch.row_wire import RowWire
from dispatch.statistics import Counters
from dispatch.validation import check_choices, check_expert_out, id_out_of_range
from dispatch.weighted_sum import WeightedSum


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
        self._wire = RowWire(layout)
        self._memory = RowMemory()
        self._messages = DispatchMessages(layout, rank)
        self._side_by_side = [
            row_format.view(np.empty(0, np.uint8), 0, 0) for row_format in self._messages.formats
        ]
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
        *,
        more: bool = False,
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
            columns=self._wire.encode(x),
            num_tokens=num_tokens,
            weights=weights,
            num_degraded=routing.num_missing,
            more=more,
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
        slots = slice(*self.routes[outgoing.stamp.layer].slot_bounds[member : member + 2])
        weights = self._choice_weights(outgoing) if self._layout.reduced else None
        return self._messages.write(buffer, outgoing, slots, member, weights)

    @staticmethod
    def _choice_weights(outgoing: Outgoing) -> Weights:
        weights: Weights = outgoing.weights.detach().numpy().reshape(-1)
        return weights

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
        arrivals = [
            self._own(outgoing, counts[member])
            if member == me
            else self._messages.read(
                buffers[member], outgoing.shared, self.members[member], counts[member]
            )
            for member in range(len(self.members))
        ]
        bounds = list(accumulate((len(arrival.rows) for arrival in arrivals), initial=0))
        gather, place = self._majors[layer].arrange(counts)
        columns = self._wire.empty(len(gather), self._memory)
        some = [arrival for arrival in arrivals if len(arrival.rows)]
        for number, out in enumerate(columns):
            if some:
                self._gather(number, some, gather, out)
        totals = counts.sum(0)
        self._counters.received(layer, totals)
        rows = ExpertRows(
            rows=self._wire.decode(columns),
            counts=tuple(totals.tolist()),
            experts=experts,
            more=outgoing.more or any(map(more_of, buffers.values())),
        )
        reduction = reduction_of(arrivals, self._layout.topk) if self._layout.reduced else None
        return rows, DispatchHandle(
            outgoing=outgoing, place=place, source_bounds=bounds, reduction=reduction
        )

    def _gather(
        self, number: int, arrivals: list[Arrival], gather: Indices, out: torch.Tensor
    ) -> None:
        """Fill one column: row i of `out` is the gather[i]-th of all choices."""
        row_format = self._messages.formats[number]
        parts = [arrival.columns[number] for arrival in arrivals]
        if native.compiled is not None:
            addresses = [
                native.addresses(rows, arrival.rows, row_format.row_bytes)
                for rows, arrival in zip(parts, arrivals, strict=True)
            ]
            all_rows = addresses[0] if len(addresses) == 1 else np.concatenate(addresses)
            native.compiled.gather_rows(out.data_ptr(), all_rows[gather], row_format.row_bytes)
            return
        rows, index = parts[0], arrivals[0].rows
        if len(parts) > 1:
            begins = list(accumulate(map(len, parts), initial=0))
            index = np.concatenate(
                [a.rows + begin for a, begin in zip(arrivals, begins, strict=False)]
            )
            rows = self._joined(number, parts, begins[-1])
        rows.take(index[gather], 0, row_format.of(out), "clip")

    def _joined(self, number: int, parts: list[Rows], num_rows: int) -> Rows:
        """Return the parts as one array, valid until the next call."""
        joined = self._side_by_side[number]
        if len(joined) < num_rows:
            # Grown in powers of two and kept: fresh memory costs several times the copy.
            joined = np.empty((1 << num_rows.bit_length(), joined.shape[1]), joined.dtype)
            self._side_by_side[number] = joined
        return np.concatenate(parts, out=joined[:num_rows])

    def _own(self, outgoing: Outgoing, counts: Indices) -> Arrival:
        routing, topk = outgoing.routing, self._layout.topk
        begin, end = routing.choice_bounds[self.me : self.me + 2]
        row_begin, row_end = routing.row_bounds[self.me : self.me + 2]
        slots = self.routes[outgoing.stamp.layer].slot_bounds[self.me : self.me + 2]
        counts[:] = routing.counts[slice(*slots)]
        sum_slots, weights = NO_INDICES, NO_WEIGHTS
        if self._layout.reduced:
            order = routing.order[begin:end]
            sum_slots = routing.choice_rows[begin:end] * topk + order % topk
            weights = self._choice_weights(outgoing)[order]
        return Arrival(
            routing.choice_tokens[begin:end],
            outgoing.columns,
            row_end - row_begin,
            sum_slots,
            weights,
        )

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
        wire = layout.returned_dtype(dtype)
        row_format = RowFormat(layout.hidden * wire.itemsize)
        if handle.reduction is None:
            results = expert_out.to(wire)
        else:
            results = partial_sums(
                self._weighted_sum,
                handle.reduction,
                handle.place,
                RowFormat(layout.hidden * dtype.itemsize).of(expert_out),
                dtype,
                wire,
            )
        return Returning(
            handle=handle,
            shared=stamp.header(wire, layout.hidden),
            results=row_format.of(results),
            dtype=wire,
            row_format=row_format,
        )

    def combine_bytes(self, returning: Returning, member: int) -> int:
        """Return the size of the combine message for one member."""
        begin, end = returning.handle.return_bounds[member : member + 2]
        return self._layout.combine_bytes(end - begin, returning.dtype)

    def due_bytes(self, returning: Returning, member: int) -> int:
        """Return the size of the combine message that one member sends."""
        begin, end = returning.handle.due_bounds[member : member + 2]
        return self._layout.combine_bytes(end - begin, returning.dtype)

    def write_combine(self, returning: Returning, member: int, buffer: Bytes) -> int:
        """Write the combine message for one other member; return its size in bytes."""
        handle, row_format = returning.handle, returning.row_format
        begin, end = handle.return_bounds[member : member + 2]
        write_header(buffer, returning.shared, self.rank, 0, end - begin, end - begin)
        if begin == end:
            return HEADER_BYTES
        rows = row_format.view(buffer, HEADER_BYTES, end - begin)
        if handle.reduction is None:
            native.take_rows(returning.results, handle.place[begin:end], rows)
        else:
            rows[:] = returning.results[begin:end]
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
        handle, due = returning.handle, returning.handle.due_bounds
        parts = [
            self._own_results(returning)
            if member == self.me
            else self._returned(returning, member, buffers[member], due[member + 1] - due[member])
            for member in range(len(self.members))
        ]
        outgoing, total = handle.outgoing, self._weighted_sum
        if handle.reduction is not None:
            return sum_of_parts(
                total,
                outgoing.routing,
                outgoing.num_tokens,
                parts,
                returning.dtype,
                self._layout.dtype,
            )
        order, topk = outgoing.routing.order, self._layout.topk
        # Left-out choices: their weight is 0 and so is their row.
        total.start(
            returning.dtype,
            outgoing.num_tokens,
            topk,
            holes=len(order) < outgoing.num_tokens * topk,
        )
        for member, rows in enumerate(parts):
            begin, end = due[member : member + 2]
            if begin == end:
                continue
            own_begin, own_end = handle.source_bounds[member : member + 2]
            index = handle.place[own_begin:own_end] if member == self.me else None
            total.put(order[begin:end], rows, index)
        return total.sum(outgoing.weights, self._layout.dtype)

    def _own_results(self, returning: Returning) -> Rows:
        reduction = returning.handle.reduction
        if reduction is None:
            return returning.results
        return returning.results[slice(*reduction.bounds[self.me : self.me + 2])]

    def _returned(self, returning: Returning, member: int, buffer: Bytes, num_due: int) -> Rows:
        source = self.members[member]
        found = read_header(buffer, returning.shared, source, 0)
        if found != (num_due, num_due):
            raise MessageMismatch(
                source=source, name="choices and rows", observed=found, expected=(num_due, num_due)
            )
        nbytes = HEADER_BYTES + num_due * returning.row_format.row_bytes
        if nbytes > len(buffer):
            raise MessageMismatch(
                source=source, name="bytes", observed=nbytes, expected=f"at most {len(buffer)}"
            )
        return returning.row_format.view(buffer, HEADER_BYTES, num_due)
