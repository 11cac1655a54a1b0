"""The form of an address, checked where it is read rather than when it is called."""

from __future__ import annotations

from typing import Final

PORT_MAX: Final = 65535


def check_address(address: str) -> str:
    """Return an address that is of the form `host:port`; an IPv6 host stands in brackets.

    Raises:
        ValueError: It is not.
    """
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    is_port = port.isascii() and port.isdigit() and 0 < int(port[:6]) <= PORT_MAX
    bracketed = bare is not host
    if not bare or not is_port or bare != "".join(bare.split()) or (":" in bare and not bracketed):
        raise ValueError(f"expected HOST:PORT, seen {address!r:.80}")
    return address
