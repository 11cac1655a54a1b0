"""Dispatch over torch.distributed: the same messages through `all_to_all_single`.

The reference that the transfer dispatcher is compared with, in bits and in time. Membership is
fixed: a lost member ends the process group, and with it this dispatcher.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from configs.schema import MissingExperts
from dispatch.carrier import Size, Write
from dispatch.errors import PassFailed
from dispatch.exchange import Exchange
from dispatch.exchange_calls import ExchangeCalls
from dispatch.expert_map import ExpertMap
from dispatch.layout import Bytes, DispatchLayout, aligned
from dispatch.message import Stamp
from dispatch.pass_calls import FixedGroup
from dispatch.statistics import Counters
from dispatch.weighted_sum import WeightedSum


class Moving(NamedTuple):
    """Messages on their way; the tensors are the memory that the process group works on."""

    work: dist.Work
    source: torch.Tensor
    target: torch.Tensor
    arrivals: list[int]  # member w has target[arrivals[w] : arrivals[w + 1]]


def device_of(process_group: dist.ProcessGroup | None) -> torch.device:
    """Return where the group's backend takes its messages from: NCCL knows GPU memory only."""
    if dist.get_backend(process_group) == dist.Backend.NCCL:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class CollectiveCarrier:
    """The `Carrier` of a process group: one `all_to_all_single` per phase.

    A receiver must know the sizes, so a first, small one tells them where they are not known.

    Args:
        process_group: None is the default group.
        me: This rank's position.
        counters: Where sent bytes are counted.
    """

    def __init__(
        self, process_group: dist.ProcessGroup | None, me: int, counters: Counters
    ) -> None:
        self._group = process_group
        self._size = dist.get_world_size(process_group)
        self._device = device_of(process_group)
        self._others = [w for w in range(self._size) if w != me]
        self._counters = counters
        self._moving: dict[int, Moving] = {}  # window -> what is due in it

    def send(self, stamp: Stamp, size: Size, write: Write, *, due: Size | None = None) -> None:
        """See `Carrier.send`. Waits for the other ranks' sizes where they are not `due`."""
        sizes = self._sizes_of(size)
        incoming = self._told(sizes, stamp) if due is None else self._sizes_of(due)
        self._moving[stamp.window] = self._move(sizes, incoming, stamp, write)

    def receive(
        self, stamp: Stamp, shared: bytes, timeout_s: float | None = None
    ) -> Mapping[int, Bytes]:
        """See `Carrier.receive`."""
        moving = self._moving.pop(stamp.window)
        try:
            if timeout_s is None:
                moving.work.wait()
            else:
                moving.work.wait(timedelta(seconds=timeout_s))
            received = moving.target.cpu().numpy()
        except RuntimeError as error:
            raise _failed(stamp, error) from error
        bounds = moving.arrivals
        return {w: received[bounds[w] : bounds[w + 1]] for w in self._others}

    def _sizes_of(self, nbytes: Size) -> list[int]:
        """Return the size of each member's message; this rank sends itself none."""
        sizes = [0] * self._size
        for w in self._others:
            sizes[w] = nbytes(w)
        return sizes

    def _told(self, sizes: list[int], stamp: Stamp) -> list[int]:
        """Tell every rank the size of its message; return the sizes that are coming."""
        incoming = torch.empty(self._size, dtype=torch.int64, device=self._device)
        self._all_to_all(incoming, torch.tensor(sizes, device=self._device), None, None, stamp)
        return list(map(int, incoming.tolist()))

    def _move(self, sizes: list[int], incoming: list[int], stamp: Stamp, write: Write) -> Moving:
        """Write all messages side by side and let them travel."""
        padded, arriving = [list(map(aligned, part)) for part in (sizes, incoming)]
        source = torch.empty(sum(padded), dtype=torch.uint8)
        target = torch.empty(sum(arriving), dtype=torch.uint8, device=self._device)
        begins, arrivals = [[0, *np.cumsum(part).tolist()] for part in (padded, arriving)]
        buffer = source.numpy()
        for w in self._others:
            written = write(w, buffer[begins[w] : begins[w + 1]])
            assert written == sizes[w], "the size was told before the message was written"
            self._counters.sent_bytes += written
        source = source.to(self._device)
        work = self._all_to_all(target, source, arriving, padded, stamp, wait=False)
        return Moving(work, source, target, arrivals)

    def _all_to_all(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        target_sizes: list[int] | None,
        source_sizes: list[int] | None,
        stamp: Stamp,
        *,
        wait: bool = True,
    ) -> dist.Work:
        try:
            work: dist.Work = dist.all_to_all_single(
                target, source, target_sizes, source_sizes, group=self._group, async_op=True
            )
            if wait:
                work.wait()
        except RuntimeError as error:
            raise _failed(stamp, error) from error
        return work


def _failed(stamp: Stamp, error: RuntimeError) -> PassFailed:
    return PassFailed(
        epoch=stamp.epoch,
        pass_id=stamp.pass_id,
        layer=stamp.layer,
        phase=stamp.phase.value,
        suspects=(),  # the process group does not say who
        evidence=str(error),
    )


class CollectiveDispatcher(FixedGroup, ExchangeCalls):
    """A `Dispatcher` on a process group, gloo or NCCL. Not thread-safe.

    Tensors are in host memory with either; NCCL's messages take a detour over the current GPU.

    Args:
        layout: Sizes.
        expert_map: Where the experts live.
        ranks: The map's rank of each group rank, ascending; default: the same numbers.
        process_group: Default: the default group, which must exist.
        missing_experts: What to do with experts that nobody holds.

    Raises:
        InputInvalid: The map does not fit the layout.
    """

    def __init__(
        self,
        *,
        layout: DispatchLayout,
        expert_map: ExpertMap,
        ranks: Sequence[int] | None = None,
        process_group: dist.ProcessGroup | None = None,
        missing_experts: MissingExperts = MissingExperts.WAIT,
    ) -> None:
        super().__init__(layout)
        size = dist.get_world_size(process_group)
        members = list(ranks) if ranks is not None else list(range(size))
        assert members == sorted(members), "group ranks follow the order of the map's ranks"
        assert len(members) == size, "one rank of the map for each rank of the group"
        exchange = Exchange(
            layout,
            expert_map,
            members,
            members[dist.get_rank(process_group)],
            missing_experts=missing_experts,
            counters=self._counters,
            weighted_sum=WeightedSum(layout),
        )
        self._parts = exchange, CollectiveCarrier(process_group, exchange.me, self._counters)

    def _installed(self) -> tuple[Exchange, CollectiveCarrier]:
        return self._parts
