"""Which host this is, and how its sockets are addressed."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Final

from transfer.arguments import check_type
from transfer.errors import AddressInvalid, PeerUnreachable

EXPECTED: Final = "expected HOST:PORT, with a port of 1 to 65535"


def host_identity() -> str:
    """Return a value equal for two processes exactly if they share kernel and network namespace.

    Abstract unix sockets, over which descriptors of memory travel, reach just that far.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"


def share_machine(one: str, other: str) -> bool:
    """Whether two `host_identity` share the kernel, in whatever network namespaces they are."""
    return one.partition("/")[0] == other.partition("/")[0]


def address_of(target: str) -> tuple[socket.AddressFamily, str | tuple[str, int]]:
    """Return family and address of "host:port", or of "@name" for an abstract unix socket.

    Raises:
        AddressInvalid: it is neither.
    """
    if target.startswith("@"):
        return socket.AF_UNIX, "\0" + target[1:]
    host, port = split(target)
    return (socket.AF_INET6 if ":" in host else socket.AF_INET), (host, port)


def split(target: str) -> tuple[str, int]:
    """Return host and port of "host:port".

    Raises:
        AddressInvalid: it is not of this form.
    """
    check_type("address", target, str)
    host, _, port = target.rpartition(":")
    host = host.strip("[]")
    is_port = port.isdecimal() and len(port) <= 5 and 0 < int(port) < 1 << 16
    if not is_port or not host.isprintable() or not host or " " in host:
        raise AddressInvalid(target[:80], EXPECTED)
    return host, int(port)


def resolve(target: str) -> str:
    """Return "host:port" with a numeric host. May block on the resolver.

    Raises:
        AddressInvalid: it is not of the form host:port, or no host can have this name.
        PeerUnreachable: the name is not known.
    """
    host, port = split(target)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except ValueError as error:
        raise AddressInvalid(target[:80], EXPECTED) from error
    except OSError as error:
        raise PeerUnreachable(target[:80], f"unreachable: {error}") from error
    return f"{found[0][4][0]}:{port}"
