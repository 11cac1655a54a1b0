"""A handshake machine is fed bytes: every one of them, in the portions it asks for."""

from __future__ import annotations

import contextlib
from typing import Any

from transfer.connections.handshake import (
    MESSAGE_BYTES_MAX,
    AcceptorHandshake,
    DialerHandshake,
    Facts,
    Handshake,
    Purpose,
)
from transfer.errors import HandshakeRefused, ProtocolViolation

_FACTS = Facts(address="127.0.0.1:1", host="h", local_socket="s", shared_memory=True, tcp=True)
_PURPOSES = tuple(Purpose)


def _machines() -> tuple[DialerHandshake, AcceptorHandshake]:
    common: dict[str, Any] = {
        "secret": b"s", "facts": _FACTS, "admit": lambda *_: None, "sessions": lambda _: b"k" * 32,
    }  # fmt: skip
    return (
        DialerHandshake(name="dialer", **common),
        AcceptorHandshake(name="acceptor", **common),
    )


def seeds() -> list[bytes]:
    """Both sides' words of whole conversations; the first byte chooses listener and purpose."""
    return [seed for idx in range(len(_PURPOSES)) for seed in _seeds_of(idx)]


def _seeds_of(idx: int) -> list[bytes]:
    dialer, acceptor = _machines()
    heard: dict[int, bytes] = {0: b"", 1: b""}
    message = dialer.start(_PURPOSES[idx])
    side = 1
    while message:
        heard[side] += message
        machine: Handshake = acceptor if side else dialer
        message = _feed(machine, message)
        if acceptor.done and side:
            message = acceptor.ready()
        side = 1 - side
    return [bytes([who + 2 * idx]) + data for who, data in heard.items()]


def run(data: bytes) -> None:
    """One input."""
    if not data:
        return
    dialer, acceptor = _machines()
    dialer.start(_PURPOSES[data[0] // 2 % len(_PURPOSES)])
    machine: Handshake = acceptor if data[0] & 1 else dialer
    with contextlib.suppress(HandshakeRefused, ProtocolViolation):
        _feed(machine, data[1:])
    # The secret's proof covers a fresh nonce: no input that was made before can be one.
    assert not machine.done
    assert machine.peer_facts is None
    assert machine.session == b""
    assert len(machine._buffer) <= MESSAGE_BYTES_MAX + 2


def _feed(machine: Handshake, data: bytes) -> bytes:
    out = b""
    while data and not machine.done:
        portion, data = data[: machine.needed], data[machine.needed :]
        out += machine.feed(portion)
    return out
