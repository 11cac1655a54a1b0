"""Notes between clients and nodes, by `TransferEngine.notify`.

    PREFIX | MessagePack of one tagged struct

Clients and nodes share an engine in every worker, so the prefix tells for whom a note is.
"""

from __future__ import annotations

import msgspec

from kvstore.wire.messages import Count, HeldBlocks, Key

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
    """These blocks lie in your segment now; remember them for the day the master forgets.

    `stamp`: when it was sent, in nanoseconds of the clock that is both ends'; 0: they share none.
    What is left in a mailbox has its stamp there.
    """

    held: HeldBlocks
    segment: int = 0
    stamp: int = 0


class Unwritten(msgspec.Struct, frozen=True, tag="unwritten"):
    """A block that the same writer said lies here is none: its name was taken. Forget it."""

    key: Key
    offset: int
    segment: int = 0
    stamp: int = 0


class Leader(msgspec.Struct, frozen=True, array_like=True):
    """An elected master that the sender follows; who reads this believes none of an older term."""

    shard: Count
    term: Count
    address: str


class OfferSegment(msgspec.Struct, frozen=True, tag="offer_segment"):
    """The key to the sender's segment, for the addressee alone.

    `anew`: the node has registered with a master that knows nothing of what earlier ones granted.
    Nothing may be written here that was granted before this offer came, nor by others than the
    `leaders`.

    `mailbox`: the key to where notes about this segment can be left; empty: they are sent.
    `clock`: see `kvstore.mailbox.clock_name`.
    `takes_notes`: notes about this segment may be left with writes, where these carry any.
    """

    ask_id: int
    region_key: bytes
    anew: bool = False
    leaders: list[Leader] = []
    mailbox: bytes = b""
    clock: str = ""
    takes_notes: bool = False


class AskAtRest(msgspec.Struct, frozen=True, tag="ask_at_rest"):
    """Say so once all that you began to write in my segment before this question is over.

    `for_copies`: for the addressee's node, which copies; not for the client on the same engine.
    `leaders`: whose places only are taken from now on.
    """

    segment: int
    number: int
    for_copies: bool = False
    leaders: list[Leader] = []


class AtRest(msgspec.Struct, frozen=True, tag="at_rest"):
    """The answer; as of the question, not of now."""

    segment: int
    number: int
    for_copies: bool = False


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    """The client needs its key no more, and nothing of its writes is under way."""

    segment: int


NodeNote = AskSegment | Written | Unwritten | OfferSegment | AskAtRest | AtRest | Leaving
ClientNote = OfferSegment | AskAtRest

_encoder = msgspec.msgpack.Encoder()
_node_decoder: msgspec.msgpack.Decoder[NodeNote] = msgspec.msgpack.Decoder(NodeNote)
_client_decoder: msgspec.msgpack.Decoder[ClientNote] = msgspec.msgpack.Decoder(ClientNote)


def encode_to_node(note: NodeNote) -> bytes:
    """Return the notify payload of a note to a node."""
    return TO_NODE + _encoder.encode(note)


def encode_to_client(note: ClientNote) -> bytes:
    """Return the notify payload of a note to a client."""
    return TO_CLIENT + _encoder.encode(note)


def decode_to_node(payload: bytes) -> NodeNote:
    """Read a payload that starts with `TO_NODE`. Raises msgspec.MsgspecError."""
    return _node_decoder.decode(memoryview(payload)[len(TO_NODE) :])


def decode_to_client(payload: bytes) -> ClientNote:
    """Read a payload that starts with `TO_CLIENT`. Raises msgspec.MsgspecError."""
    return _client_decoder.decode(memoryview(payload)[len(TO_CLIENT) :])
