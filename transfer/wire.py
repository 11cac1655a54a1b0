"""The bytes on control and data connections. Pure; every parser refuses what it does not know.

    control   | length u32 | kind u8 | content |             either way, in order
    request   | header | target or source pieces | payload (write) | note (write) |
    reply     | header | payload (read), or a mapping's place (map) |

A request is one slice of a transfer. Its header says how many slices the transfer has, so the
receiver knows when all bytes are in place, in whatever order and over whatever connections they
came. `oldest` is the lowest transfer id that the requester has not finished: what is below it
can be forgotten. A note is kept by the owner once all bytes of the transfer are in place: every
slice brings it, and the header has its length where others have the immediate.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np

from transfer.errors import ProtocolViolation
from transfer.memory.region import TOKEN_BYTES
from transfer.pieces import Ints

SLICE_BYTES: Final = 4 << 20
# What goes the short way over a fast rail is not cut into slices.
PAYLOAD_BYTES_MAX: Final = 16 << 20
SLICE_PIECES: Final = 1024
SLICES_MAX: Final = 1 << 24
# How many transfers the owner remembers from the oldest unfinished one on.
TRANSFERS_AHEAD_MAX: Final = 1 << 20
MAGIC: Final = 0x4D54

LENGTH: Final = struct.Struct("<I")
REQUEST: Final = struct.Struct("<HBBIIIIQQQ16s")
REPLY: Final = struct.Struct("<HBBIQQ")
PLACE: Final = struct.Struct("<QQ")
HAS_IMMEDIATE: Final = 1
HAS_NOTE: Final = 2
NOTE_BYTES_MAX: Final = 64 << 10


class ControlKind(IntEnum):
    """What a control frame carries."""

    NOTIFY = 1
    WITHDRAWN = 2
    GOODBYE = 3
    LOCATE = 4
    LOCATED = 5
    RETIRED = 6
    STORAGE_ASK = 7
    STORAGE_ANSWER = 8
    VERBS = 9
    CONFIRMED = 10
    RESUMED = 11
    NUDGE = 12


class RequestKind(IntEnum):
    """What a data request asks for."""

    WRITE = 1
    READ = 2
    MAP = 3


class Status(IntEnum):
    """How a request ended at the owner of the memory."""

    OK = 0
    UNKNOWN = 1
    NO_RIGHT = 2
    OUT_OF_BOUNDS = 3
    GONE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Header of one slice."""

    kind: RequestKind
    transfer_id: int
    oldest: int
    slice_idx: int
    num_slices: int
    num_pieces: int
    nbytes: int
    immediate: int | None
    token: bytes
    note_bytes: int = 0

    def encode(self) -> bytes:
        """Return the header's bytes."""
        flags, last = flags_of(self.immediate, self.note_bytes)
        return REQUEST.pack(
            MAGIC, self.kind, flags, self.slice_idx, self.num_slices, self.num_pieces, last,
            self.nbytes, self.transfer_id, self.oldest, self.token,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Header of the answer to one slice."""

    status: Status
    transfer_id: int
    slice_idx: int
    nbytes: int

    def encode(self) -> bytes:
        """Return the header's bytes."""
        return REPLY.pack(MAGIC, self.status, 0, self.slice_idx, self.transfer_id, self.nbytes)


def flags_of(immediate: int | None, note_bytes: int) -> tuple[int, int]:
    """Return a header's flags, and the number that they are about."""
    if note_bytes:
        return HAS_NOTE, note_bytes
    return (0, 0) if immediate is None else (HAS_IMMEDIATE, immediate)


def parse_request(data: bytes) -> Request:
    """Decode a request header of `REQUEST.size` bytes.

    Raises:
        ProtocolViolation: a field makes no sense.
    """
    (magic, kind, flags, slice_idx, num_slices, num_pieces, immediate, nbytes, transfer_id, oldest,
     token) = REQUEST.unpack(data)  # fmt: skip
    if (
        magic != MAGIC
        or kind not in RequestKind._value2member_map_
        or flags & ~(HAS_IMMEDIATE | HAS_NOTE)
    ):
        raise ProtocolViolation(f"request: magic {magic:#x}, kind {kind}, flags {flags:#x}")
    if flags & HAS_NOTE and (
        kind != RequestKind.WRITE or flags & HAS_IMMEDIATE or not 1 <= immediate <= NOTE_BYTES_MAX
    ):
        raise ProtocolViolation(f"request: a note of {immediate} bytes")
    if not slice_idx < num_slices <= SLICES_MAX:
        raise ProtocolViolation(f"request: slice {slice_idx} of {num_slices}")
    if (
        num_pieces > SLICE_PIECES
        or nbytes > PAYLOAD_BYTES_MAX
        or (num_pieces == 0) != (nbytes == 0)
    ):
        raise ProtocolViolation(f"request: {num_pieces} pieces of {nbytes} bytes")
    if oldest > transfer_id:
        raise ProtocolViolation(f"request: transfer {transfer_id}, oldest {oldest}")
    assert len(token) == TOKEN_BYTES
    return Request(
        kind=RequestKind(kind),
        transfer_id=transfer_id,
        oldest=oldest,
        slice_idx=slice_idx,
        num_slices=num_slices,
        num_pieces=num_pieces,
        nbytes=nbytes,
        immediate=immediate if flags & HAS_IMMEDIATE else None,
        token=token,
        note_bytes=immediate if flags & HAS_NOTE else 0,
    )


def parse_reply(data: bytes) -> Reply:
    """Decode a reply header of `REPLY.size` bytes.

    Raises:
        ProtocolViolation: a field makes no sense.
    """
    magic, status, reserved, slice_idx, transfer_id, nbytes = REPLY.unpack(data)
    if magic != MAGIC or reserved or status not in Status._value2member_map_:
        raise ProtocolViolation(f"reply: magic {magic:#x}, status {status}")
    if nbytes > PAYLOAD_BYTES_MAX:
        raise ProtocolViolation(f"reply of {nbytes} bytes")
    return Reply(status=Status(status), transfer_id=transfer_id, slice_idx=slice_idx, nbytes=nbytes)


def encode_pieces(offsets: Ints, lengths: Ints) -> bytes:
    """Return the table of pieces: all offsets, then all lengths, int64 little-endian."""
    return offsets.astype("<i8").tobytes() + lengths.astype("<i8").tobytes()


def parse_pieces(data: bytes, nbytes: int) -> tuple[Ints, Ints]:
    """Decode a table of pieces.

    Returns:
        Offsets and lengths, [N] int64 each. Bounds are not checked here.

    Raises:
        ProtocolViolation: the lengths are not positive, or do not add up to `nbytes`.
    """
    table = np.frombuffer(data, dtype="<i8").astype(np.int64).reshape(2, -1)
    offsets, lengths = table
    # At most 2^10 lengths of at most 2^24 each: the sum cannot overflow.
    if lengths.size and (int(lengths.min()) <= 0 or int(lengths.max()) > PAYLOAD_BYTES_MAX):
        raise ProtocolViolation("pieces: a length is out of range")
    if int(lengths.sum()) != nbytes:
        raise ProtocolViolation(f"pieces of {int(lengths.sum())} bytes, {nbytes} announced")
    return offsets, lengths


def encode_control(kind: ControlKind, content: bytes) -> tuple[bytes, bytes]:
    """Return a control frame as head and content."""
    return LENGTH.pack(len(content) + 1) + bytes([kind]), content


class ControlParser:
    """Cuts the byte stream of a control connection into frames. Bounded."""

    def __init__(self, frame_bytes_max: int) -> None:
        self._frame_bytes_max = frame_bytes_max
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> list[tuple[ControlKind, bytes]]:
        """Take bytes as they come; return the frames that are complete.

        Raises:
            ProtocolViolation: an unknown kind, or a frame beyond the bound.
        """
        self._buffer += data
        frames = []
        start = 0
        while len(self._buffer) - start > LENGTH.size:
            (length,) = LENGTH.unpack_from(self._buffer, start)
            kind = self._buffer[start + LENGTH.size]
            if not 1 <= length <= self._frame_bytes_max + 1:
                raise ProtocolViolation(f"control frame of {length} bytes")
            if kind not in ControlKind._value2member_map_:
                raise ProtocolViolation(f"control frame of kind {kind}")
            end = start + LENGTH.size + length
            if len(self._buffer) < end:
                break
            frames.append((ControlKind(kind), bytes(self._buffer[start + LENGTH.size + 1 : end])))
            start = end
        del self._buffer[:start]
        return frames
