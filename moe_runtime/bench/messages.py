"""What initiator and target say to each other, as notifies of their engines."""

from __future__ import annotations

import msgspec

from moe_runtime.bench.usage import Usage


class Open(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Offer a window of so many bytes to the one who asks.

    Attributes:
        nbytes: its size.
        private: ordinary memory, which other processes cannot map.
    """

    nbytes: int
    private: bool


class Opened(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The window is there.

    Attributes:
        key: an encoded `RegionKey`.
        boot_id: of the target's host.
        pid: of the target.
        descriptor: of its memory file; -1 if the memory has none.
    """

    key: bytes
    boot_id: str
    pid: int
    descriptor: int


class Fill(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Write the pattern into these pieces.

    Attributes:
        offsets: int64, little endian.
        size: bytes of each.
        seed: of the pattern.
    """

    offsets: bytes
    size: int
    seed: int


class Compare(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Say whether each piece holds what was sent.

    Attributes:
        source: int64, little endian: offsets where the bytes came from.
        target: int64, little endian: where they should be.
        size: bytes of each.
        seed: of the pattern.
    """

    source: bytes
    target: bytes
    size: int
    seed: int


class Compared(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The result: index of a piece that differs, or -1."""

    piece: int


class Read(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Read the clocks."""


class Clocks(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """As they stand at the target."""

    usage: Usage


class Done(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """It is done."""


class Failed(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """It can't be done."""

    problem: str


Request = Open | Fill | Compare | Read
Reply = Opened | Compared | Clocks | Done | Failed

encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
