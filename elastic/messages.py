"""What members tell each other by `TransferEngine.notify`, beside the data path.

    PREFIX | MessagePack of one tagged struct

Messages name the epoch they are about. One of an older epoch is dropped; offers and readies of a
later epoch are kept, because they may overtake the announcement of that epoch's view.
"""

from __future__ import annotations

import msgspec

from elastic.errors import RecordInvalid

PREFIX = b"elastic.view:"


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Drop the pass of this epoch: these members are suspected, or (none) it must start anew."""

    epoch: int
    suspects: tuple[str, ...]
    evidence: str


class Committed(msgspec.Struct, frozen=True, tag="committed"):
    """This view is the record now (JSON of `View.encode`)."""

    epoch: int
    view: bytes


class Offer(msgspec.Struct, frozen=True, tag="offer"):
    """The sender's receive windows for the addressee; `ready` also says what `Ready` says."""

    epoch: int
    payload: bytes
    ready: bool


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The sender has its experts of this epoch in memory."""

    epoch: int


class Probe(msgspec.Struct, frozen=True, tag="probe"):
    """Are you running? Answered by the engine's thread, not by the rank loop."""

    epoch: int


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """The answer to a `Probe`."""

    epoch: int


Message = Abort | Committed | Offer | Ready | Probe | Alive

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Return the notify payload of a message."""
    return PREFIX + _encoder.encode(message)


def decode(payload: bytes) -> Message | None:
    """Read a notify payload; None if it is not one of these messages at all.

    Raises:
        RecordInvalid: It has the prefix but is not understood.
    """
    if not payload.startswith(PREFIX):
        return None
    try:
        return _decoder.decode(memoryview(payload)[len(PREFIX) :])
    except msgspec.MsgspecError as error:
        raise RecordInvalid(what="membership message", problem=str(error)) from None
