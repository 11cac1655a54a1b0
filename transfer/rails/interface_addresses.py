"""IP addresses of network interfaces: from the kernel, by netlink, since /sys has none."""

from __future__ import annotations

import ipaddress
import json
import socket
import struct
from typing import Final

from transfer.topology.sysfs import Sysfs

# Where a recorded tree has what netlink said: interface -> ["10.0.0.5/24", ...].
ADDRESSES_FILE: Final = "addresses.json"

_NETLINK_ROUTE: Final = 0
_DUMP: Final = 0x300
_REQUEST: Final = 1
_NEW_ADDRESS: Final = 20
_GET_ADDRESS: Final = 22
_DONE: Final = 3
_ERROR: Final = 2
_ADDRESS: Final = 1
_LOCAL: Final = 2
_HEADER: Final = struct.Struct("=IHHII")
_BODY: Final = struct.Struct("=BBBBI")
_ATTRIBUTE: Final = struct.Struct("=HH")
_LINK_SCOPE: Final = 253
_ANSWER_TIMEOUT_S: Final = 2.0


def interface_addresses() -> dict[str, tuple[str, ...]]:
    """Ask the kernel for each interface's IP addresses, as "10.0.0.5/24".

    Link-local ones are left out, for they mean nothing without the name of an interface.
    {} where the kernel does not answer.
    """
    found: dict[str, list[str]] = {}
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_ROUTE) as link:
            link.settimeout(_ANSWER_TIMEOUT_S)
            size = _HEADER.size + _BODY.size
            link.send(
                _HEADER.pack(size, _GET_ADDRESS, _REQUEST | _DUMP, 1, 0) + _BODY.pack(0, 0, 0, 0, 0)
            )
            while not _take(link.recv(1 << 16), found):
                pass
    except OSError:
        return {}
    return {name: tuple(addresses) for name, addresses in found.items()}


def _take(answer: bytes, found: dict[str, list[str]]) -> bool:
    """Add one datagram's addresses; True if it was the last."""
    offset = 0
    while offset + _HEADER.size <= len(answer):
        length, kind, _, _, _ = _HEADER.unpack_from(answer, offset)
        if kind in (_DONE, _ERROR) or length < _HEADER.size:
            return True
        if kind == _NEW_ADDRESS:
            _take_address(answer[offset + _HEADER.size : offset + length], found)
        offset += (length + 3) & ~3
    return not answer


def _take_address(message: bytes, found: dict[str, list[str]]) -> None:
    family, prefix, _, scope, idx = _BODY.unpack_from(message)
    if scope == _LINK_SCOPE:
        return
    values: dict[int, bytes] = {}
    offset = _BODY.size
    while offset + _ATTRIBUTE.size <= len(message):
        length, kind = _ATTRIBUTE.unpack_from(message, offset)
        if length < _ATTRIBUTE.size:
            return
        values[kind] = message[offset + _ATTRIBUTE.size : offset + length]
        offset += (length + 3) & ~3
    # On a point-to-point link the first is the other end's, the second ours.
    raw = values.get(_LOCAL, values.get(_ADDRESS))
    if raw is None or family not in (socket.AF_INET, socket.AF_INET6):
        return
    try:
        name = socket.if_indextoname(idx)
    except OSError:
        return  # gone since the dump began
    found.setdefault(name, []).append(f"{socket.inet_ntop(family, raw)}/{prefix}")


def recorded_addresses(tree: Sysfs) -> dict[str, tuple[str, ...]]:
    """Read the addresses that a recorded tree came with; what is malformed is noted."""
    text = tree.text(ADDRESSES_FILE)
    if text is None:
        return {}
    try:
        table = json.loads(text)
        return {
            str(name): tuple(str(ipaddress.ip_interface(address)) for address in addresses)
            for name, addresses in table.items()
        }
    except (ValueError, AttributeError, TypeError) as error:
        tree.note(ADDRESSES_FILE, f"not a table of addresses: {error}")
        return {}
