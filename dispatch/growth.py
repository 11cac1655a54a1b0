"""Receive windows that grow by agreement, with no message and no round of their own.

A window is sized for a peer's even share of the tokens and some slack (`windows.window_sizes`).
Skewed routing may exceed it, and is still right at once, without waiting for an answer:

    phase n      A has 3 MiB for B, whose window for A holds 1 MiB.
                 A assembles the message in memory of its own, offers that to B for reading, and
                 writes a note into the window instead: header (flag SPILLED), key

                 A ------- note, immediate -------> B      B makes room for 4 MiB and reads the
                 A <============ read ============= B      message into it; from now on that is
                                                           its window for A

    phase n + 1  A <--- message + grant, imm. ----- B      flag GRANT: the new window's key
    phase n + 2  A ------ message, immediate -----> B      into the new window

* Who asks: the sender, by the note. Who decides: the receiver, which refuses more than the
  layout allows (`MessageMismatch`).
* Messages under way: none. A writes to this window again at phase n + 2, after it has read B's
  phase n + 1 and the grant in it. A grant never travels in another microbatch, whose phases
  say nothing about this one's.
* When the spilled memory is free: at phase n + 2 too. Who sent phase n + 1 has read phase n.
* Epoch: both keys are offered in it and withdrawn with it; the next one starts compact again.
* The common case pays one comparison for each message sent, and one for each received.

Layout of what is added to a message, behind the fields of `dispatch.message`:

    note    | header 64, SPILLED, bytes of the message | length u16 | key |
    grant   | message with GRANT, offset of the grant | pad to 64 | length u16 | key |
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from dispatch.errors import MessageMismatch
from dispatch.layout import HEADER_BYTES, Bytes, aligned
from dispatch.message import GRANT, SPILLED, check_shared, mark, marks_of
from transfer import ProtocolViolation, RegionKey

KEY_BYTES_MAX = 446
NOTE_BYTES_MAX = HEADER_BYTES + 2 + KEY_BYTES_MAX  # 512: every window holds one
_LENGTH = struct.Struct("<H")


class Note(NamedTuple):
    """A message that did not fit: where it is, and how large."""

    key: RegionKey
    nbytes: int


def grown_bytes(nbytes: int, largest: int) -> int:
    """Return the size of a window for a message of `nbytes`: the next power of two, bounded."""
    return min(1 << (nbytes - 1).bit_length(), max(largest, nbytes))


def write_note(buffer: Bytes, message: Bytes, nbytes: int, key: RegionKey) -> int:
    """Write a note about a message with that header; return the note's size."""
    buffer[:HEADER_BYTES] = message[:HEADER_BYTES]
    mark(buffer, SPILLED, nbytes)
    return HEADER_BYTES + _write_key(buffer, HEADER_BYTES, key)


def read_note(buffer: Bytes, shared: bytes, *, source: int, owner: str, largest: int) -> Note:
    """Read a note.

    Args:
        buffer: Of the window.
        shared: What the header must have in common with the message that is due.
        source: Rank that sent it.
        owner: Peer that may offer the memory.
        largest: Most bytes that a message may have.

    Raises:
        MessageMismatch: It belongs to another exchange, or asks for what the layout excludes.
    """
    check_shared(buffer, shared, source)
    _, nbytes = marks_of(buffer)
    if not HEADER_BYTES <= nbytes <= largest:
        raise MessageMismatch(
            source=source, name="bytes", observed=nbytes, expected=f"at most {largest}"
        )
    return Note(_read_key(buffer, HEADER_BYTES, source, owner, nbytes), nbytes)


def with_grant(nbytes: int) -> int:
    """Return an upper bound of the size of a message of `nbytes` with a grant."""
    return aligned(nbytes) + _LENGTH.size + KEY_BYTES_MAX


def append_grant(buffer: Bytes, nbytes: int, key: RegionKey) -> int:
    """Add a grant to a message of `nbytes`; return the size of both."""
    offset = aligned(nbytes)
    mark(buffer, GRANT, offset)
    return offset + _write_key(buffer, offset, key)


def read_grant(buffer: Bytes, shared: bytes, *, source: int, owner: str) -> RegionKey:
    """Return the key of a grant.

    Raises:
        MessageMismatch: It belongs to another exchange, or makes no sense.
    """
    check_shared(buffer, shared, source)
    _, offset = marks_of(buffer)
    return _read_key(buffer, offset, source, owner, 1)


def _write_key(buffer: Bytes, offset: int, key: RegionKey) -> int:
    encoded = key.encode()
    assert len(encoded) <= KEY_BYTES_MAX, "a key is longer than the room for it"
    view = buffer.data
    _LENGTH.pack_into(view, offset, len(encoded))
    begin = offset + _LENGTH.size
    view[begin : begin + len(encoded)] = encoded
    return _LENGTH.size + len(encoded)


def _read_key(buffer: Bytes, offset: int, source: int, owner: str, nbytes: int) -> RegionKey:
    begin = offset + _LENGTH.size
    length = _LENGTH.unpack_from(buffer.data, offset)[0] if begin <= len(buffer) else 0
    try:
        key = RegionKey.decode(bytes(buffer[begin : begin + length]))
    except (ProtocolViolation, TypeError, ValueError) as error:
        raise MessageMismatch(
            source=source, name="key", observed=str(error), expected="a key"
        ) from error
    if key.owner != owner or key.nbytes < nbytes:
        raise MessageMismatch(
            source=source,
            name="owner and bytes of the key",
            observed=(key.owner, key.nbytes),
            expected=(owner, f"at least {nbytes}"),
        )
    return key
