"""The order of one peer's rails for memory at a location: what the sprayer asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transfer.memory import numa_nodes
from transfer.preference import ANY_RAIL, RailChoice, rail_order
from transfer.region import Region
from transfer.topology import Topology
from transfer.topology_reader import read_topology


class RailPreferences:
    """Orders rails by how well they suit a location. Thread-safe.

    The machine is looked at once, at the first question where there is a choice at all.

    Args:
        addresses: our address of each rail, in the order of the peer's rails.
        look: reads the machine's topology.
        choice: what the user wants.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        look: Callable[[], Topology] = read_topology,
        choice: RailChoice = ANY_RAIL,
    ) -> None:
        self._addresses = tuple(addresses)
        self._look = look
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
            found = rail_order(self._topology, location, self._addresses, choice=self._choice)
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
