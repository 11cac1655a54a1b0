"""RDMA devices: found, opened, and what they can do."""

from __future__ import annotations

import ipaddress
import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pyverbs.device import Context, get_device_list

from transfer.backends.verbs.binding import (
    PyverbsError,
    PyverbsRDMAError,
    constant,
    error_text,
    give_up,
    is_event_file,
    opening,
)
from transfer.rails.interface_addresses import interface_addresses

logger = logging.getLogger(__name__)

GID_ENTRIES_MAX: Final = 256
PORTS: Final = "/sys/class/infiniband/{device}/ports/{port}"
ROCE_V2: Final = constant("GID_TYPE_ROCE_V2")
PORT_ACTIVE: Final = constant("PORT_ACTIVE")
INFINIBAND: Final = constant("LINK_LAYER_INFINIBAND")
# What ends a port's rails at once, without waiting for retries to run out.
FATAL_EVENTS: Final = {
    constant("EVENT_PORT_ERR"): "port down",
    constant("EVENT_DEVICE_FATAL"): "device failed",
}
# Completion channels and devices do not tell their descriptors (`binding.opening`): they are
# opened and closed one at a time.
opening_lock = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a device can do.

    Attributes:
        send_requests: work requests of one queue.
        pieces: scatter-gather elements of one request.
        message_bytes: largest message of the port.
        reads: reads that a queue pair may have under way, at either end.
        mtu: constant of the path's packet size.
    """

    send_requests: int
    pieces: int
    message_bytes: int
    reads: int
    mtu: int


class Device:
    """One port of an opened device.

    Attributes:
        name: "mlx5_0", or "mlx5_0:2" for another port than the first.
        gid, gid_idx: its address in RoCE packets, or the first one on InfiniBand.
        lid: its address on InfiniBand; 0 on RoCE.
        interface: the network interface that carries RoCE; "" on InfiniBand.
        event_fd: readable when `take_events` has something.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        device, _, port = name.partition(":")
        self.port = int(port or 1)
        with opening_lock:
            self.context, self._descriptors = opening(lambda: Context(name=device))
        self.event_fd = next(fd for fd in self._descriptors if is_event_file(fd))
        os.set_blocking(self.event_fd, False)
        try:
            self._look()
        except (PyverbsError, LookupError, OSError):
            self.close()
            raise

    def _look(self) -> None:
        attributes, port = self.context.query_device(), self.context.query_port(self.port)
        self.is_infiniband = port.link_layer == INFINIBAND
        self.lid = int(port.lid)
        self.limits = Limits(
            send_requests=int(attributes.max_qp_wr),
            pieces=int(min(attributes.max_sge, attributes.max_sge_rd or attributes.max_sge)),
            message_bytes=int(port.max_msg_sz),
            reads=int(min(attributes.max_qp_rd_atom, attributes.max_qp_init_rd_atom)),
            mtu=int(port.active_mtu),
        )
        self.gid, self.gid_idx = self._choose_gid()
        entry = PORTS.format(device=self.name.partition(":")[0], port=self.port)
        interface = Path(f"{entry}/gid_attrs/ndevs/{self.gid_idx}")
        self.interface = "" if self.is_infiniband else interface.read_text().strip()

    def _choose_gid(self) -> tuple[str, int]:
        """Prefer RoCE v2 with an IPv4 address, then one that is routed, then any."""
        best: tuple[int, str, int] | None = None
        for entry in self.context.query_gid_table(GID_ENTRIES_MAX):
            if entry.port_num != self.port:
                continue
            if not self.is_infiniband and entry.gid_type != ROCE_V2:
                continue
            gid = str(entry.gid_str())
            address = ipaddress.IPv6Address(gid)
            rank = 2 if address.is_link_local else 0 if address.ipv4_mapped else 1
            if best is None or rank < best[0]:
                best = rank, gid, int(entry.gid_index)
        if best is None:
            raise LookupError(f"{self.name} has no usable address (no RoCE v2 GID)")
        return best[1:]

    def fileno(self) -> int:
        """Return the descriptor of its events."""
        return self.event_fd

    @property
    def is_up(self) -> bool:
        """Whether the port can send."""
        try:
            return int(self.context.query_port(self.port).state) == PORT_ACTIVE
        except PyverbsError:
            return False

    @property
    def network(self) -> str:
        """Its address with the length of its network's prefix, "10.0.0.5/24", if that is known."""
        gid = ipaddress.IPv6Address(self.gid)
        if self.is_infiniband or gid.is_link_local:
            return f"{gid}/64"
        own = gid.ipv4_mapped or gid
        known = interface_addresses().get(self.interface, ())
        return next((a for a in known if ipaddress.ip_interface(a).ip == own), str(own))

    def take_events(self) -> list[str]:
        """Return what happened to the port that ends its rails; never waits."""
        found: list[str] = []
        while True:
            try:
                event = self.context.get_async_event()
            except PyverbsRDMAError:
                return found  # nothing (any more): the descriptor does not block
            kind = int(event.event_type)
            event.ack()
            if kind in FATAL_EVENTS:
                found.append(FATAL_EVENTS[kind])

    def close(self) -> None:
        """Close the device with everything on it."""
        with opening_lock:
            self.context.close()

    def abandon(self) -> None:
        """Give up the descriptors: in a forked child, whose parent goes on using them."""
        for descriptor in self._descriptors:
            give_up(descriptor)


def device_names() -> list[str]:
    """Return the devices of this machine, all ports, in natural order of names."""
    return sorted((str(device.name.decode()) for device in get_device_list()), key=_natural)


def open_devices(
    wanted: Sequence[str], unfit: Callable[[str], str]
) -> tuple[list[Device], list[tuple[str, str]]]:
    """Open the named devices; none named: all that are up and fit.

    Args:
        wanted: names.
        unfit: says why one is not to be used where none is named; "" if it is.

    Returns:
        The devices, and the names of the others, each with the reason why it is not used.

    Raises:
        PyverbsError, LookupError: a named one is not there, or has no address.
    """
    if wanted:
        rest = [(name, "not in `devices`") for name in device_names() if name not in wanted]
        return [Device(name) for name in wanted], rest
    found: list[Device] = []
    unused: list[tuple[str, str]] = []
    for name in device_names():
        if reason := unfit(name):
            unused.append((name, reason))
            continue
        try:
            device = Device(name)
        except (PyverbsError, LookupError) as error:
            text = error_text(error) if isinstance(error, PyverbsError) else error
            logger.warning("RDMA device %s is not used: %s", name, text)
            unused.append((name, str(text)))
            continue
        if device.is_up:
            found.append(device)
        else:
            unused.append((name, "down"))
            device.close()
    return found, unused


def _natural(name: str) -> tuple[str, int]:
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :] or 0)
