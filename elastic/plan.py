"""Which view comes next, and where its experts live. Pure functions, the same result everywhere.

Losing ranks: an orphan (an expert whose last holder went) goes to the survivor with the fewest
experts in that layer, then the fewest in all, then the lowest rank. Experts with a replica left
are not touched, so nothing moves that need not move.

    layer 0, 8 experts:   r0 {0,1}  r1 {2,3}  r2 {4,5}  r3 {6,7}
    r3 goes:              r0 {0,1,6}  r1 {2,3,7}  r2 {4,5}

Gaining a rank: the newcomer takes experts from the fullest holder of a layer until it has its
share; over the layers the fractions of its share add up, so that it gets its part of a model
whose layers have fewer experts than there are ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dispatch import ExpertMap
from elastic.errors import NoSurvivors
from elastic.view import Member, View

Placement = dict[int, list[set[int]]]  # rank -> layer -> logical experts held


def cover_orphans(expert_map: ExpertMap, survivors: Iterable[int]) -> ExpertMap:
    """Return the map of the survivors only, every expert held by one of them.

    Args:
        expert_map: The map before the loss.
        survivors: Ranks that stay; one that the map does not know starts with no experts.

    Raises:
        ValueError: There are no survivors.
    """
    ranks = sorted(set(survivors))
    if not ranks:
        raise ValueError("no survivors to hold the experts")
    placement = _placement(expert_map, ranks)
    totals = {rank: sum(map(len, placement[rank])) for rank in ranks}
    for layer in range(expert_map.num_layers):
        held = set().union(*(placement[rank][layer] for rank in ranks))
        for logical in range(expert_map.num_logical):
            if logical in held:
                continue
            taker = min(ranks, key=lambda r: (len(placement[r][layer]), totals[r], r))
            placement[taker][layer].add(logical)
            totals[taker] += 1
    return _frozen(expert_map, placement)


def with_joiner(expert_map: ExpertMap, rank: int) -> ExpertMap:
    """Return the map with `rank` holding its share, taken from the fullest holders.

    At most `ceil(experts of a layer / ranks)` experts move in a layer, all of them to `rank`.
    A rank that the map knows already keeps what it has and is filled up.
    """
    ranks = sorted({*expert_map.ranks, rank})
    placement = _placement(expert_map, ranks)
    totals = {r: sum(map(len, placement[r])) for r in ranks}
    carried = 0  # what earlier layers' shares left over, in units of 1/len(ranks) experts
    for layer in range(expert_map.num_layers):
        held = sum(len(placement[r][layer]) for r in ranks)
        carried += held
        share = min(carried // len(ranks), -(-held // len(ranks)))
        while len(placement[rank][layer]) < share:
            giver, expert = _fullest(placement, totals, layer, rank)
            if expert is None:
                break
            placement[giver][layer].remove(expert)
            placement[rank][layer].add(expert)
            totals[giver] -= 1
            totals[rank] += 1
        carried -= len(placement[rank][layer]) * len(ranks)
    return _frozen(expert_map, placement)


def gained(before: ExpertMap | None, after: ExpertMap, rank: int) -> tuple[tuple[int, int], ...]:
    """Return the (layer, logical) pairs that `rank` holds in `after` and not in `before`."""
    pairs: list[tuple[int, int]] = []
    for layer in range(after.num_layers):
        known = before is not None and rank in before.ranks
        old = set(before.experts_of(rank, layer)) if before is not None and known else set()
        pairs.extend((layer, e) for e in after.experts_of(rank, layer) if e not in old)
    return tuple(pairs)


def first_view(
    members: Iterable[Member], *, num_layers: int, num_logical: int, weights_version: str = ""
) -> View:
    """Return the view of epoch 1: the experts of every layer split evenly over the members."""
    ordered = _sorted(members)
    ranks = [member.rank for member in ordered]
    spread = ExpertMap.even(num_layers=num_layers, num_logical=num_logical, ranks=ranks)
    return View(epoch=1, members=ordered, expert_map=spread, weights_version=weights_version)


def view_without(view: View, incarnations: Iterable[str]) -> View:
    """Return the next view without these members, their orphans covered.

    Without any: the same members once more, which makes everybody drop the pass and start anew.

    Raises:
        NoSurvivors: Nobody would be left.
    """
    removed = set(incarnations)
    members = tuple(m for m in view.members if m.incarnation not in removed)
    if not members:
        raise NoSurvivors(epoch=view.epoch)
    return _next(view, members, cover_orphans(view.expert_map, [m.rank for m in members]))


def view_with(view: View, joiner: Member, dead: Iterable[str] = ()) -> View:
    """Return the next view with `joiner`, and without its slot's older life and the `dead`.

    A joiner whose slot is still in the view takes over exactly the experts of that slot.
    """
    return view_of(view, [joiner], dead=dead)


def view_of(view: View, joiners: Iterable[Member], dead: Iterable[str] = ()) -> View:
    """Return the next view with all `joiners`, and without older lives of them and the `dead`."""
    removed = set(dead)
    new = {joiner.rank: joiner for joiner in joiners}
    kept = {m.rank: m for m in view.members if m.incarnation not in removed and m.rank not in new}
    members = _sorted({**kept, **new}.values())
    returning = [rank for rank in new if view.member(rank) is not None]
    expert_map = view.expert_map
    if kept or returning:
        expert_map = cover_orphans(expert_map, [*kept, *returning])
        for rank in sorted(set(new) - set(returning)):
            expert_map = with_joiner(expert_map, rank)
    else:  # nobody of the old view and no old slot: nothing to keep
        expert_map = ExpertMap.even(
            num_layers=expert_map.num_layers, num_logical=expert_map.num_logical, ranks=sorted(new)
        )
    return _next(view, members, expert_map)


def _next(view: View, members: tuple[Member, ...], expert_map: ExpertMap) -> View:
    return View(
        epoch=view.epoch + 1,
        members=members,
        expert_map=expert_map,
        weights_version=view.weights_version,
    )


def _sorted(members: Iterable[Member]) -> tuple[Member, ...]:
    return tuple(sorted(members, key=lambda member: member.rank))


def _placement(expert_map: ExpertMap, ranks: Iterable[int]) -> Placement:
    known = set(expert_map.ranks)
    layers = range(expert_map.num_layers)
    return {
        rank: [set(expert_map.experts_of(rank, i)) if rank in known else set() for i in layers]
        for rank in ranks
    }


def _frozen(like: ExpertMap, placement: Mapping[int, list[set[int]]]) -> ExpertMap:
    return ExpertMap(
        num_layers=like.num_layers,
        num_logical=like.num_logical,
        placement={
            rank: tuple(tuple(sorted(experts)) for experts in layers)
            for rank, layers in placement.items()
        },
    )


def _fullest(
    placement: Placement, totals: Mapping[int, int], layer: int, taker: int
) -> tuple[int, int | None]:
    """Return who gives an expert of this layer to `taker`, and which; None if nobody should."""
    mine = placement[taker][layer]
    givers = sorted(
        (rank for rank in placement if rank != taker),
        key=lambda r: (-len(placement[r][layer]), -totals[r], r),
    )
    for giver in givers:
        if len(placement[giver][layer]) <= len(mine):
            break  # taking from here on would make the layer less even, not more
        choice = placement[giver][layer] - mine
        if choice:
            return giver, max(choice)
    return taker, None
