"""What two engines tell each other about their queue pairs, over their control connection.

    dialer                                       acceptor, see `Links`
      | -- RailsTried -----------------------------> |   once its own rails are tried too, ready
      | <----------------------------- RailsTried -- |   the dialer is ready after the acceptor

    requester                                    owner of the memory
      | -- OpenRail(rail, device, end) ------------> |   makes its end, ready to serve
      | <------ RailOpened(end) or RailRefused ----- |
      | -- AskKey(token) --------------------------> |   registers the offer, in the peer's domain
      | <------------- KeyTold or KeyRefused ------- |
      |                                              |
      |   a queue pair failed, or was given up:      |
      | -- Settle(rail) ---------------------------> |   ends its own pairs
      | <----------- Settled(immediates arrived) --- |   nothing lands over them any more
      |                                              |
      | -- CloseRail(rail) ------------------------> |
      | <-- RailDown(rail) ------------------------- |   its port went down

Both directions are alike and independent. A rail's number is the requester's, and new for each
life of its queue pairs.
"""

from __future__ import annotations

import ipaddress
from typing import Final

import msgspec

from transfer.errors import ProtocolViolation
from transfer.memory.region import TOKEN_BYTES
from transfer.wire import Status

LANES: Final = 2
QUEUE_NUMBERS: Final = 1 << 24


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    pass


class End(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What one side tells the other about its queue pairs on one device.

    Attributes:
        gid, lid: address of the device.
        mtu: constant of the largest packet that its port takes.
        reads: how many reads it serves at a time.
        numbers: of its queue pairs, one for each lane.
        sequence: number of the first packet that each will send.
    """

    gid: str
    lid: int
    mtu: int
    reads: int
    numbers: tuple[int, ...]
    sequence: tuple[int, ...]


class OpenRail(_Message, frozen=True, tag="open"):
    """Make queue pairs on the `device`-th of your devices, connected with these of mine."""

    rail: int
    device: int
    end: End


class RailOpened(_Message, frozen=True, tag="opened"):
    """Here they are. At most `credits` immediates may be under way at a time."""

    rail: int
    end: End
    credits: int


class RailRefused(_Message, frozen=True, tag="refused"):
    """There are none."""

    rail: int
    reason: str


class CloseRail(_Message, frozen=True, tag="close"):
    """They are not needed any more."""

    rail: int


class Settle(_Message, frozen=True, tag="settle"):
    """My queue pairs are over. End yours, and say what has arrived.

    `token` names the offer that was refused to me, b"" if none was.
    """

    rail: int
    token: bytes


class Settled(_Message, frozen=True, tag="settled"):
    """How many immediates came over each pair in all, and how it stands with the offer."""

    rail: int
    arrived: tuple[int, ...]
    status: Status


class RailDown(_Message, frozen=True, tag="down"):
    """My end of the rail has failed."""

    rail: int
    evidence: str


class RailsTried(_Message, frozen=True, tag="tried"):
    """I have found out whether my requests can go over RDMA, and am ready either way."""


class AskKey(_Message, frozen=True, tag="ask"):
    """How do I reach what you have offered me?"""

    token: bytes


class KeyTold(_Message, frozen=True, tag="told"):
    """By these (key, address), one for each of my devices."""

    token: bytes
    places: tuple[tuple[int, int], ...]


class KeyRefused(_Message, frozen=True, tag="unknown"):
    """Not at all."""

    token: bytes
    status: Status


Message = (
    OpenRail | RailOpened | RailRefused | CloseRail | Settle | Settled | RailDown | AskKey
    | KeyTold | KeyRefused | RailsTried
)  # fmt: skip

_decoder: Final = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Return a message's bytes."""
    return msgspec.msgpack.encode(message)


def parse(content: bytes) -> Message:
    """Undo `encode`.

    Raises:
        ProtocolViolation: no such message, or a field is out of range.
    """
    try:
        message = _decoder.decode(content)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise ProtocolViolation(f"message about queue pairs: {error}") from error
    problem = _problem(message)
    if problem is not None:
        raise ProtocolViolation(f"message about queue pairs: {problem}")
    return message


def _is_address(gid: str) -> bool:
    try:
        ipaddress.IPv6Address(gid)
    except ValueError:
        return False
    return True


def _problem(message: Message) -> str | None:
    match message:
        case OpenRail(end=end) | RailOpened(end=end):
            numbers = (*end.numbers, *end.sequence)
            if len(end.numbers) != LANES or len(end.sequence) != LANES:
                return f"{len(end.numbers)} queue pairs, not {LANES}"
            if not all(0 <= number < QUEUE_NUMBERS for number in numbers):
                return "a number of 24 bits is none"
            if not (1 <= end.mtu <= 5 and 0 <= end.reads <= 255 and 0 <= end.lid < 1 << 16):
                return "an attribute is out of range"
            if not _is_address(end.gid):
                return "an address that is none"
            if isinstance(message, RailOpened) and not 0 < message.credits < 1 << 20:
                return f"{message.credits} credits"
        case Settled(arrived=arrived):
            if len(arrived) != LANES or min(arrived) < 0:
                return "counts of immediates that cannot be"
        case AskKey(token=token) | KeyTold(token=token) | KeyRefused(token=token):
            if len(token) != TOKEN_BYTES:
                return f"a token of {len(token)} bytes"
        case _:
            pass
    return None
