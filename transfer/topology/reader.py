"""Topology from /sys (and, where NVIDIA's driver is, /proc/driver/nvidia).

Nothing here raises for what a machine looks like: what is missing becomes None, and what makes no
sense a line in `Topology.notes`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Final

from transfer.rails.interface_addresses import interface_addresses, recorded_addresses
from transfer.topology.machine import (
    Gid,
    Gpu,
    InterfaceKind,
    NetworkInterface,
    NumaNode,
    PciPlace,
    RdmaDevice,
    RdmaPort,
    Topology,
)
from transfer.topology.sysfs import Sysfs, natural

_CLASS_IB: Final = "sys/class/infiniband"
_CLASS_NET: Final = "sys/class/net"
_PCI: Final = "sys/bus/pci/devices"
_NODES: Final = "sys/devices/system/node"
_NVIDIA: Final = "proc/driver/nvidia/gpus"
_GPU_VENDORS: Final = {0x10DE: "nvidia", 0x1002: "amd"}
# VGA-compatible and 3D controllers, "processing accelerators" (AMD's Instinct): class >> 8.
_GPU_CLASSES: Final = {0x0300, 0x0302, 0x0380, 0x1200}
_LOOPBACK_TYPE: Final = 772
_NO_GID: Final = "0000:0000:0000:0000:0000:0000:0000:0000"
_RATE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*Gb/sec")
_LINK_SPEED: Final = re.compile(r"(\d+(?:\.\d+)?)\s*GT/s")
_NODE_NAME: Final = re.compile(r"node(\d+)")
# In this order each is made of what comes before it.
_STACKED: Final = (InterfaceKind.BOND, InterfaceKind.VLAN, InterfaceKind.BRIDGE)
# A port's table has up to 256 entries, most of them empty.
_GIDS_MAX: Final = 256


def read_topology(
    root: str | os.PathLike[str] = "/",
    *,
    addresses: Mapping[str, Sequence[str]] | None = None,
    sysfs: Sysfs | None = None,
) -> Topology:
    """Read what a machine is made of.

    Args:
        root: "/" for this machine, or a folder with a recorded `sys/` (and perhaps `proc/`).
        addresses: IP addresses of each interface, as "10.0.0.5/24". If None: the kernel is asked
            for those of this machine; a recorded tree has them in `addresses.json`.
        sysfs: reads with this instead of with a reader of `root`.
    """
    tree = sysfs or Sysfs(root)
    if addresses is None:
        addresses = interface_addresses() if tree.root == "/" else recorded_addresses(tree)
    return Topology(
        nodes=_nodes(tree),
        gpus=_gpus(tree),
        rdma=tuple(_rdma_device(tree, name) for name in tree.names(_CLASS_IB)),
        interfaces=_interfaces(tree, addresses),
        notes=tuple(tree.notes),
    )


def _nodes(tree: Sysfs) -> tuple[NumaNode, ...]:
    numbers = [
        int(match[1]) for name in tree.names(_NODES) if (match := _NODE_NAME.fullmatch(name))
    ]
    nodes = []
    for number in sorted(numbers):
        folder = f"{_NODES}/node{number}"
        words = (tree.text(f"{folder}/distance") or "").split()
        if words and (len(words) != len(numbers) or not all(map(str.isdecimal, words))):
            tree.note(f"{folder}/distance", f"not one number a node: {' '.join(words)[:40]!r}")
            words = []
        distances = dict(zip(sorted(numbers), map(int, words), strict=False))
        cpus = tree.text(f"{folder}/cpulist") or ""
        nodes.append(NumaNode(number=number, cpus=cpus, distances=distances))
    # A kernel without NUMA has no such folder, and still has memory.
    return tuple(nodes) or (NumaNode(number=0, cpus="", distances={0: 10}),)


def _gpus(tree: Sysfs) -> tuple[Gpu, ...]:
    found: dict[str, list[tuple[str, PciPlace]]] = {}
    for address in sorted(tree.names(_PCI), key=_bus_order):
        vendor = _GPU_VENDORS.get(_hex(tree, f"{_PCI}/{address}/vendor"), "")
        if vendor and _hex(tree, f"{_PCI}/{address}/class") >> 8 in _GPU_CLASSES:
            place = _place(tree, f"{_PCI}/{address}")
            found.setdefault(vendor, []).append((address, place))
    driven = set(tree.names(_NVIDIA))
    if driven:
        nvidia = found.get("nvidia", [])
        found["nvidia"] = [item for item in nvidia if item[0] in driven]
        for address in sorted(driven - {item[0] for item in nvidia}):
            tree.note(f"{_NVIDIA}/{address}", "not among the PCI devices")
    counted = "nvidia" if found.get("nvidia") else "amd"
    gpus = []
    for vendor in sorted(found, key=lambda name: name != counted):
        for i, (address, place) in enumerate(found[vendor]):
            gpus.append(
                Gpu(
                    location=f"cuda:{i}" if vendor == counted else "",
                    vendor=vendor,
                    model=_model(tree, address) if vendor == "nvidia" else "",
                    place=place,
                )
            )
    return tuple(gpus)


def _bus_order(address: str) -> tuple[int, ...]:
    """Sort key of PCI addresses, whose numbers are hexadecimal."""
    return tuple(int(part, 16) for part in re.findall(r"[0-9a-f]+", address))


def _model(tree: Sysfs, address: str) -> str:
    """Name of a GPU. The file has its serial numbers too, so only this line is taken."""
    for line in tree.lines(f"{_NVIDIA}/{address}/information", keep="Model"):
        return line.partition(":")[2].strip()
    return ""


def _hex(tree: Sysfs, path: str) -> int:
    return tree.number(path) or 0


def _place(tree: Sysfs, device: str) -> PciPlace:
    """Where a device hangs, by the path of its folder or of a link to it."""
    path = tree.resolve(device)
    if path is None or not path.startswith("sys/devices/"):
        return PciPlace()
    node = tree.number(f"{device}/numa_node")
    place = PciPlace(path=path.removeprefix("sys/devices/"))
    # A virtio device sits on a PCI function: the link and the group are the function's.
    function = path[: path.index(place.address) + len(place.address)] if place.address else path
    if node is None and function != path:
        node = tree.number(f"{function}/numa_node")
    group = tree.resolve(f"{function}/iommu_group") or ""
    return PciPlace(
        path=place.path,
        numa_node=node if node is not None and node >= 0 else None,
        link_width=_lanes(tree, f"{function}/current_link_width"),
        link_width_max=_lanes(tree, f"{function}/max_link_width"),
        link_gts=_gts(tree, f"{function}/current_link_speed"),
        link_gts_max=_gts(tree, f"{function}/max_link_speed"),
        iommu_group=int(name) if (name := os.path.basename(group)).isdecimal() else None,
        iommu_kind=tree.text(f"{group}/type") if group else None,
    )


def _lanes(tree: Sysfs, path: str) -> int | None:
    lanes = tree.number(path)
    # 0 and 255 are how bridges and virtual functions say "unknown".
    return lanes if lanes is not None and 0 < lanes < 255 else None


def _gts(tree: Sysfs, path: str) -> float | None:
    match = _LINK_SPEED.match(tree.text(path) or "")
    return float(match[1]) if match else None


def _rdma_device(tree: Sysfs, name: str) -> RdmaDevice:
    folder = f"{_CLASS_IB}/{name}"
    numbers = [int(n) for n in tree.names(f"{folder}/ports") if n.isdecimal()]
    on_device = tree.names(f"{folder}/device/net")
    ports = tuple(
        _rdma_port(tree, f"{folder}/ports/{number}", number, on_device if len(numbers) == 1 else ())
        for number in sorted(numbers)
    )
    if not ports:
        tree.note(f"{folder}/ports", "no ports")
    return RdmaDevice(
        name=name,
        place=_place(tree, f"{folder}/device"),
        ports=ports,
        is_virtual_function=tree.resolve(f"{folder}/device/physfn") is not None,
    )


def _rdma_port(tree: Sysfs, folder: str, number: int, on_device: tuple[str, ...]) -> RdmaPort:
    rate = _RATE.match(tree.text(f"{folder}/rate") or "")
    gids = _gids(tree, folder)
    named = tuple(dict.fromkeys(gid.interface for gid in gids if gid.interface))
    return RdmaPort(
        number=number,
        # "4: ACTIVE"
        state=(tree.text(f"{folder}/state") or "").rpartition(":")[2].strip(),
        gbps=float(rate[1]) if rate else None,
        link_layer=tree.text(f"{folder}/link_layer") or "",
        gids=gids,
        interfaces=named or on_device,
    )


def _gids(tree: Sysfs, folder: str) -> tuple[Gid, ...]:
    found = []
    for name in tree.names(f"{folder}/gids")[:_GIDS_MAX]:
        gid = tree.text(f"{folder}/gids/{name}")
        if not name.isdecimal() or gid in (None, "", _NO_GID):
            continue
        if not re.fullmatch(r"([0-9a-f]{4}:){7}[0-9a-f]{4}", gid or ""):
            tree.note(f"{folder}/gids/{name}", f"no GID: {gid!r:.60}")
            continue
        found.append(
            Gid(
                idx=int(name),
                gid=gid or "",
                kind=tree.text(f"{folder}/gid_attrs/types/{name}") or "",
                interface=tree.text(f"{folder}/gid_attrs/ndevs/{name}") or "",
            )
        )
    return tuple(found)


def _interfaces(
    tree: Sysfs, addresses: Mapping[str, Sequence[str]]
) -> tuple[NetworkInterface, ...]:
    # "bonding_masters" is a file among the folders.
    names = [n for n in tree.names(_CLASS_NET) if tree.resolve(f"{_CLASS_NET}/{n}/type")]
    table = {name: _interface(tree, name, tuple(addresses.get(name, ()))) for name in names}
    for kind in _STACKED:
        for item in [item for item in table.values() if item.kind is kind]:
            table[item.name] = _stacked(tree, item, table)
    return tuple(table.values())


def _interface(tree: Sysfs, name: str, addresses: tuple[str, ...]) -> NetworkInterface:
    folder = f"{_CLASS_NET}/{name}"
    carrier = tree.number(f"{folder}/carrier")
    speed = tree.number(f"{folder}/speed")
    members = tree.names(folder)
    lower = [m for m in members if m.startswith("lower_") and tree.resolve(f"{folder}/{m}")]
    master = tree.resolve(f"{folder}/master")
    return NetworkInterface(
        name=name,
        kind=_kind(tree, folder),
        place=_place(tree, f"{folder}/device") if "device" in members else PciPlace(),
        # -1 and 2**32 - 1 are two ways to say "unknown", in Mb/s.
        gbps=speed / 1000 if speed is not None and 0 < speed < 1 << 31 else None,
        mtu=tree.number(f"{folder}/mtu"),
        state=tree.text(f"{folder}/operstate") or "",
        carrier=None if carrier is None else bool(carrier),
        master=os.path.basename(master) if master else "",
        lower=tuple(sorted((m.removeprefix("lower_") for m in lower), key=natural)),
        addresses=addresses,
    )


def _kind(tree: Sysfs, folder: str) -> InterfaceKind:
    if tree.number(f"{folder}/type") == _LOOPBACK_TYPE:
        return InterfaceKind.LOOPBACK
    marks = {"bonding": InterfaceKind.BOND, "bridge": InterfaceKind.BRIDGE}
    for mark, kind in marks.items():
        if tree.resolve(f"{folder}/{mark}"):
            return kind
    if any(line == "DEVTYPE=vlan" for line in tree.lines(f"{folder}/uevent", keep="DEVTYPE")):
        return InterfaceKind.VLAN
    where = tree.resolve(folder) or ""
    if where.startswith("sys/devices/virtual/"):
        return InterfaceKind.VIRTUAL
    return InterfaceKind.PHYSICAL


def _stacked(
    tree: Sysfs, item: NetworkInterface, plain: Mapping[str, NetworkInterface]
) -> NetworkInterface:
    """Give an interface that is made of others their place and, if it is a bond, their speed."""
    lower = _lower(tree, item, plain)
    active = tuple(name for name in lower if plain[name].up)
    gbps = item.gbps
    if item.kind is InterfaceKind.BOND:
        mode = (tree.text(f"{_CLASS_NET}/{item.name}/bonding/mode") or "").partition(" ")[0]
        if mode == "active-backup":
            chosen = tree.text(f"{_CLASS_NET}/{item.name}/bonding/active_slave")
            active = tuple(name for name in active if name == chosen)
        gbps = _sum([plain[name].gbps for name in active]) or item.gbps
    elif gbps is None:
        gbps = _sum([plain[name].gbps for name in active])
    return NetworkInterface(
        name=item.name,
        kind=item.kind,
        place=_shared_place([plain[name].place for name in active or lower]),
        gbps=gbps,
        mtu=item.mtu,
        state=item.state,
        carrier=item.carrier,
        master=item.master,
        lower=lower,
        active=active,
        addresses=item.addresses,
    )


def _lower(
    tree: Sysfs, item: NetworkInterface, plain: Mapping[str, NetworkInterface]
) -> tuple[str, ...]:
    """Names of what it is made of that are there; links first, the bond's own list else."""
    named = item.lower or tuple(
        (tree.text(f"{_CLASS_NET}/{item.name}/bonding/slaves") or "").split()
    )
    for name in named:
        if name not in plain:
            tree.note(f"{_CLASS_NET}/{item.name}", f"made of {name}, which is not there")
    return tuple(name for name in named if name in plain and name != item.name)


def _sum(speeds: Sequence[float | None]) -> float | None:
    known = [speed for speed in speeds if speed is not None]
    return sum(known) or None


def _shared_place(places: Sequence[PciPlace]) -> PciPlace:
    """The first place; its NUMA node only if all are on it."""
    real = [place for place in places if place.path]
    if not real:
        return PciPlace()
    if len({place.numa_node for place in real}) == 1:
        return real[0]
    return PciPlace()
