"""Whether a neighbour answers, asked before the kernel would wait for it.

Connecting a queue pair makes the kernel resolve the other device's Ethernet address, for up to a
second, and pyverbs keeps every Python thread from running meanwhile. A rail that was cut would
so stop the whole process at each attempt to open it again. So an IPv4 neighbour is looked up
first: a datagram makes the kernel look for it, which takes well under a millisecond where it is
there. Where it is not, the attempt fails, to be repeated after the rail's back-off.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import time
from pathlib import Path
from typing import Final

from transfer.backends.verbs.device import Device
from transfer.backends.verbs.messages import End

NEIGHBOURS: Final = Path("/proc/net/arp")
COMPLETE: Final = 0x2
DISCARD_PORT: Final = 9
PATIENCE_S: Final = 0.05
LOOK_S: Final = 0.002


def check_reachable(device: Device, end: End) -> None:
    """Return if connecting will not take long, as far as one can know; waits `PATIENCE_S` at most.

    Raises:
        ConnectionError: the neighbour does not answer; the kernel goes on asking.
    """
    theirs = _ipv4(end.gid)
    if device.is_infiniband or theirs is None or theirs == _ipv4(device.gid):
        return
    if _is_known(theirs, device.interface):
        return
    _ask(theirs, device.interface)
    deadline = time.monotonic() + PATIENCE_S
    # None: it is not a neighbour but behind a router, which the kernel has to find.
    while _is_known(theirs, device.interface) is False:
        if time.monotonic() > deadline:
            raise ConnectionError(f"{theirs} does not answer on {device.interface}")
        time.sleep(LOOK_S)


def _ipv4(gid: str) -> str | None:
    mapped = ipaddress.IPv6Address(gid).ipv4_mapped
    return None if mapped is None else str(mapped)


def _is_known(address: str, interface: str) -> bool | None:
    """Whether a neighbour was found; None if the kernel has not looked for it."""
    for line in NEIGHBOURS.read_text(encoding="ascii").splitlines()[1:]:
        fields = line.split()
        if fields[0] == address and fields[-1] == interface:
            return bool(int(fields[2], 16) & COMPLETE)
    return None


def _ask(address: str, interface: str) -> None:
    # What fails here is told by the kernel when the pair is connected.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
        sock.setblocking(False)
        # Routes may lead over another card of the same network.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode())
        sock.sendto(b"", (address, DISCARD_PORT))
