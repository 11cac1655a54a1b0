"""The stream of a control connection, cut into portions by its own first bytes."""

from __future__ import annotations

from transfer.errors import ProtocolViolation
from transfer.wire import ControlKind, ControlParser, encode_control

_FRAME_BYTES_MAX = 256


def seeds() -> list[bytes]:
    """Frames of each kind behind one another."""
    stream = b"".join(b"".join(encode_control(kind, b"x" * 16)) for kind in ControlKind)
    return [b"\x03\x09" + stream, b"\xff\xff" + stream]


def run(data: bytes) -> None:
    """One input."""
    sizes, stream = [1 + byte for byte in data[:2]] or [1], data[2:]
    parser, frames, turn = ControlParser(_FRAME_BYTES_MAX), [], 0
    try:
        while stream:
            size = sizes[turn % len(sizes)]
            frames += parser.feed(stream[:size])
            stream, turn = stream[size:], turn + 1
            assert len(parser._buffer) <= _FRAME_BYTES_MAX + 5
    except ProtocolViolation:
        return
    whole = b"".join(b"".join(encode_control(kind, content)) for kind, content in frames)
    assert data[2:].startswith(whole)
