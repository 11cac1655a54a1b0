"""Which rails a memory prefers, and whom they talk to."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.machines import machine, write_machine
from transfer.rails.pairing import pair_addresses, pair_rails, share_network
from transfer.rails.preference import (
    RailChoice,
    RailEnd,
    RailKind,
    Tier,
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
from transfer.topology.reader import read_topology


def nic(name: str, path: str, *, gbps: float | None = 100, state: str = "ACTIVE", node: int = 0,
        virtual: bool = False, ports: int = 1) -> RdmaDevice:  # fmt: skip
    return RdmaDevice(
        name=name,
        place=PciPlace(path=path, numa_node=node),
        ports=tuple(
            RdmaPort(number=i + 1, state=state, gbps=gbps, link_layer="InfiniBand")
            for i in range(ports)
        ),
        is_virtual_function=virtual,
    )


def gpu(number: int, path: str, node: int = 0) -> Gpu:
    place = PciPlace(path=path, numa_node=node)
    return Gpu(location=f"cuda:{number}", vendor="nvidia", model="", place=place)


NODES = (NumaNode(number=0, cpus="0-3"), NumaNode(number=1, cpus="4-7"))
SWITCH = "pci0000:10/0000:10:01.0/0000:11:00.0"


def test_each_gpu_begins_with_its_own_nic(tmp_path: Path) -> None:
    found = machine("two_sockets_8_gpus_8_nics", tmp_path)
    tiers = rail_tiers(found, "cuda:5")
    assert tiers == (
        Tier(distance=Distance.PXB, rails=("mlx5_9",)),
        Tier(distance=Distance.NODE, rails=("mlx5_6", "mlx5_10", "mlx5_11")),
        Tier(distance=Distance.SYS, rails=("mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5")),
        Tier(
            distance=Distance.NODE,
            rails=("mlx5_8", "mlx5_7", "mlx5_2", "mlx5_1"),
            fallback=True,
        ),
    )
    assert preferred_rails(found, "cuda:5") == tuple(tier.rails for tier in tiers)
    assert preferred_rails(found, "cpu:1")[0] == ("mlx5_6", "mlx5_9", "mlx5_10", "mlx5_11")


def test_without_rdma_interfaces_with_addresses_are_rails(tmp_path: Path) -> None:
    found = machine("cloud_one_nic", tmp_path)
    assert preferred_rails(found, "cpu:0") == (("ens5",),)
    assert preferred_rails(found, "cpu:0", kind=RailKind.RDMA) == ()


def test_a_bond_is_one_rail_and_its_slaves_none(tmp_path: Path) -> None:
    found = machine("bonded_nics", tmp_path)
    ends = {end.name: end for end in rail_ends(found)}
    assert {name: end.gbps for name, end in ends.items()} == {
        "mlx5_bond_0": 200, "mlx5_bond_1": 200, "mlx5_bond_2": 200, "mlx5_bond_3": 100,
    }  # fmt: skip
    assert ends["mlx5_bond_0"].addresses == ("10.20.0.7/24",)
    assert preferred_rails(found, "cuda:0", kind=RailKind.INTERFACE)[0] == ("bond0",)


def test_gpus_with_the_same_nearest_rails_begin_with_different_ones(tmp_path: Path) -> None:
    found = machine("bonded_nics", tmp_path)
    assert preferred_rails(found, "cuda:1")[0] == ("mlx5_bond_0", "mlx5_bond_1")
    assert preferred_rails(found, "cuda:3")[0] == ("mlx5_bond_1", "mlx5_bond_0")
    # Not where one is faster: bond3 has lost half of its speed.
    assert preferred_rails(found, "cuda:5")[0] == ("mlx5_bond_2", "mlx5_bond_3")
    assert preferred_rails(found, "cuda:7")[0] == ("mlx5_bond_2", "mlx5_bond_3")


def test_what_is_down_comes_last_and_never_vanishes(tmp_path: Path) -> None:
    found = machine("devices_down", tmp_path)
    assert rail_tiers(found, "cuda:0")[-1] == Tier(
        distance=Distance.PIX, rails=("mlx5_1", "mlx5_2"), fallback=True
    )
    assert preferred_rails(found, "cpu:1", kind=RailKind.INTERFACE)[-1] == ("eth1",)


def test_with_every_rdma_port_down_interfaces_take_over(tmp_path: Path) -> None:
    root = write_machine("devices_down", tmp_path)
    for device in range(4):
        (root / f"sys/class/infiniband/mlx5_{device}/ports/1/state").write_text("1: DOWN")
    assert preferred_rails(read_topology(root), "cpu:0")[0] == ("eth0", "eth2", "eth3")


def test_slow_rails_fall_back_wherever_they_are() -> None:
    found = Topology(
        nodes=NODES,
        rdma=(
            nic("fast", "pci0000:90/0000:90:01.0/0000:91:00.0", gbps=400, node=1),
            nic("half", "pci0000:90/0000:90:02.0/0000:92:00.0", gbps=200, node=1),
            nic("less", "pci0000:90/0000:90:03.0/0000:93:00.0", gbps=199, node=1),
            nic("near", "pci0000:00/0000:00:01.0/0000:01:00.0", gbps=40, node=0),
            nic("mute", "pci0000:00/0000:00:02.0/0000:02:00.0", gbps=None, node=0),
        ),
    )
    assert preferred_rails(found, "cpu:1") == (("fast", "half"), ("mute",), ("less", "near"))
    assert preferred_rails(found, "cpu:0") == (("mute",), ("fast", "half"), ("near", "less"))


def test_sockets_are_ordered_by_the_firmwares_distances() -> None:
    table = {0: 10, 1: 32, 2: 12}
    nodes = tuple(
        NumaNode(number=i, cpus="", distances=table if i == 0 else {0: table[i]}) for i in range(3)
    )
    found = Topology(
        nodes=nodes,
        rdma=tuple(nic(f"n{i}", f"pci0000:{i}0/0000:{i}0:01.0", node=i) for i in range(3)),
    )
    assert preferred_rails(found, "cpu:0") == (("n0",), ("n2",), ("n1",))


def test_virtual_functions_stand_behind_and_ports_are_rails() -> None:
    found = Topology(
        nodes=NODES,
        gpus=(gpu(0, f"{SWITCH}/0000:12:00.0/0000:13:00.0"),),
        rdma=(
            nic("vf", f"{SWITCH}/0000:12:01.0/0000:14:00.1", virtual=True),
            nic("two", f"{SWITCH}/0000:12:01.0/0000:14:00.0", ports=2),
        ),
    )
    assert preferred_rails(found, "cuda:0") == (("two:1", "two:2"), ("vf",))
    alone = Topology(nodes=NODES, rdma=(found.rdma[0],))  # as a container sees it
    assert preferred_rails(alone, "cpu:0") == (("vf",),)


def test_containers_virtual_interface_is_a_rail_only_where_no_other_is() -> None:
    def item(name: str, kind: InterfaceKind, lower: tuple[str, ...] = ()) -> NetworkInterface:
        return NetworkInterface(
            name=name, kind=kind, place=PciPlace(), gbps=10, mtu=1500, state="up", carrier=True,
            lower=lower, addresses=() if name == "eno1" else ("10.0.0.1/24",),
        )  # fmt: skip

    veth, bridge = item("eth0", InterfaceKind.VIRTUAL), item("docker0", InterfaceKind.BRIDGE)
    metal = item("eno1", InterfaceKind.PHYSICAL)
    over = item("br0", InterfaceKind.BRIDGE, ("eno1", "br0"))
    inside = Topology(nodes=NODES, interfaces=(veth,))
    outside = Topology(nodes=NODES, interfaces=(veth, bridge, metal, over))
    assert preferred_rails(inside, "cpu:0") == (("eth0",),)
    assert preferred_rails(outside, "cpu:0") == (("br0",),)


def test_a_user_includes_and_excludes_by_pattern(tmp_path: Path) -> None:
    found = machine("two_sockets_8_gpus_8_nics", tmp_path)
    choice = RailChoice(include=("mlx5_?", "mlx5_11"), exclude=("mlx5_[1278]",))
    assert preferred_rails(found, "cuda:7", choice=choice) == (
        ("mlx5_11",),
        ("mlx5_6", "mlx5_9"),
        ("mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5"),
    )
    none = RailChoice(exclude=("mlx5_*",))
    assert "ens6f0" in {name for tier in preferred_rails(found, "cpu:0", choice=none)
                        for name in tier}  # fmt: skip


def test_a_user_lists_a_location_himself(tmp_path: Path) -> None:
    found = machine("two_sockets_8_gpus_8_nics", tmp_path)
    choice = RailChoice(
        exclude=("mlx5_4",),
        locations={"cuda:0": (("mlx5_9", "mlx5_[03]"), ("mlx5_9", "gone", "mlx5_4"), ("mlx5_5",))},
    )
    assert preferred_rails(found, "cuda:0", choice=choice) == (
        ("mlx5_9", "mlx5_0", "mlx5_3"),
        ("mlx5_5",),
    )
    assert preferred_rails(found, "cuda:1", choice=choice)[0] == ("mlx5_3",)


def test_tcp_rails_are_ordered_by_their_addresses(tmp_path: Path) -> None:
    found = machine("two_sockets_8_gpus_8_nics", tmp_path)
    rails = ["127.0.0.1", "10.14.0.5", "10.10.0.5", "10.11.0.5", "rail.example"]
    assert rail_order(found, "cuda:1", rails) == ((3,), (2,), (1,), (0, 4))
    assert rail_order(found, "cpu:1", rails) == ((1,), (2, 3), (0, 4))
    assert rail_order(found, "cuda:99", rails)[-1] == (0, 4)


def end(name: str, *addresses: str) -> RailEnd:
    return RailEnd(
        name=name, kind=RailKind.RDMA, place=PciPlace(), gbps=None, up=True, addresses=addresses
    )


def paired(ours: list[RailEnd], theirs: list[RailEnd]) -> list[tuple[str, str]]:
    return [(ours[i].name, theirs[k].name) for i, k in pair_rails(ours, theirs)]


def test_equal_machines_join_equal_rails() -> None:
    ours = [end(f"mlx5_{i}", f"10.{i}.0.1/24") for i in range(4)]
    theirs = [end(f"mlx5_{i}", f"10.{i}.0.2/24") for i in reversed(range(4))]
    assert paired(ours, theirs) == [(f"mlx5_{i}", f"mlx5_{i}") for i in range(4)]


def test_the_network_decides_over_the_name() -> None:
    ours = [end("a", "10.1.0.1/24"), end("b", "10.2.0.1/24")]
    theirs = [end("a", "10.2.0.2/24"), end("b", "10.1.0.2/24")]
    assert paired(ours, theirs) == [("a", "b"), ("b", "a")]


def test_in_one_flat_network_the_load_spreads() -> None:
    ours = [end(f"x{i}", f"10.0.0.{i}/24") for i in range(4)]
    theirs = [end(f"y{i}", f"10.0.0.1{i}/24") for i in range(2)]
    assert paired(ours, theirs) == [("x0", "y0"), ("x1", "y1"), ("x2", "y1"), ("x3", "y0")]
    assert paired(theirs, ours) == [("y0", "x0"), ("y1", "x1")]


def test_a_name_is_kept_for_who_bears_it() -> None:
    ours = [end("x", "10.0.0.1/24"), end("eth0", "10.0.0.2/24")]
    theirs = [end("eth0", "10.0.0.3/24"), end("y", "10.0.0.4/24")]
    assert paired(ours, theirs) == [("x", "y"), ("eth0", "eth0")]


def test_without_a_common_network_names_then_indices_meet() -> None:
    ours = [end("a", "10.1.0.1/24"), end("b", "10.2.0.1/32"), end("c")]
    theirs = [end("p", "10.8.0.1/24"), end("a", "10.9.0.1/24"), end("q", "10.2.0.1/32")]
    assert paired(ours, theirs) == [("a", "a"), ("b", "p"), ("c", "q")]


@pytest.mark.parametrize("sides", [([], [end("a")]), ([end("a")], []), ([], [])])
def test_nothing_pairs_with_nobody(sides: tuple[list[RailEnd], list[RailEnd]]) -> None:
    assert pair_rails(*sides) == ()


def test_tcp_addresses_pair_within_our_networks() -> None:
    interfaces = {"eth0": ["10.1.0.1/24"], "eth1": ["10.2.0.1/24", "fd00::1/64"]}
    ours, theirs = ["10.1.0.1", "10.2.0.1"], ["10.2.0.9", "10.1.0.9"]
    assert pair_addresses(ours, theirs, interfaces) == ((0, 1), (1, 0))
    # Without knowing networks, and for names, the order decides; the longer side is used up.
    assert pair_addresses(["a", "b"], ["x", "y", "z"], {}) == ((0, 0), (1, 1), (1, 2))
    assert pair_addresses(["a", "b", "c"], ["x"], {}) == ((0, 0), (1, 0), (2, 0))


def test_whether_an_address_is_a_neighbours() -> None:
    interfaces = {"eth0": ["10.1.0.1/24"], "eth1": ["10.2.0.1/32"]}
    assert share_network("10.1.0.1", "10.1.0.77", interfaces)
    assert not share_network("10.1.0.1", "10.2.0.77", interfaces)
    assert not share_network("10.2.0.1", "10.2.0.1", interfaces), "a network of one tells nothing"
    assert not share_network("10.3.0.1", "10.3.0.2", interfaces)
    assert not share_network("10.1.0.1", "a-host", interfaces)
