"""What readers and holders of expert weights tell each other; see `elastic.peer_experts`."""

from __future__ import annotations

from typing import Final

import msgspec

from elastic.errors import RecordInvalid
from elastic.expert_source import ExpertId

PREFIX: Final = b"elastic.expert:"


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """One expert in one of the offered slabs."""

    layer: int
    logical: int
    key_index: int
    offset: int
    nbytes: int
    checksum: int


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Which of these (layer, logical) pairs do you have?"""

    request: int
    experts: tuple[ExpertId, ...]


class Have(msgspec.Struct, frozen=True, tag="have"):
    """These, in slabs that you may read with these keys until you say `Done`."""

    request: int
    keys: tuple[bytes, ...]
    pieces: tuple[Piece, ...]


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The keys of that request are not needed any more."""

    request: int


Message = Ask | Have | Done
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Return the payload of a notify."""
    return PREFIX + _encoder.encode(message)


def decode(payload: bytes) -> Message:
    """Read the payload of a notify that begins with `PREFIX`.

    Raises:
        RecordInvalid: It is no such message.
    """
    try:
        return _decoder.decode(memoryview(payload)[len(PREFIX) :])
    except msgspec.MsgspecError as error:
        raise RecordInvalid(what="expert message", problem=str(error)) from None
