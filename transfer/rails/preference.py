"""Which rails suit which memory: from a topology to an ordered list for each memory location.

A rail's end is a port of an RDMA device ("mlx5_0", or "mlx5_0:2" where a device has several) or a
network interface that has an IP address ("eth0"). RDMA is preferred while a port of it is up.

For a location the ends are put into tiers of equal distance, the nearest first. Put into the last
tier, the fallback, is what would slow the others down or cannot be used now:

- ends slower than `SLOW_IN_TIER` of the fastest of their tier, or than `SLOW_OVERALL` of the
  fastest of all (a management port next to the memory does not beat 400 Gb/s on the other socket);
- virtual functions beside their physical one;
- after all these, ends that are down.

Within a tier the faster comes first, then natural order of names. GPUs that share a nearest tier
of equals begin with different ends of it, so that two GPUs below one switch with two NICs use both.
"""

from __future__ import annotations

import fnmatch
import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from transfer.topology.machine import (
    LOCAL_NODE,
    Distance,
    InterfaceKind,
    NetworkInterface,
    PciPlace,
    RdmaPort,
    Topology,
)
from transfer.topology.sysfs import natural

SLOW_IN_TIER: Final = 0.5
SLOW_OVERALL: Final = 0.125


class RailKind(StrEnum):
    """What a rail's end is."""

    RDMA = "rdma"
    INTERFACE = "interface"


@dataclass(frozen=True, slots=True, kw_only=True)
class RailEnd:
    """Our end of a rail.

    Attributes:
        gbps: None = not known: neither slow nor fast.
        up: whether data can be sent now.
        spare: only to be used where nothing else is, however near.
        addresses: IP addresses with prefix lengths.
    """

    name: str
    kind: RailKind
    place: PciPlace
    gbps: float | None
    up: bool
    spare: bool = False
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """Ends that suit a location equally.

    Attributes:
        distance: of the nearest of them.
        rails: names, the first choice first.
        fallback: to be used only if no other tier has a healthy rail.
    """

    distance: Distance
    rails: tuple[str, ...]
    fallback: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RailChoice:
    """What the user says about rails; wins over what was found.

    Attributes:
        include: only names that match one of these patterns ("mlx5_*"); () = all.
        exclude: no names that match one of these.
        locations: whole lists for single locations: tiers of names, the last is no fallback.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    locations: Mapping[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)

    def allows(self, name: str) -> bool:
        """Whether an end may be used at all."""
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.exclude):
            return False
        return not self.include or any(fnmatch.fnmatchcase(name, p) for p in self.include)


ANY_RAIL: Final = RailChoice()


def preferred_rails(
    topology: Topology,
    location: str,
    *,
    kind: RailKind | None = None,
    choice: RailChoice = ANY_RAIL,
) -> tuple[tuple[str, ...], ...]:
    """Return the names of a location's rails in tiers, the best first, the fallback last.

    Args:
        topology: the machine.
        location: "cpu:0", "cuda:3". One that the machine does not have is near nothing.
        kind: only such ends. If None: RDMA if a port of it is up, else interfaces.
        choice: what the user wants.
    """
    return tuple(t.rails for t in rail_tiers(topology, location, kind=kind, choice=choice))


def rail_tiers(
    topology: Topology,
    location: str,
    *,
    kind: RailKind | None = None,
    choice: RailChoice = ANY_RAIL,
) -> tuple[Tier, ...]:
    """Like `preferred_rails`, with the distance of each tier; see there."""
    ends = rail_ends(topology, kind=kind, choice=choice)
    if location in choice.locations:
        return _chosen(topology, location, ends, choice.locations[location])
    tiers = _tiers(topology, location, ends)
    return _staggered(topology, location, ends, tiers)


def rail_ends(
    topology: Topology, *, kind: RailKind | None = None, choice: RailChoice = ANY_RAIL
) -> tuple[RailEnd, ...]:
    """List the ends of rails that a machine offers and the user allows, in natural order."""
    rdma = [end for end in _rdma_ends(topology) if choice.allows(end.name)]
    if kind is None:
        kind = RailKind.RDMA if any(end.up for end in rdma) else RailKind.INTERFACE
    if kind is RailKind.RDMA:
        return tuple(rdma)
    return tuple(end for end in _interface_ends(topology) if choice.allows(end.name))


def _rdma_ends(topology: Topology) -> list[RailEnd]:
    physical = [d.place.address for d in topology.rdma if not d.is_virtual_function]
    return [
        RailEnd(
            name=device.name if len(device.ports) == 1 else f"{device.name}:{port.number}",
            kind=RailKind.RDMA,
            place=device.place,
            gbps=port_gbps(topology, port),
            up=port.up,
            spare=device.is_virtual_function and bool(physical),
            addresses=port_addresses(topology, port),
        )
        for device in topology.rdma
        for port in device.ports
    ]


def port_gbps(topology: Topology, port: RdmaPort) -> float | None:
    """Return a port's speed: as told, but of a RoCE bond the sum of its active slaves."""
    for name in port.interfaces:
        interface = topology.interface(name)
        if interface and interface.kind is InterfaceKind.BOND and interface.gbps:
            return interface.gbps
    return port.gbps


def port_addresses(topology: Topology, port: RdmaPort) -> tuple[str, ...]:
    """Return the IP addresses of a port's interfaces; else those in its GIDs, prefix unknown."""
    named = [topology.interface(name) for name in port.interfaces]
    found = [address for item in named if item for address in item.addresses]
    return tuple(found or dict.fromkeys(f"{gid.ipv4}/32" for gid in port.gids if gid.ipv4))


