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
from collections.abc import Sequence

from transfer.preference import RailEnd


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


def _share_network(one: RailEnd, other: RailEnd) -> bool:
    theirs = {ipaddress.ip_interface(address).network for address in other.addresses}
    for address in one.addresses:
        network = ipaddress.ip_interface(address).network
        # A network of one is an address whose prefix nobody told.
        if network.num_addresses > 1 and network in theirs:
            return True
    return False
