"""Random machines: distances and preference lists keep their promises on all of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from transfer.rails.pairing import pair_rails
from transfer.rails.preference import (
    SLOW_IN_TIER,
    SLOW_OVERALL,
    RailKind,
    preferred_rails,
    rail_ends,
    rail_order,
    rail_tiers,
)
from transfer.topology.machine import (
    Distance,
    Gpu,
    InterfaceKind,
    NetworkInterface,
    NumaNode,
    PciPlace,
    RdmaDevice,
    RdmaPort,
    Topology,
)

SPEEDS = st.sampled_from([None, 1.0, 10.0, 25.0, 100.0, 200.0, 400.0])


@st.composite
def places(draw: st.DrawFn, num_nodes: int) -> PciPlace:
    """Somewhere in a small forest of host bridges, switches and cards, so that many share one."""
    bridge = draw(st.integers(0, 2))
    steps = draw(st.lists(st.integers(0, 2), min_size=1, max_size=4))
    path = "/".join(
        [f"pci0000:{bridge}0", *(f"0000:{bridge}{i}:0{step}.0" for i, step in enumerate(steps))]
    )
    node = draw(st.none() | st.integers(0, num_nodes - 1))
    return PciPlace(path=draw(st.sampled_from([path, path, path, ""])), numa_node=node)


@st.composite
def machines(draw: st.DrawFn) -> Topology:
    num_nodes = draw(st.integers(1, 3))
    where = places(num_nodes)
    nodes = tuple(
        NumaNode(
            number=i,
            cpus="",
            distances={k: 10 if i == k else draw(st.integers(11, 40)) for k in range(num_nodes)},
        )
        for i in range(num_nodes)
    )
    gpus = tuple(
        Gpu(location=f"cuda:{i}", vendor="nvidia", model="", place=draw(where))
        for i in range(draw(st.integers(0, 4)))
    )
    rdma = tuple(
        RdmaDevice(
            name=f"mlx5_{i}",
            place=draw(where),
            ports=tuple(
                RdmaPort(
                    number=k + 1,
                    state=draw(st.sampled_from(["ACTIVE", "ACTIVE", "DOWN"])),
                    gbps=draw(SPEEDS),
                    link_layer="InfiniBand",
                )
                for k in range(draw(st.integers(1, 2)))
            ),
            is_virtual_function=draw(st.booleans()),
        )
        for i in range(draw(st.integers(0, 5)))
    )
    interfaces = tuple(
        NetworkInterface(
            name=f"eth{i}",
            kind=draw(st.sampled_from([InterfaceKind.PHYSICAL, InterfaceKind.VIRTUAL])),
            place=draw(where),
            gbps=draw(SPEEDS),
            mtu=1500,
            state=draw(st.sampled_from(["up", "down"])),
            carrier=draw(st.booleans()),
            addresses=(f"10.{draw(st.integers(0, 2))}.0.{i + 1}/24",),
        )
        for i in range(draw(st.integers(0, 4)))
    )
    return Topology(nodes=nodes, gpus=gpus, rdma=rdma, interfaces=interfaces)


def all_places(found: Topology) -> list[PciPlace]:
    devices = (*found.gpus, *found.rdma, *found.interfaces)
    nodes = [PciPlace(numa_node=node.number) for node in found.nodes]
    return [*(device.place for device in devices), *nodes]


def slow(found: Topology, kind: RailKind) -> set[str]:
    """By the definition in the document: compared with all, and with those equally far."""
    ends = [end for end in rail_ends(found, kind=kind) if end.up and not end.spare]
    top = max((end.gbps or 0 for end in ends), default=0)
    return {end.name for end in ends if end.gbps is not None and end.gbps < SLOW_OVERALL * top}


@given(machines())
def test_distance_is_symmetric_and_nearest_to_itself(found: Topology) -> None:
    for one in all_places(found):
        for other in all_places(found):
            there, back = found.distance(one, other), found.distance(other, one)
            assert there is back
            assert found.hops(one, other) == found.hops(other, one)
            if there is Distance.SELF:
                assert one.chain == other.chain
        if one.chain:
            assert found.distance(one, one) is Distance.SELF


@given(machines(), st.sampled_from(RailKind))
def test_every_end_is_listed_exactly_once(found: Topology, kind: RailKind) -> None:
    names = sorted(end.name for end in rail_ends(found, kind=kind))
    for location in found.locations:
        listed = [name for tier in preferred_rails(found, location, kind=kind) for name in tier]
        assert sorted(listed) == names


@given(machines(), st.sampled_from(RailKind))
def test_the_nearest_good_end_is_first(found: Topology, kind: RailKind) -> None:
    ends = {end.name: end for end in rail_ends(found, kind=kind)}
    for location in found.locations:
        where = found.place(location)
        assert where is not None
        tiers = rail_tiers(found, location, kind=kind)
        good = [end for end in ends.values() if end.up and not end.spare]
        good = [end for end in good if end.name not in slow(found, kind)]
        if not good:
            assert all(tier.fallback for tier in tiers)
            continue
        nearest = min(found.distance(where, end.place) for end in good)
        assert {found.distance(where, ends[name].place) for name in tiers[0].rails} == {nearest}
        told = [tier.distance for tier in tiers if not tier.fallback]
        assert told == sorted(told)


@given(machines(), st.sampled_from(RailKind))
def test_only_the_fallback_has_what_is_down_spare_or_slow(found: Topology, kind: RailKind) -> None:
    ends = {end.name: end for end in rail_ends(found, kind=kind)}
    for location in found.locations:
        tiers = rail_tiers(found, location, kind=kind)
        assert [tier.fallback for tier in tiers].count(True) <= 1
        assert not any(tier.fallback for tier in tiers[:-1])
        for tier in tiers:
            known = [ends[name] for name in tier.rails]
            if tier.fallback:
                states = [end.up for end in known]
                assert states == sorted(states, reverse=True)
                continue
            speeds = [end.gbps for end in known if end.gbps is not None]
            assert all(end.up and not end.spare for end in known)
            assert not speeds or min(speeds) >= SLOW_IN_TIER * max(speeds)


@given(machines())
def test_tcp_rails_are_each_placed_once(found: Topology) -> None:
    addresses = ["127.0.0.1", *(i.addresses[0].partition("/")[0] for i in found.interfaces)]
    for location in found.locations:
        order = rail_order(found, location, addresses)
        assert sorted(i for tier in order for i in tier) == list(range(len(addresses)))


@given(machines(), machines())
def test_pairs_cover_us_and_spread_over_them(one: Topology, other: Topology) -> None:
    ours = rail_ends(one, kind=RailKind.INTERFACE)
    theirs = rail_ends(other, kind=RailKind.INTERFACE)
    pairs = pair_rails(ours, theirs)
    assert [i for i, _ in pairs] == (list(range(len(ours))) if theirs else [])
    networks = {end.addresses[0].rpartition(".")[0] for end in (*ours, *theirs)}
    if len(networks) == 1 and pairs:
        uses = [sum(k == idx for _, k in pairs) for idx in range(len(theirs))]
        assert max(uses) - min(uses) <= 1
