"""The order of one peer's rails for memory at a location: what the sprayer asks for."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence

from transfer.memory.memory import numa_nodes
from transfer.memory.region import Region
from transfer.rails.preference import ANY_RAIL, RailChoice, RailKind, rail_order
from transfer.topology.machine import Topology
from transfer.topology.reader import read_topology

_looking = threading.Lock()


@functools.cache
def _read_once() -> Topology:
    return read_topology()


def this_machine() -> Topology:
    """Return the machine's topology, read once in a process."""
    # Thousands of small files: a second thread waits instead of reading them too.
    with _looking:
        return _read_once()


class RailPreferences:
    """Orders rails by how well they suit a location. Thread-safe.

    The machine is looked at once in a process, at the first question where there is a choice.

    Args:
        addresses: our end of each rail, in the order of the peer's rails; see `rail_order`.
        kind: what these ends are.
        look: reads the machine's topology.
        choice: what the user wants.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        kind: RailKind = RailKind.INTERFACE,
        look: Callable[[], Topology] | None = None,
        choice: RailChoice = ANY_RAIL,
    ) -> None:
        self._addresses = tuple(addresses)
        self._kind = kind
        self._look = look or this_machine
        self._choice = choice
        self._topology: Topology | None = None
        # Two threads may work out the same order; both come to the same result.
        self._orders: dict[str, tuple[tuple[int, ...], ...]] = {}

    def order_for(self, region: Region) -> tuple[tuple[int, ...], ...]:
        """Return the tiers for a region's memory; see `order`."""
        return self.order(location_of(region)) if len(self._addresses) > 1 else ()

    def order(self, location: str | None) -> tuple[tuple[int, ...], ...]:
        """Return tiers of rail indices, the best first; () if all rails are as good.

        Args:
            location: where the memory is, "cpu:0" or "cuda:3"; None = not known.
        """
        if location is None or len(self._addresses) < 2:
            return ()
        found = self._orders.get(location)
        if found is None:
            if self._topology is None:
                self._topology = self._look()
            found = rail_order(
                self._topology, location, self._addresses, kind=self._kind, choice=self._choice
            )
            found = found if len(found) > 1 else ()
            self._orders[location] = found
        return found


def location_of(region: Region) -> str | None:
    """Return where a region's memory is, "cpu:0"; None where nobody knows.

    Host memory is known to be on a node where it was allocated there, or where there is only one.
    """
    if region.kind.startswith("cuda:"):
        return region.kind
    if region.kind != "host":
        return None
    if region.memory is not None and region.memory.numa_node is not None:
        return f"cpu:{region.memory.numa_node}"
    nodes = numa_nodes()
    return f"cpu:{nodes[0]}" if len(nodes) == 1 else None
