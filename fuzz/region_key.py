"""The bytes of a key, wherever a user got them from."""

from __future__ import annotations

from transfer.errors import ProtocolViolation
from transfer.memory.region import TOKEN_BYTES, RegionKey


def seeds() -> list[bytes]:
    """A key, and a key with more behind it than there should be."""
    key = RegionKey("owner", b"t" * TOKEN_BYTES, 1 << 40, 3, True).encode()
    return [key, bytes([key[0] + 1]) + key[1:] + b"\x91" * 500]


def run(data: bytes) -> None:
    """One input."""
    try:
        key = RegionKey.decode(data)
    except ProtocolViolation:
        return
    assert len(key.token) == TOKEN_BYTES
    assert 0 <= key.nbytes < 2**63
    assert RegionKey.decode(key.encode()) == key
