"""Who makes a dispatcher when its sizes are known only at the first call.

A `DispatchLayout` is fixed in a dispatcher's constructor; the calls of `dispatch.deepep` bring the
sizes with them. A carrier knows the group and how messages travel in it.

    ByCollective(group)                 torch.distributed, any process group
    ByTransfer(engine, config, ...)     the transfer engine, one epoch number for each dispatcher
    Alone()                             one rank
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

import torch.distributed as dist

from configs.schema import DispatchConfig
from dispatch.collective import CollectiveDispatcher
from dispatch.dispatcher import Dispatcher
from dispatch.expert_map import ExpertMap
from dispatch.layout import DispatchLayout
from dispatch.local import LocalDispatcher
from dispatch.transfer_dispatcher import TransferDispatcher

if TYPE_CHECKING:
    from transfer import TransferEngine

Swap = Callable[[Mapping[int, bytes]], Mapping[int, bytes]]  # offers for others -> those for me


class Carrier(Protocol):
    """Makes dispatchers over a fixed group. Every rank makes the same ones in the same order.

    Attributes:
        rank: This rank, 0 to `size` - 1.
        size: Ranks of the group.
    """

    rank: int
    size: int

    def dispatcher(self, layout: DispatchLayout) -> Dispatcher:
        """Return a dispatcher whose experts are split evenly, ready for its first pass.

        Raises:
            LayoutMismatch: Another rank asked for other sizes.
        """
        ...

    def close(self, dispatcher: Dispatcher) -> None:
        """Free what a dispatcher holds."""
        ...


def _even(layout: DispatchLayout, size: int) -> ExpertMap:
    return ExpertMap.even(
        num_layers=layout.num_layers, num_logical=layout.num_logical, ranks=range(size)
    )


class ByCollective:
    """Implements `Carrier` on a process group; default: the default group."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def dispatcher(self, layout: DispatchLayout) -> Dispatcher:
        """See `Carrier.dispatcher`."""
        return CollectiveDispatcher(
            layout=layout, expert_map=_even(layout, self.size), process_group=self._group
        )

    def close(self, dispatcher: Dispatcher) -> None:
        """See `Carrier.close`."""
        del dispatcher  # it holds plain memory


class ByTransfer:
    """Implements `Carrier` on the transfer engine.

    Args:
        engine: Open and connected to every member; not owned. No other dispatcher may use it: the
            epochs, which tell messages apart, are counted here.
        config: Deadlines.
        rank: This rank.
        members: Rank -> peer name, ranks 0 to n - 1, this one included.
        swap: Delivers offers: takes other rank -> what it needs, returns other rank -> what it
            gave for this rank. Called by all ranks at once, for instance through a store.
    """

    def __init__(
        self,
        engine: TransferEngine,
        config: DispatchConfig,
        *,
        rank: int,
        members: Mapping[int, str],
        swap: Swap,
    ) -> None:
        assert sorted(members) == list(range(len(members))), "ranks without holes"
        self._engine = engine
        self._config = config
        self._members = dict(members)
        self._swap = swap
        self._epochs = itertools.count(1)
        self.rank, self.size = rank, len(members)

    def dispatcher(self, layout: DispatchLayout) -> Dispatcher:
        """See `Carrier.dispatcher`."""
        dispatcher = TransferDispatcher(self._engine, self._config, layout=layout)
        offers = dispatcher.prepare(
            epoch=next(self._epochs),
            rank=self.rank,
            members=self._members,
            expert_map=_even(layout, self.size),
        )
        dispatcher.install(self._swap(offers))
        return dispatcher

    def close(self, dispatcher: Dispatcher) -> None:
        """See `Carrier.close`."""
        assert isinstance(dispatcher, TransferDispatcher)
        dispatcher.close()


class Alone:
    """Implements `Carrier` for one rank."""

    rank = 0
    size = 1

    def dispatcher(self, layout: DispatchLayout) -> Dispatcher:
        """See `Carrier.dispatcher`."""
        return LocalDispatcher(layout=layout, expert_map=_even(layout, 1))

    def close(self, dispatcher: Dispatcher) -> None:
        """See `Carrier.close`."""
        del dispatcher


def swap_by_group(group: dist.ProcessGroup | None = None) -> Swap:
    """Return a `swap` for `ByTransfer` that gathers all offers through a process group."""

    def swap(offers: Mapping[int, bytes]) -> Mapping[int, bytes]:
        everybodys: list[Mapping[int, bytes]] = [{}] * dist.get_world_size(group)
        dist.all_gather_object(everybodys, dict(offers), group=group)
        me = dist.get_rank(group)
        return {rank: given[me] for rank, given in enumerate(everybodys) if me in given}

    return swap
