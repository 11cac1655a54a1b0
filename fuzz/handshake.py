"""A handshake machine is fed bytes: every one of them, in the portions it asks for."""

from __future__ import annotations

import contextlib
from typing import Any

from transfer.errors import HandshakeRefused, ProtocolViolation
from transfer.handshake import (
    MESSAGE_BYTES_MAX,
    AcceptorHandshake,
    DialerHandshake,
    Facts,
    Handshake,
    Purpose,
)

_FACTS = Facts(address="127.0.0.1:1", host="h", local_socket="s", shared_memory=True, tcp=True)


def _machines() -> tuple[DialerHandshake, AcceptorHandshake]:
    common: dict[str, Any] = {
        "secret": b"s", "facts": _FACTS, "admit": lambda *_: None, "sessions": lambda _: b"k" * 32,
    }  # fmt: skip
    return (
        DialerHandshake(name="dialer", **common),
        AcceptorHandshake(name="acceptor", **common),
    )


def seeds() -> list[bytes]:
    """Both sides' words of a whole conversation; the first byte chooses the listener."""
    dialer, acceptor = _machines()
    heard: dict[int, bytes] = {0: b"", 1: b""}
    message = dialer.start(Purpose.CONTROL)
    side = 1
    while message:
        heard[side] += message
        machine: Handshake = acceptor if side else dialer
        message = _feed(machine, message)
        if acceptor.done and side:
            message = acceptor.ready()
        side = 1 - side
    return [bytes([who]) + data for who, data in heard.items()]


def run(data: bytes) -> None:
    """One input."""
    if not data:
        return
    dialer, acceptor = _machines()
    dialer.start(Purpose.CONTROL)
    machine: Handshake = acceptor if data[0] & 1 else dialer
    with contextlib.suppress(HandshakeRefused, ProtocolViolation):
        _feed(machine, data[1:])
    # The secret's proof covers a fresh nonce: no input that was made before can be one.
    assert not machine.done
    assert machine.peer_facts is None
    assert len(machine._buffer) <= MESSAGE_BYTES_MAX + 2


def _feed(machine: Handshake, data: bytes) -> bytes:
    out = b""
    while data and not machine.done:
        portion, data = data[: machine.needed], data[machine.needed :]
        out += machine.feed(portion)
    return out
