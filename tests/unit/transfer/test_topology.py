"""Recorded machines are read as they are; what they hide or garble is None or a note."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.machines import NAMES, machine, write_machine
from transfer.rails.interface_addresses import interface_addresses
from transfer.topology.machine import Distance, InterfaceKind, PciPlace, Topology
from transfer.topology.reader import read_topology
from transfer.topology.sysfs import Sysfs, natural

# As the makers of the machine publish it: each GPU with its own NIC, in CUDA's order.
OWN_NIC = {
    "0000:1b:00.0": "mlx5_0",
    "0000:43:00.0": "mlx5_3",
    "0000:52:00.0": "mlx5_4",
    "0000:61:00.0": "mlx5_5",
    "0000:9d:00.0": "mlx5_6",
    "0000:c3:00.0": "mlx5_9",
    "0000:d1:00.0": "mlx5_10",
    "0000:df:00.0": "mlx5_11",
}


def distances(topology: Topology, location: str) -> dict[str, str]:
    place = topology.place(location)
    assert place is not None
    return {nic.name: topology.distance(place, nic.place).name for nic in topology.rdma}


def test_two_sockets_have_eight_gpus_with_a_nic_each(tmp_path: Path) -> None:
    found = machine("two_sockets_8_gpus_8_nics", tmp_path)
    assert [(gpu.location, gpu.place.address) for gpu in found.gpus] == [
        (f"cuda:{i}", address) for i, address in enumerate(OWN_NIC)
    ]
    assert {gpu.model for gpu in found.gpus} == {"NVIDIA H100 80GB HBM3"}
    assert [node.cpus for node in found.nodes] == ["0-55,112-167", "56-111,168-223"]
    assert found.nodes[0].distances == {0: 10, 1: 21}
    for i, own in enumerate(OWN_NIC.values()):
        told = distances(found, f"cuda:{i}")
        first_socket = {f"mlx5_{n}" for n in range(6)}
        for nic, distance in told.items():
            same = (nic in first_socket) == (i < 4)
            assert distance == ("PXB" if nic == own else "NODE" if same else "SYS")
    assert found.notes == ()


def test_ports_and_links_of_the_two_socket_machine(tmp_path: Path) -> None:
    found = machine("two_sockets_8_gpus_8_nics", tmp_path)
    nics = {nic.name: nic for nic in found.rdma}
    assert list(nics) == [f"mlx5_{n}" for n in range(12)]
    port = nics["mlx5_10"].ports[0]
    assert (port.state, port.gbps, port.link_layer) == ("ACTIVE", 400.0, "InfiniBand")
    assert port.interfaces == ("ibp206s0",)
    assert port.gids[0].is_link_local
    assert not nics["mlx5_1"].ports[0].up
    place = nics["mlx5_0"].place
    assert (place.link_width, place.link_width_max, place.link_gts) == (16, 16, 32.0)
    assert place.link_gbps == pytest.approx(504, abs=1)
    assert (place.numa_node, place.iommu_kind) == (0, "identity")
    # The two ports of a storage card, and the two sockets.
    assert found.distance(nics["mlx5_1"].place, nics["mlx5_2"].place) is Distance.PIX
    assert found.hops(nics["mlx5_0"].place, nics["mlx5_6"].place) == 21


def test_a_cloud_machine_says_little(tmp_path: Path) -> None:
    found = machine("cloud_one_nic", tmp_path)
    assert found.gpus == found.rdma == ()
    nic = found.interface("ens5")
    assert nic is not None
    assert nic.up
    assert (nic.kind, nic.gbps, nic.mtu) == (InterfaceKind.PHYSICAL, None, 9001)
    assert nic.place.numa_node is None  # -1 in the file
    assert nic.addresses[0] == "172.31.16.20/20"
    # With one node there is no other.
    assert found.distance(PciPlace(numa_node=0), nic.place) is Distance.NODE
    bridge = found.interface("docker0")
    assert bridge is not None
    assert (bridge.kind, bridge.up) == (InterfaceKind.BRIDGE, False)


def test_a_bond_is_as_fast_as_its_active_slaves(tmp_path: Path) -> None:
    found = machine("bonded_nics", tmp_path)
    whole, half = found.interface("bond0"), found.interface("bond3")
    assert whole is not None
    assert half is not None
    assert (whole.kind, whole.gbps) == (InterfaceKind.BOND, 200.0)
    assert whole.lower == whole.active == ("ens10f0np0", "ens10f1np1")
    assert (half.gbps, half.active) == (100.0, ("ens13f0np0",))
    assert half.place.numa_node == 1
    slave = found.interface("ens13f1np1")
    assert slave is not None
    assert (slave.master, slave.up, slave.gbps) == ("bond3", False, None)
    gids = found.rdma[0].ports[0].gids
    assert [(gid.kind, gid.ipv4) for gid in gids if gid.ipv4] == [
        ("IB/RoCE v1", "10.20.0.7"),
        ("RoCE v2", "10.20.0.7"),
    ]


def test_an_active_backup_bond_is_as_fast_as_one(tmp_path: Path) -> None:
    root = write_machine("bonded_nics", tmp_path)
    bonding = root / "sys/class/net/bond0/bonding"
    (bonding / "mode").write_text("active-backup 1\n")
    (bonding / "active_slave").write_text("ens10f1np1\n")
    bond = read_topology(root).interface("bond0")
    assert bond is not None
    assert (bond.gbps, bond.active) == (100.0, ("ens10f1np1",))


def test_a_vlan_of_a_bond_has_its_place(tmp_path: Path) -> None:
    root = write_machine("bonded_nics", tmp_path)
    vlan = root / "sys/devices/virtual/net/bond0.7"
    vlan.mkdir()
    for name, text in {"type": "1", "uevent": "DEVTYPE=vlan", "operstate": "up"}.items():
        (vlan / name).write_text(text)
    (vlan / "lower_bond0").symlink_to("../bond0")
    (root / "sys/class/net/bond0.7").symlink_to("../../devices/virtual/net/bond0.7")
    found = read_topology(root)
    item, bond = found.interface("bond0.7"), found.interface("bond0")
    assert item is not None
    assert bond is not None
    assert item.kind is InterfaceKind.VLAN
    assert (item.gbps, item.place) == (200.0, bond.place)


def test_devices_that_are_down_are_read_all_the_same(tmp_path: Path) -> None:
    found = machine("devices_down", tmp_path)
    assert [nic.ports[0].state for nic in found.rdma] == ["ACTIVE", "DOWN", "INIT", "ACTIVE"]
    up = {item.name: item.up for item in found.interfaces}
    assert up == {
        "eno1": True, "eno2": False, "eth0": True, "eth1": False, "eth2": True, "eth3": True,
        "lo": True,
    }  # fmt: skip
    narrow = found.rdma[3].place
    assert (narrow.link_width, narrow.link_width_max) == (4, 16)
    assert "node0/distance: not one number a node" in found.notes[0]


def test_a_gpu_is_found_by_what_cuda_calls_it(tmp_path: Path) -> None:
    found = machine("two_sockets_8_gpus_8_nics", tmp_path)
    assert found.location_of("0000:C3:00.0") == "cuda:5"
    assert found.location_of("00000000:c3:00.0") == "cuda:5"
    assert found.location_of("0000:01:00.0") is None
    assert found.place("cuda:8") is None


def test_only_gpus_of_the_driver_count(tmp_path: Path) -> None:
    root = write_machine("two_sockets_8_gpus_8_nics", tmp_path)
    listed = root / "proc/driver/nvidia/gpus"
    (listed / "0000:1b:00.0").rename(listed / "0000:ff:00.0")
    found = read_topology(root)
    assert [gpu.place.address for gpu in found.gpus] == list(OWN_NIC)[1:]
    assert found.gpus[0].location == "cuda:0"
    assert "0000:ff:00.0: not among the PCI devices" in found.notes[0]


def test_bus_numbers_are_hexadecimal(tmp_path: Path) -> None:
    """As text with decimal runs in it, 9d would come before 43."""
    found = machine("two_sockets_8_gpus_8_nics", tmp_path)
    addresses = [gpu.place.address for gpu in found.gpus]
    assert addresses == sorted(addresses)


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("sys/class/infiniband/mlx5_0/ports/1/state", b"\xff\xfe"),
        ("sys/class/infiniband/mlx5_0/ports/1/rate", b"fast"),
        ("sys/class/infiniband/mlx5_0/ports/1/gids/0", b"fe80::1"),
        ("sys/class/net/ibp24s0/mtu", b"9k"),
        ("sys/class/net/ibp24s0/speed", b"4294967295"),
        ("sys/class/net/ibp24s0/carrier", b""),
        ("sys/devices/system/node/node1/distance", b"21"),
        ("sys/bus/pci/devices/0000:1b:00.0/numa_node", b"two"),
        ("sys/bus/pci/devices/0000:1b:00.0/class", b"0xzz"),
        ("sys/bus/pci/devices/0000:1b:00.0/current_link_width", b"255"),
        ("sys/bus/pci/devices/0000:1b:00.0/current_link_speed", b"Unknown"),
        ("addresses.json", b'{"ibp24s0": ["not an address"]}'),
        ("addresses.json", b"[1"),
        ("addresses.json", b'"text"'),
    ],
)
def test_nonsense_in_a_file_costs_only_that_value(
    path: str, content: bytes, tmp_path: Path
) -> None:
    root = write_machine("two_sockets_8_gpus_8_nics", tmp_path)
    (root / path).write_bytes(content)
    found = read_topology(root)
    assert len(found.rdma) == 12
    assert len(found.nodes) == 2
    assert len(found.gpus) == (7 if path.endswith("class") else 8)


@pytest.mark.parametrize("name", NAMES)
def test_any_file_may_be_missing_or_a_folder(name: str, tmp_path: Path) -> None:
    root = write_machine(name, tmp_path)
    files = sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    for path in files[:: max(1, len(files) // 25)]:
        content = path.read_bytes()
        path.unlink()
        read_topology(root)
        path.mkdir()
        read_topology(root)
        path.rmdir()
        path.write_bytes(content)


def test_a_tree_cannot_lead_out_of_itself_or_in_circles(tmp_path: Path) -> None:
    root = write_machine("cloud_one_nic", tmp_path)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/type").write_text("1")
    (root / "sys/class/net/out0").symlink_to(tmp_path / "outside")
    (root / "sys/class/net/loop0").symlink_to("loop0")
    found = read_topology(root)
    assert [item.name for item in found.interfaces] == ["docker0", "ens5", "lo"]
    assert any("out0/type: leads out of the tree" in note for note in found.notes)


def test_an_empty_machine_has_memory() -> None:
    empty = read_topology(os.devnull)
    assert empty.locations == ("cpu:0",)
    assert empty.interfaces == ()


def test_unreadable_files_are_noted(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    tree = Sysfs(tmp_path)
    assert tree.text("folder") is None
    assert tree.number("missing") is None
    assert tree.notes == ["folder: not readable: Is a directory"]


def test_names_sort_as_people_count() -> None:
    assert sorted(["mlx5_10", "mlx5_2", "eth0"], key=natural) == ["eth0", "mlx5_2", "mlx5_10"]


def test_this_machine_can_be_read() -> None:
    found = read_topology()
    assert found.nodes
    loopback = found.interface("lo")
    if loopback is not None:
        assert loopback.kind is InterfaceKind.LOOPBACK
        assert "127.0.0.1/8" in interface_addresses()["lo"]
        assert loopback.addresses == interface_addresses()["lo"]
    assert {item.name for item in found.interfaces} == {
        name for name in os.listdir("/sys/class/net") if os.path.isdir(f"/sys/class/net/{name}")
    }
