"""The envelope of a master's reply: whose word it is, and how much of the pool it knows by now.

    term (8 bytes, big-endian) | flags (1 byte) | MessagePack of one reply

Terms count the masters that led one shard, one after the other. Who has heard of a term takes no
reply of an older one: that master was replaced, and may be a process that was stopped and wakes.
Masters at fixed addresses have no successors elsewhere, and the term 0.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from kvstore.wire import messages as m

_HEADER: Final = struct.Struct(">QB")
HEADER_BYTES: Final = _HEADER.size
_REBUILDING: Final = 1
_SETTLING: Final = 2


class EnvelopeMalformed(ValueError):
    """A reply without an envelope."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a master says.

    Attributes:
        reply: To the request.
        term: Of the master.
        rebuilding: It has just started, and nodes may be telling it still what they hold: that
            a block is missing is not its last word.
        settling: Writers may still be busy where its predecessor sent them, and it gives out no
            space there: that there is none is not its last word.
    """

    reply: m.Reply
    term: int = 0
    rebuilding: bool = False
    settling: bool = False


def seal(answer: Answer) -> bytes:
    """Return the bytes of an answer."""
    flags = _REBUILDING * answer.rebuilding | _SETTLING * answer.settling
    return _HEADER.pack(answer.term, flags) + m.encode(answer.reply)


def seal_reply(reply: m.Reply, term: int) -> bytes:
    """Return the bytes of an answer of a master that is neither rebuilding nor settling."""
    return _HEADER.pack(term, 0) + m.encode(reply)


def unseal(payload: bytes) -> Answer:
    """Read an answer.

    Raises:
        EnvelopeMalformed: It is too short to be one.
        msgspec.MsgspecError: What is in it is no reply.
    """
    if len(payload) < HEADER_BYTES:
        raise EnvelopeMalformed(f"a reply of {len(payload)} bytes")
    term, flags = _HEADER.unpack_from(payload)
    reply = m.decode_reply(payload[HEADER_BYTES:])
    if not flags:
        return Answer(reply=reply, term=term)
    return Answer(
        reply=reply,
        term=term,
        rebuilding=bool(flags & _REBUILDING),
        settling=bool(flags & _SETTLING),
    )
