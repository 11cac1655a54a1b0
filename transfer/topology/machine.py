"""What a machine is made of, as far as moving bytes goes: NICs, GPUs, NUMA nodes, distances.

`transfer.topology.reader` fills it from /sys; `transfer.rails.preference` draws rails from it.
Values are frozen; None is "the machine does not say".

Distances are those of `nvidia-smi topo -m`, found by comparing where two devices hang:

    PIX   below one PCIe switch (or one card), with nothing but its ports between
    PXB   below one PCIe switch, with further bridges between
    PHB   below one host bridge: through the processor's root complex
    NODE  on one NUMA node, below different host bridges
    SYS   on different NUMA nodes, or nobody knows
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Final

_HOST_BRIDGE: Final = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")
_PCI_FUNCTION: Final = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
# What the firmware's tables say for a node's own memory, and where they say nothing for another's.
LOCAL_NODE: Final = 10
REMOTE_NODE: Final = 20


class Distance(IntEnum):
    """How far apart two devices are; more is farther."""

    SELF = 0
    PIX = 1
    PXB = 2
    PHB = 3
    NODE = 4
    SYS = 5


class InterfaceKind(StrEnum):
    """What a network interface is."""

    PHYSICAL = "physical"
    BOND = "bond"
    VLAN = "vlan"
    BRIDGE = "bridge"
    VIRTUAL = "virtual"
    LOOPBACK = "loopback"


@dataclass(frozen=True, slots=True, kw_only=True)
class PciPlace:
    """Where a device is plugged in.

    Attributes:
        path: relative path below sys/devices, host bridge and bridges included; "" = not on PCIe.
        numa_node: None where the firmware does not say (virtual machines: -1).
        link_width: lanes in use, of `link_width_max`.
        link_gts: transfers a second and lane in use, in 1e9, of `link_gts_max`.
        iommu_group: number; None = the IOMMU is off, or hidden.
        iommu_kind: "DMA", "DMA-FQ" (addresses are translated), "identity" (they are not) or None.
    """

    path: str = ""
    numa_node: int | None = None
    link_width: int | None = None
    link_width_max: int | None = None
    link_gts: float | None = None
    link_gts_max: float | None = None
    iommu_group: int | None = None
    iommu_kind: str | None = None

    @property
    def address(self) -> str:
        """PCI address of the function, as 0000:18:00.0; "" if it has none."""
        functions = [part for part in self.path.split("/") if _PCI_FUNCTION.fullmatch(part)]
        return functions[-1] if functions else ""

    @property
    def chain(self) -> tuple[str, ...]:
        """Host bridge, bridges, device, from the root down; () if it is not on PCIe."""
        parts = self.path.split("/")
        bridges = [i for i, part in enumerate(parts) if _HOST_BRIDGE.fullmatch(part)]
        if not bridges:
            return ()
        below = [part for part in parts[bridges[-1] :] if _PCI_FUNCTION.fullmatch(part)]
        return ("/".join(parts[: bridges[-1] + 1]), *below)

    @property
    def link_gbps(self) -> float | None:
        """What the PCIe link carries one way at most, in Gb/s, its line code taken off."""
        if not self.link_width or not self.link_gts:
            return None
        code = 0.8 if self.link_gts <= 5 else 128 / 130
        return self.link_width * self.link_gts * code


@dataclass(frozen=True, slots=True, kw_only=True)
class Gid:
    """One address of an RDMA port.

    Attributes:
        idx: what queue pairs name it by.
        gid: sixteen bytes, as eight groups of hex digits.
        kind: "IB/RoCE v1" or "RoCE v2"; "" if not told.
        interface: the network interface it belongs to; "" if not told.
    """

    idx: int
    gid: str
    kind: str
    interface: str

    @property
    def ipv4(self) -> str | None:
        """The IPv4 address it is made of, if it is."""
        if not self.gid.startswith("0000:0000:0000:0000:0000:ffff:"):
            return None
        digits = self.gid.replace(":", "")[-8:]
        return ".".join(str(int(digits[i : i + 2], 16)) for i in range(0, 8, 2))

    @property
    def is_link_local(self) -> bool:
        """Whether it reaches no farther than the link."""
        return self.gid.startswith("fe80:")


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaPort:
    """One port of an RDMA device.

    Attributes:
        number: from 1.
        state: "ACTIVE", "DOWN", "INIT" ...; "" if not told.
        gbps: rate as the driver tells it.
        link_layer: "InfiniBand" or "Ethernet" (RoCE); "" if not told.
        interfaces: network interfaces on this port.
    """

    number: int
    state: str
    gbps: float | None
    link_layer: str
    gids: tuple[Gid, ...] = ()
    interfaces: tuple[str, ...] = ()

    @property
    def up(self) -> bool:
        """Whether data can be sent."""
        return self.state == "ACTIVE"


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaDevice:
    """One device of /sys/class/infiniband; a RoCE bond of two ports is one device."""

    name: str
    place: PciPlace
    ports: tuple[RdmaPort, ...]
    is_virtual_function: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkInterface:
    """One network interface.

    Attributes:
        gbps: speed of the link; of a bond the sum of its active slaves. None = not told.
        mtu: bytes.
        state: `operstate`: "up", "down", "unknown" ...
        carrier: whether a link is there; None = not told (down by the administrator).
        master: the bond or bridge it is part of; "" if it is its own.
        lower: interfaces it is made of: slaves of a bond, ports of a bridge, base of a vlan.
        active: those of `lower` that carry traffic now.
        addresses: IP addresses with the length of the network's prefix, link-local ones left out.
    """

    name: str
    kind: InterfaceKind
    place: PciPlace
    gbps: float | None
    mtu: int | None
    state: str
    carrier: bool | None
    master: str = ""
    lower: tuple[str, ...] = ()
    active: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()

    @property
    def up(self) -> bool:
        """Whether data can be sent. Drivers of virtual interfaces report "unknown" while up."""
        return self.state in ("up", "unknown") and self.carrier is not False


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU.

    Attributes:
        location: "cuda:3": where CUDA counts it under CUDA_DEVICE_ORDER=PCI_BUS_ID with all
            GPUs visible; "" for GPUs of a second vendor.
        vendor: "nvidia" or "amd".
        model: name as the driver tells it; "" if it does not.
    """

    location: str
    vendor: str
    model: str
    place: PciPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaNode:
    """One NUMA node.

    Attributes:
        cpus: as the kernel writes them, "0-55,112-167".
        distances: to each node, by its number; 10 is the node's own memory.
    """

    number: int
    cpus: str
    distances: dict[int, int] = field(default_factory=dict)

    @property
    def location(self) -> str:
        """Name of its memory: "cpu:0"."""
        return f"cpu:{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """A machine.

    Attributes:
        notes: what could not be read or made no sense.
    """

    nodes: tuple[NumaNode, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    rdma: tuple[RdmaDevice, ...] = ()
    interfaces: tuple[NetworkInterface, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def locations(self) -> tuple[str, ...]:
        """Names of all memories: "cpu:0", ..., "cuda:0", ..."""
        return (*(n.location for n in self.nodes), *(g.location for g in self.gpus if g.location))

    def interface(self, name: str) -> NetworkInterface | None:
        """Find an interface by its name."""
        return next((item for item in self.interfaces if item.name == name), None)

    def place(self, location: str) -> PciPlace | None:
        """Return where a memory is; None if this machine has none of that name."""
        for node in self.nodes:
            if node.location == location:
                return PciPlace(numa_node=node.number)
        return next((gpu.place for gpu in self.gpus if gpu.location == location), None)

    def location_of(self, pci_address: str) -> str | None:
        """Return the location of the GPU at a PCI address, as CUDA's `pci_bus_id` tells it.

        That holds whatever CUDA_VISIBLE_DEVICES has hidden or reordered.
        """
        wanted = pci_address.lower().lstrip("0")
        for gpu in self.gpus:
            if gpu.location and gpu.place.address.lstrip("0") == wanted:
                return gpu.location
        return None

    def distance(self, one: PciPlace, other: PciPlace) -> Distance:
        """Return how far two places are apart; the same both ways round."""
        ours, theirs = one.chain, other.chain
        shared = _shared(ours, theirs)
        if ours and ours == theirs:
            return Distance.SELF
        if shared > 1 or (shared and len(ours) == len(theirs) == 2 and _one_card(ours, theirs)):
            near = max(len(ours), len(theirs)) - shared <= 2
            return Distance.PIX if near else Distance.PXB
        if shared == 1:
            return Distance.PHB
        nodes = (self._node(one), self._node(other))
        return Distance.NODE if nodes[0] == nodes[1] is not None else Distance.SYS

    def hops(self, one: PciPlace, other: PciPlace) -> int:
        """Return the distance of two places' NUMA nodes in the firmware's terms; 10 = same."""
        ours, theirs = self._node(one), self._node(other)
        if ours is None or theirs is None:
            return REMOTE_NODE
        if ours == theirs:
            return LOCAL_NODE
        known = {node.number: node.distances for node in self.nodes}
        there = known.get(ours, {}).get(theirs, REMOTE_NODE)
        back = known.get(theirs, {}).get(ours, REMOTE_NODE)
        return max(there, back)

    def _node(self, place: PciPlace) -> int | None:
        if place.numa_node is None and len(self.nodes) == 1:
            return self.nodes[0].number
        return place.numa_node


def _shared(ours: tuple[str, ...], theirs: tuple[str, ...]) -> int:
    """How many links two chains have in common, from the root down."""
    pairs = zip(ours, theirs, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _one_card(ours: tuple[str, ...], theirs: tuple[str, ...]) -> bool:
    """Whether two devices right below the host bridge are functions of one card."""
    return ours[1].rpartition(".")[0] == theirs[1].rpartition(".")[0]
