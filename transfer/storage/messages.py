"""What two engines say to each other about a storage that only its owner can move.

    ask     requester -> owner    move these pieces of the window that I name out of, or into, the
                                  buffer that this key opens (or count this immediate)
    answer  owner -> requester    done, or why not

The bytes go by one-sided operations of the owner on the requester's buffer, over whatever rails
there are. Travels in control frames. Pure; the parsers refuse what they do not know.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, Final

import msgspec
import numpy as np

from transfer.errors import ProtocolViolation
from transfer.memory.region import TOKEN_BYTES, RegionKey
from transfer.pieces import Ints, packed

# Of one ask. Where bytes go by way of a buffer, an ask moves at most one of these.
PIECES_MAX: Final = 4096
ASK_BYTES_MAX: Final = 16 << 20
REASON_MAX: Final = 500
CONTENT_MAX: Final = 512


class AskKind(IntEnum):
    """What is asked for: window to buffer, buffer to window, an immediate to be counted, or the
    place of device memory, to copy to and from it without the owner.
    """

    READ = 1
    WRITE = 2
    SIGNAL = 3
    PLACE = 4


class AnswerKind(IntEnum):
    """How an ask ended. After `BUSY` it may be asked again; nothing was begun."""

    DONE = 0
    UNKNOWN = 1
    NO_RIGHT = 2
    OUT_OF_BOUNDS = 3
    FAILED = 4
    BUSY = 5


Offsets = Annotated[bytes, msgspec.Meta(max_length=8 * PIECES_MAX)]


class Ask(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One ask.

    Attributes:
        id: of the requester's choice; the answer carries it.
        kind: of `AskKind`.
        token: names the owner's window.
        key: opens the requester's buffer to the owner; b"" where nothing is moved.
        offsets: [N] int64 little-endian, in the window.
        lengths: [N] int64 little-endian.
        immediate: to be counted; 0 without a signal.
        timeout_s: how long the requester still waits.
        places: [N] int64 little-endian, in the buffer; b"": packed, in this order.
    """

    id: int
    kind: AskKind
    token: Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
    key: Annotated[bytes, msgspec.Meta(max_length=512)]
    offsets: Offsets
    lengths: Offsets
    immediate: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    timeout_s: Annotated[float, msgspec.Meta(ge=0, le=1e6)]
    places: Offsets = b""

    def pieces(self, bytes_max: int) -> tuple[Ints, Ints]:
        """Return offsets and lengths, checked but for the bounds of the window.

        Raises:
            ProtocolViolation: they make no sense.
        """
        if len(self.offsets) != len(self.lengths) or len(self.offsets) % 8 or not self.offsets:
            raise ProtocolViolation("storage ask: offsets and lengths do not fit")
        offsets = np.frombuffer(self.offsets, dtype="<i8").astype(np.int64)
        lengths = np.frombuffer(self.lengths, dtype="<i8").astype(np.int64)
        if int(lengths.min()) <= 0 or int(lengths.max()) > bytes_max:
            raise ProtocolViolation("storage ask: a length is out of range")
        if int(lengths.sum()) > bytes_max:
            raise ProtocolViolation("storage ask: more bytes than one may move")
        return offsets, lengths

    def buffer_places(self, lengths: Ints) -> Ints:
        """Return where the pieces lie in the buffer; not checked against its bounds.

        Raises:
            ProtocolViolation: there are more or fewer places than pieces.
        """
        if not self.places:
            return packed(lengths)
        if len(self.places) != 8 * len(lengths):
            raise ProtocolViolation("storage ask: places and lengths do not fit")
        return np.frombuffer(self.places, dtype="<i8").astype(np.int64)

    def buffer_key(self, asker: str) -> RegionKey:
        """Return the key of the requester's buffer.

        Raises:
            ProtocolViolation: no key, or not to memory of the one who asks.
        """
        key = RegionKey.decode(self.key)
        if key.owner != asker or key.kind != "host":
            raise ProtocolViolation("storage ask: the buffer is not the requester's")
        return key


class Answer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The answer to one ask.

    Attributes:
        id: of the ask.
        kind: of `AnswerKind`.
        reason: in words, of a failure.
        content: the place that was asked for.
    """

    id: int
    kind: AnswerKind
    reason: Annotated[str, msgspec.Meta(max_length=REASON_MAX)] = ""
    content: Annotated[bytes, msgspec.Meta(max_length=CONTENT_MAX)] = b""


_ask_decoder = msgspec.msgpack.Decoder(Ask)
_answer_decoder = msgspec.msgpack.Decoder(Answer)


def parse_ask(data: bytes) -> Ask:
    """Decode an ask.

    Raises:
        ProtocolViolation: the bytes are none.
    """
    try:
        return _ask_decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise ProtocolViolation(f"storage ask: {error}") from error


def parse_answer(data: bytes) -> Answer:
    """Decode an answer. Raises as `parse_ask`."""
    try:
        return _answer_decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise ProtocolViolation(f"storage answer: {error}") from error


def encode(message: Ask | Answer) -> bytes:
    """Return the bytes of either."""
    return msgspec.msgpack.encode(message)
