"""Notes between clients and nodes, by `TransferEngine.notify`.

    PREFIX | MessagePack of one tagged struct

Clients and nodes share an engine in every worker, so the prefix tells for whom a note is.
"""

from __future__ import annotations

import msgspec

from kvstore.wire.messages import HeldBlocks, Key

TO_NODE = b"kvstore.node:"
TO_CLIENT = b"kvstore.client:"


class AskSegment(msgspec.Struct, frozen=True, tag="ask_segment"):
    """Offer me one of your segments. `ask_id` comes back in the answer.

    `for_copies`: the asker's node asks, and is answered; not the client on the same engine.
    """

    ask_id: int
    segment: int = 0
    for_copies: bool = False


class Written(msgspec.Struct, frozen=True, tag="written"):
    """These blocks lie in your segment now; remember them for the day the master forgets."""

    held: HeldBlocks
    segment: int = 0


class Unwritten(msgspec.Struct, frozen=True, tag="unwritten"):
    """A block that the same writer said lies here is none: its name was taken. Forget it."""

    key: Key
    offset: int
    segment: int = 0


class OfferSegment(msgspec.Struct, frozen=True, tag="offer_segment"):
    """The key to the sender's segment, for the addressee alone."""

    ask_id: int
    region_key: bytes


NodeNote = AskSegment | Written | Unwritten | OfferSegment

_encoder = msgspec.msgpack.Encoder()
_node_decoder: msgspec.msgpack.Decoder[NodeNote] = msgspec.msgpack.Decoder(NodeNote)
_client_decoder: msgspec.msgpack.Decoder[OfferSegment] = msgspec.msgpack.Decoder(OfferSegment)


def encode_to_node(note: NodeNote) -> bytes:
    """Return the notify payload of a note to a node."""
    return TO_NODE + _encoder.encode(note)


def encode_to_client(note: OfferSegment) -> bytes:
    """Return the notify payload of a note to a client."""
    return TO_CLIENT + _encoder.encode(note)


def decode_to_node(payload: bytes) -> NodeNote:
    """Read a payload that starts with `TO_NODE`. Raises msgspec.MsgspecError."""
    return _node_decoder.decode(memoryview(payload)[len(TO_NODE) :])


def decode_to_client(payload: bytes) -> OfferSegment:
    """Read a payload that starts with `TO_CLIENT`. Raises msgspec.MsgspecError."""
    return _client_decoder.decode(memoryview(payload)[len(TO_CLIENT) :])
