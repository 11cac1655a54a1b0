"""Which host this is, and how its sockets are addressed."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from transfer.arguments import check_type
from transfer.errors import PeerUnreachable


def host_identity() -> str:
    """Return a value equal for two processes exactly if they share kernel and network namespace.

    Abstract unix sockets, over which descriptors of memory travel, reach just that far.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"


def address_of(target: str) -> tuple[socket.AddressFamily, str | tuple[str, int]]:
    """Return family and address of "host:port", or of "@name" for an abstract unix socket.

    Raises:
        PeerUnreachable: it is neither.
    """
    if target.startswith("@"):
        return socket.AF_UNIX, "\0" + target[1:]
    host, port = split(target)
    return (socket.AF_INET6 if ":" in host else socket.AF_INET), (host, port)


def split(target: str) -> tuple[str, int]:
    """Return host and port of "host:port".

    Raises:
        PeerUnreachable: it is not of this form.
    """
    check_type("address", target, str)
    host, _, port = target.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal() or len(port) > 5 or not 0 < int(port) < 1 << 16:
        raise PeerUnreachable(target[:80], "not of the form host:port")
    return host, int(port)


def resolve(target: str) -> str:
    """Return "host:port" with a numeric host. May block on the resolver.

    Raises:
        PeerUnreachable: the name is not known.
    """
    host, port = split(target)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise PeerUnreachable(target[:80], f"unreachable: {error}") from error
    return f"{found[0][4][0]}:{port}"
