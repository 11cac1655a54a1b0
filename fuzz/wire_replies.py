"""A reply header."""

from __future__ import annotations

from transfer.errors import ProtocolViolation
from transfer.wire import PAYLOAD_BYTES_MAX, REPLY, Reply, Status, parse_reply


def seeds() -> list[bytes]:
    """One reply of each status."""
    return [
        Reply(status=status, transfer_id=1, slice_idx=2, nbytes=3).encode() for status in Status
    ]


def run(data: bytes) -> None:
    """One input."""
    header = data[: REPLY.size]
    if len(header) < REPLY.size:
        return
    try:
        reply = parse_reply(header)
    except ProtocolViolation:
        return
    assert reply.nbytes <= PAYLOAD_BYTES_MAX
    assert reply.encode() == header
