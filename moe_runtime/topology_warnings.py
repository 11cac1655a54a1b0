"""What is wrong or suspicious about a machine's topology, and what to do about it. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from transfer.rails.preference import port_gbps
from transfer.topology.machine import (
    Distance,
    InterfaceKind,
    NetworkInterface,
    PciPlace,
    RdmaDevice,
    RdmaPort,
    Topology,
)

# RDMA packets carry 256 ... 4096 bytes; with headers 4096 needs this much of Ethernet.
ROCE_MTU_MIN: Final = 4200
# A link that carries less than this part of the NIC's speed holds it back.
LINK_SHARE_MIN: Final = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyWarning:
    """One thing to look at.

    Attributes:
        device: what it is about.
        problem: what was seen.
        remedy: what to do.
    """

    device: str
    problem: str
    remedy: str


def topology_warnings(topology: Topology) -> tuple[TopologyWarning, ...]:
    """Look at everything, NICs first. Devices with one problem and one remedy share a warning."""
    devices: dict[tuple[str, str], list[str]] = {}
    for warning in _all(topology):
        devices.setdefault((warning.problem, warning.remedy), []).append(warning.device)
    return tuple(
        TopologyWarning(device=", ".join(dict.fromkeys(names)), problem=problem, remedy=remedy)
        for (problem, remedy), names in devices.items()
    )


def _all(topology: Topology) -> Iterator[TopologyWarning]:
    for device in topology.rdma:
        for port in device.ports:
            yield from _port(topology, device, port)
        yield from _socket(topology, device)
        speeds = [port_gbps(topology, port) for port in device.ports if port.up]
        yield from _link(device.name, device.place, sum(speed or 0 for speed in speeds))
    for item in topology.interfaces:
        yield from _interface(topology, item)
    for gpu in topology.gpus:
        # Idle GPUs lower the speed of their link to save power, not its width.
        yield from _lanes(gpu.location or gpu.place.address, gpu.place)
        yield from _near_nic(topology, gpu.location, gpu.place)
    yield from _isolation(topology)
    yield from _nodes(topology)
    for note in topology.notes:
        path, _, what = note.partition(": ")
        yield TopologyWarning(
            device=path,
            problem=what,
            remedy="the value counts as unknown; if it matters, look at the file yourself",
        )


def _port(topology: Topology, device: RdmaDevice, port: RdmaPort) -> Iterator[TopologyWarning]:
    name = device.name if len(device.ports) == 1 else f"{device.name}:{port.number}"
    if not port.up:
        remedy = "check cable and switch port, or exclude it"
        if port.state in ("INIT", "ARMED"):
            infiniband = port.link_layer == "InfiniBand"
            missing = "a subnet manager running" if infiniband else "its interface up"
            remedy = f"the link is there but not set up: is {missing}?"
        yield TopologyWarning(
            device=name, problem=f"port is {port.state or 'in an unknown state'}", remedy=remedy
        )
        return
    if port.link_layer != "Ethernet":
        return
    for interface in filter(None, map(topology.interface, port.interfaces)):
        if interface.mtu is not None and interface.mtu < ROCE_MTU_MIN:
            yield TopologyWarning(
                device=name,
                problem=f"RoCE over {interface.name} with an MTU of {interface.mtu}: "
                f"packets of {_payload(interface.mtu)} bytes",
                remedy=f"ip link set {interface.name} mtu 9000, on switches and peers too",
            )
    if port.gids and all(gid.is_link_local for gid in port.gids):
        yield TopologyWarning(
            device=name,
            problem="RoCE without an IP address",
            remedy="give its interface an address; without one it reaches only its own link",
        )


def _payload(mtu: int) -> int:
    """Largest payload of an RDMA packet that fits, its headers (64 bytes at most) counted."""
    return max((size for size in (256, 512, 1024, 2048) if size + 64 <= mtu), default=0)


def _socket(topology: Topology, device: RdmaDevice) -> Iterator[TopologyWarning]:
    used = any(port.up for port in device.ports)
    if not topology.gpus or len(topology.nodes) < 2 or not used:
        return
    if all(
        topology.distance(device.place, gpu.place) is Distance.SYS
        and gpu.place.numa_node is not None
        for gpu in topology.gpus
    ) and (device.place.numa_node is not None):
        yield TopologyWarning(
            device=device.name,
            problem=f"on NUMA node {device.place.numa_node}, every GPU is on another one",
            remedy="move the card to a slot of the GPUs' socket",
        )


def _link(name: str, place: PciPlace, gbps: float) -> Iterator[TopologyWarning]:
    yield from _lanes(name, place)
    if place.link_gts and place.link_gts_max and place.link_gts < place.link_gts_max:
        yield TopologyWarning(
            device=name,
            problem=f"PCIe link at {place.link_gts:g} GT/s of {place.link_gts_max:g}",
            remedy="look for a slot or riser of an older generation, and in the firmware's setup",
        )
    if place.link_gbps and gbps * LINK_SHARE_MIN > place.link_gbps:
        yield TopologyWarning(
            device=name,
            problem=f"network {gbps:g} Gb/s, its PCIe link only {place.link_gbps:.0f}",
            remedy="use a slot with more or faster lanes; until then the link is the limit",
        )


def _lanes(name: str, place: PciPlace) -> Iterator[TopologyWarning]:
    width, most = place.link_width, place.link_width_max
    if width and most and width < most:
        yield TopologyWarning(
            device=name,
            problem=f"PCIe link x{width} of x{most}",
            remedy="reseat the card, or move it to a slot with all lanes wired",
        )


def _interface(topology: Topology, item: NetworkInterface) -> Iterator[TopologyWarning]:
    physical = item.kind is InterfaceKind.PHYSICAL
    if item.kind is InterfaceKind.BOND and len(item.active) < len(item.lower):
        idle = ", ".join(name for name in item.lower if name not in item.active)
        yield TopologyWarning(
            device=item.name,
            problem=f"bond without {idle}",
            remedy="check their cables and switch ports; in mode active-backup this is as it is",
        )
    elif physical and not item.up and not item.master and item.addresses:
        problem = "no carrier" if item.carrier is False else f"is {item.state or 'not up'}"
        yield TopologyWarning(
            device=item.name, problem=f"has an address, but {problem}", remedy="check its cable"
        )
    card = item.place.address.partition(".")[0]
    told = any(device.place.address.partition(".")[0] == card for device in topology.rdma)
    if physical and item.up and not (card and told):
        yield from _link(item.name, item.place, item.gbps or 0)


def _near_nic(topology: Topology, location: str, place: PciPlace) -> Iterator[TopologyWarning]:
    up = [device for device in topology.rdma if any(port.up for port in device.ports)]
    if up and len(topology.nodes) > 1:
        nearest = min(topology.distance(place, device.place) for device in up)
        if nearest is Distance.SYS:
            yield TopologyWarning(
                device=location or place.address,
                problem="every RDMA device that is up is on another socket",
                remedy="bring up a NIC on its socket; all its traffic crosses the sockets",
            )


def _isolation(topology: Topology) -> Iterator[TopologyWarning]:
    """The kernel puts devices below one switch into groups of their own where ACS is on."""
    parted = [
        f"{gpu.location or gpu.place.address} from {device.name}"
        for gpu in topology.gpus
        for device in topology.rdma
        if (gpu.place.iommu_kind or "").startswith("DMA")
        and topology.distance(gpu.place, device.place) in (Distance.PIX, Distance.PXB)
        and device.place.iommu_group not in (None, gpu.place.iommu_group)
    ]
    if parted:
        yield TopologyWarning(
            device="IOMMU",
            problem="it translates, and ACS parts devices below one switch, so that GPUDirect "
            f"takes the way through the processor: {', '.join(parted)}",
            remedy="boot with iommu=pt, and switch ACS redirection off where no guest needs it",
        )


def _nodes(topology: Topology) -> Iterator[TopologyWarning]:
    if len(topology.nodes) < 2:
        return
    homeless = [
        device.name
        for device in topology.rdma
        if device.place.path and device.place.numa_node is None
    ]
    if homeless:
        yield TopologyWarning(
            device=", ".join(homeless),
            problem="no NUMA node told: counts as far from all memory",
            remedy="update the firmware, or let the hypervisor pass NUMA nodes on",
        )
