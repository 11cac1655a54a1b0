"""Which of a peer's rail ends each of ours talks to.

The rule, in two rounds:

1. Ends of one IP network and one name are a pair (`mlx5_0` here with `mlx5_0` there): machines
   of a cluster are alike, and rail-optimised fabrics join equal ports.
2. Each end of ours that is left takes, in our order, of all the peer's ends the one that is
   first by: in one network with ours; used by the fewest so far; of the same name; at the nearest
   index; of the lowest index.

So in one flat network the load spreads evenly; with a network for each rail nothing crosses
rails; and where no network is shared, equal names, then equal indices, meet through the router.
Each side pairs its own ends; both find the same pairs where both have equally many.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import replace

from transfer.rails.preference import RailEnd, RailKind
from transfer.topology.machine import PciPlace


def pair_rails(ours: Sequence[RailEnd], theirs: Sequence[RailEnd]) -> tuple[tuple[int, int], ...]:
    """Pair each of our ends with one of theirs, by the rule above.

    Returns:
        (our index, their index), in our order; () if either side has none.
    """
    if not ours or not theirs:
        return ()
    near = [[_share_network(one, other) for other in theirs] for one in ours]
    chosen: dict[int, int] = {}
    used = [0] * len(theirs)
    for i, one in enumerate(ours):
        for k, other in enumerate(theirs):
            if near[i][k] and one.name == other.name and not used[k]:
                chosen[i], used[k] = k, 1
                break
    for i, one in enumerate(ours):
        if i not in chosen:
            ranks = [
                (not near[i][k], used[k], one.name != other.name, abs(i - k), k)
                for k, other in enumerate(theirs)
            ]
            chosen[i] = min(ranks)[-1]
            used[chosen[i]] += 1
    return tuple(sorted(chosen.items()))


def pair_ends(ours: Sequence[RailEnd], theirs: Sequence[RailEnd]) -> tuple[tuple[int, int], ...]:
    """Pair ends as `pair_rails` does, but so that every end of both sides is in use.

    Returns:
        (our index, their index), in the order of the side that has more ends.
    """
    if len(ours) >= len(theirs):
        return pair_rails(ours, theirs)
    return tuple((i, k) for k, i in pair_rails(theirs, ours))


def pair_addresses(
    ours: Sequence[str],
    theirs: Sequence[str],
    interfaces: Mapping[str, Sequence[str]],
) -> tuple[tuple[int, int], ...]:
    """Pair tcp rails that are plain addresses; the longer side has each of its addresses once.

    Args:
        ours: our addresses, without prefix lengths.
        theirs: the peer's.
        interfaces: addresses of our interfaces with prefix lengths, which tell our networks.

    Returns:
        As `pair_ends`.
    """
    prefixed = {
        address.partition("/")[0]: address for found in interfaces.values() for address in found
    }
    mine = [address_end("", prefixed.get(address, address)) for address in ours]
    other = [address_end("", address) for address in theirs]
    return pair_ends(mine, other)


def share_network(one: str, other: str, interfaces: Mapping[str, Sequence[str]]) -> bool:
    """Whether the peer's address `other` lies in the network of our address `one`."""
    for address in (address for found in interfaces.values() for address in found):
        if address.partition("/")[0] == one:
            return _share_network(address_end("", address), address_end("", other))
    return False


def address_end(name: str, address: str) -> RailEnd:
    """Return the end that has this address, "10.0.0.5/24"; or none, if it is no number."""
    try:
        known: tuple[str, ...] = (str(ipaddress.ip_interface(address)),)
    except ValueError:
        known = ()  # the name of a host
    return RailEnd(
        name=name,
        kind=RailKind.INTERFACE,
        place=PciPlace(),
        gbps=None,
        up=True,
        addresses=known,
    )


def rdma_end(name: str, address: str) -> RailEnd:
    """Return the end of a rail that is an RDMA device with this address."""
    return replace(address_end(name, address), kind=RailKind.RDMA)


def _share_network(one: RailEnd, other: RailEnd) -> bool:
    """Whether an address of one lies in a network of the other; a network of one tells nothing."""
    ours = [ipaddress.ip_interface(address) for address in one.addresses]
    theirs = [ipaddress.ip_interface(address) for address in other.addresses]
    return any(
        (a.network.num_addresses > 1 and b.ip in a.network)
        or (b.network.num_addresses > 1 and a.ip in b.network)
        for a in ours
        for b in theirs
    )