def _interface_ends(topology: Topology) -> list[RailEnd]:
    addressed = [
        item
        for item in topology.interfaces
        if item.addresses and item.kind is not InterfaceKind.LOOPBACK
    ]
    # Bridges and tunnels of containers have addresses too, that lead nowhere else. But in a
    # container the only interface is virtual.
    backed = [item for item in addressed if _is_backed(topology, item)]
    return [
        RailEnd(
            name=item.name,
            kind=RailKind.INTERFACE,
            place=item.place,
            gbps=item.gbps,
            up=item.up,
            addresses=item.addresses,
        )
        for item in backed or addressed
    ]


def _is_backed(
    topology: Topology, item: NetworkInterface, above: frozenset[str] = frozenset()
) -> bool:
    """Whether an interface is one of metal, or made of some, through any number of layers."""
    if item.kind is InterfaceKind.PHYSICAL:
        return True
    # A tree that says nonsense must not send us in circles.
    seen = above | {item.name}
    lower = [topology.interface(name) for name in item.lower if name not in seen]
    return any(it is not None and _is_backed(topology, it, seen) for it in lower)


def _tiers(topology: Topology, location: str, ends: Sequence[RailEnd]) -> tuple[Tier, ...]:
    where = topology.place(location) or PciPlace(numa_node=None)
    far = {end.name: _measure(topology, where, end.place) for end in ends}
    fastest = max((end.gbps or 0 for end in ends if end.up and not end.spare), default=0)
    groups: dict[tuple[Distance, int], list[RailEnd]] = {}
    spare: list[RailEnd] = []
    for end in ends:
        slow = end.gbps is not None and end.gbps < SLOW_OVERALL * fastest
        if not end.up or end.spare or slow:
            spare.append(end)
        else:
            groups.setdefault(far[end.name], []).append(end)
    tiers = []
    for measure in sorted(groups):
        top = max(end.gbps or 0 for end in groups[measure])
        good = [e for e in groups[measure] if e.gbps is None or e.gbps >= SLOW_IN_TIER * top]
        spare.extend(end for end in groups[measure] if end not in good)
        tiers.append(Tier(distance=measure[0], rails=_names(sorted(good, key=_by_speed))))
    if spare:
        spare.sort(key=lambda end: (not end.up, far[end.name], _by_speed(end)))
        nearest = min(far[end.name][0] for end in spare)
        tiers.append(Tier(distance=nearest, rails=_names(spare), fallback=True))
    return tuple(tiers)


def _measure(topology: Topology, where: PciPlace, end: PciPlace) -> tuple[Distance, int]:
    distance = topology.distance(where, end)
    hops = topology.hops(where, end) if distance is Distance.SYS else LOCAL_NODE
    return distance, hops


def _by_speed(end: RailEnd) -> tuple[float, tuple[tuple[int, int | str], ...]]:
    return -(end.gbps or 0), natural(end.name)


def _names(ends: Iterable[RailEnd]) -> tuple[str, ...]:
    return tuple(end.name for end in ends)


def _staggered(
    topology: Topology, location: str, ends: Sequence[RailEnd], tiers: tuple[Tier, ...]
) -> tuple[Tier, ...]:
    """Begin the first tier with another end for each GPU that has the same, if all are as fast."""
    is_gpu = any(gpu.location == location for gpu in topology.gpus)
    if not tiers or tiers[0].fallback or not is_gpu:
        return tiers
    first = tiers[0].rails
    if len({end.gbps for end in ends if end.name in first}) > 1:
        return tiers
    rivals = [
        gpu.location
        for gpu in topology.gpus
        if gpu.location and _tiers(topology, gpu.location, ends)[0].rails == first
    ]
    turn = rivals.index(location) % len(first)
    staggered = first[turn:] + first[:turn]
    return (Tier(distance=tiers[0].distance, rails=staggered), *tiers[1:])


def _chosen(
    topology: Topology, location: str, ends: Sequence[RailEnd], lists: Sequence[Sequence[str]]
) -> tuple[Tier, ...]:
    """Tiers as the user lists them; patterns match in natural order, no end twice."""
    where = topology.place(location) or PciPlace()
    left = {end.name: end for end in ends}
    tiers = []
    for patterns in lists:
        names = [
            n for p in patterns for n in sorted(left, key=natural) if fnmatch.fnmatchcase(n, p)
        ]
        rails = tuple(dict.fromkeys(names))
        if rails:
            nearest = min(topology.distance(where, left[name].place) for name in rails)
            tiers.append(Tier(distance=nearest, rails=rails))
        for name in rails:
            del left[name]
    return tuple(tiers)


def rail_order(
    topology: Topology,
    location: str,
    addresses: Sequence[str],
    *,
    kind: RailKind = RailKind.INTERFACE,
    choice: RailChoice = ANY_RAIL,
) -> tuple[tuple[int, ...], ...]:
    """Order rails, given by their local ends, for memory at a location.

    Args:
        topology: the machine.
        location: where the memory is.
        addresses: of interfaces the IP addresses, without prefix lengths; of RDMA the names.
        kind: what the rails' ends are.
        choice: what the user wants.

    Returns:
        Tiers of indices into `addresses`, the best first; rails whose address no interface has
        (wildcards, names, loopback) last.
    """
    owner = {} if kind is RailKind.INTERFACE else {name: name for name in addresses}
    for item in topology.interfaces:
        for address in item.addresses:
            owner[str(ipaddress.ip_interface(address).ip)] = item.name
    tiers = rail_tiers(topology, location, kind=kind, choice=choice)
    wanted = [owner.get(address, "") for address in addresses]
    order = [
        tuple(i for name in tier.rails for i, mine in enumerate(wanted) if mine == name)
        for tier in tiers
    ]
    placed = {i for tier in order for i in tier}
    order.append(tuple(i for i in range(len(addresses)) if i not in placed))
    return tuple(tier for tier in order if tier)
