"""Whether a neighbour answers, asked before the kernel would wait for it.

Connecting a queue pair makes the kernel resolve the other device's Ethernet address, for up to a
second, and pyverbs keeps every Python thread from running meanwhile. A rail that was cut would
so stop the whole process at each attempt to open it again. So an IPv4 neighbour that the kernel
has failed to find is not waited for: a datagram makes the kernel look again in the background,
and the attempt fails at once, to be repeated after the rail's back-off.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from pathlib import Path
from typing import Final

from transfer.backends.verbs.device import Device
from transfer.backends.verbs.messages import End

NEIGHBOURS: Final = Path("/proc/net/arp")
COMPLETE: Final = 0x2
DISCARD_PORT: Final = 9


def check_reachable(device: Device, end: End) -> None:
    """Return if connecting will not take long, as far as one can know.

    Raises:
        ConnectionError: the kernel has looked for the neighbour in vain; it looks again.
    """
    ours, theirs = _ipv4(device.gid), _ipv4(end.gid)
    if device.is_infiniband or ours is None or theirs is None or ours == theirs:
        return
    if _was_missed(theirs, device.interface):
        _ask(theirs, device.interface)
        raise ConnectionError(f"{theirs} does not answer on {device.interface}")


def _ipv4(gid: str) -> str | None:
    mapped = ipaddress.IPv6Address(gid).ipv4_mapped
    return None if mapped is None else str(mapped)


def _was_missed(address: str, interface: str) -> bool:
    for line in NEIGHBOURS.read_text(encoding="ascii").splitlines()[1:]:
        fields = line.split()
        if fields[0] == address and fields[-1] == interface:
            return not int(fields[2], 16) & COMPLETE
    return False


def _ask(address: str, interface: str) -> None:
    # What fails here is told by the kernel when the pair is connected.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
        sock.setblocking(False)
        # Routes may lead over another card of the same network.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode())
        sock.sendto(b"", (address, DISCARD_PORT))
