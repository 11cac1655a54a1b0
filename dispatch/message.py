"""The header of a message: what it is, checked field by field by whoever receives it.

Layout, little endian, in the first 64 bytes (the rest of a message is drawn in `dispatch.layout`):

    magic u32 | phase u16 | dtype u16 | epoch u64 | pass u64 | layer u32 | hidden u32 |
    source i32 | receiver experts u32 | choices u32 | rows u32 | marks u32 | more u32 | extra u64

`marks` and `extra` are 0 but for a message that has to do with a window's growth: see
`dispatch.growth`. `more` is 1 in a dispatch whose sender has another microbatch in this layer.

`phase` is the number of the window: microbatch << 1 | parity. The first line is the same in all
messages of a phase: it is packed once and compared as bytes.
"""

from __future__ import annotations

import struct
from enum import StrEnum
from typing import NamedTuple

import torch

from dispatch.errors import MessageMismatch
from dispatch.layout import DTYPES, HEADER_BYTES, Bytes

MAGIC = 0x3145_4F4D  # "MOE1"
_SHARED = struct.Struct("<IHHQQII")
_OWN = struct.Struct("<iIII")
_MARKS, _MORE, _EXTRA = struct.Struct("<I"), struct.Struct("<I"), struct.Struct("<Q")
_MARKS_AT = _SHARED.size + _OWN.size
_MORE_AT = _MARKS_AT + _MARKS.size
_EXTRA_AT = _MORE_AT + _MORE.size
assert _EXTRA_AT + _EXTRA.size == HEADER_BYTES
_LAST, _NOT_LAST = [struct.pack("<IIQ", 0, more, 0) for more in (0, 1)]
SPILLED, GRANT = 1, 2  # marks
_SHARED_FIELDS = ("magic", "phase", "dtype", "epoch", "pass", "layer", "hidden")


class Phase(StrEnum):
    """The two phases of an exchange."""

    DISPATCH = "dispatch"
    COMBINE = "combine"


class Stamp(NamedTuple):
    """Which exchange a message belongs to.

    Attributes:
        epoch: Of the view.
        pass_id: Of the pass, counted from 0 in each epoch.
        layer: Of the exchange.
        parity: 0 for dispatch, 1 for combine.
        microbatch: Which of the exchanges that may be in flight at once.
    """

    epoch: int
    pass_id: int
    layer: int
    parity: int
    microbatch: int = 0

    @property
    def window(self) -> int:
        """Number of the window that the message lands in: phases of a microbatch alternate."""
        return self.microbatch << 1 | self.parity

    @property
    def phase(self) -> Phase:
        """The parity by name."""
        return Phase.COMBINE if self.parity else Phase.DISPATCH

    def answer(self) -> Stamp:
        """Return the stamp of the combine that belongs to this dispatch."""
        return self._replace(parity=1)

    def header(self, dtype: torch.dtype, hidden: int) -> bytes:
        """Return the part of the header that all messages of the phase share."""
        epoch, pass_id, layer = self[:3]
        return _SHARED.pack(MAGIC, self.window, DTYPES[dtype], epoch, pass_id, layer, hidden)


def write_header(
    buffer: Bytes,
    shared: bytes,
    source: int,
    num_experts: int,
    num_choices: int,
    num_rows: int,
    *,
    more: bool = False,
) -> None:
    """Write a header to the first bytes of `buffer`.

    Args:
        buffer: Of the message.
        shared: From `Stamp.header`.
        source: Rank that sends it.
        num_experts: Experts of the receiver that the counts are for; 0 in a combine.
        num_choices: Choices that the message is about.
        num_rows: Rows in it.
        more: Whether the sender has another microbatch in this layer.
    """
    view = buffer.data
    view[: _SHARED.size] = shared
    _OWN.pack_into(view, _SHARED.size, source, num_experts, num_choices, num_rows)
    view[_MARKS_AT:HEADER_BYTES] = _NOT_LAST if more else _LAST


def mark(buffer: Bytes, marks: int, extra: int) -> None:
    """Set the marks of a header, and the number that belongs to them."""
    view = buffer.data
    _MARKS.pack_into(view, _MARKS_AT, marks)
    _EXTRA.pack_into(view, _EXTRA_AT, extra)


def marks_of(buffer: Bytes) -> tuple[int, int]:
    """Return what `mark` has set; (0, 0) in an ordinary message."""
    view = buffer.data
    return _MARKS.unpack_from(view, _MARKS_AT)[0], _EXTRA.unpack_from(view, _EXTRA_AT)[0]


def more_of(buffer: Bytes) -> bool:
    """Return whether the sender of a dispatch has another microbatch in this layer."""
    return bool(_MORE.unpack_from(buffer.data, _MORE_AT)[0])


def check_shared(buffer: Bytes, shared: bytes, source: int) -> None:
    """Accept a message of the phase that is due.

    Raises:
        MessageMismatch: A field is not as expected; names the first that differs.
    """
    view = buffer.data
    if view[: _SHARED.size] != shared:
        seen, due = _SHARED.unpack_from(view), _SHARED.unpack(shared)
        index = next(i for i, value in enumerate(due) if seen[i] != value)
        raise MessageMismatch(
            source=source, name=_SHARED_FIELDS[index], observed=seen[index], expected=due[index]
        )


def read_header(buffer: Bytes, shared: bytes, source: int, num_experts: int) -> tuple[int, int]:
    """Check the header at the start of `buffer`; return its numbers of choices and of rows.

    Raises:
        MessageMismatch: A field is not as expected; names the first that differs.
    """
    check_shared(buffer, shared, source)
    found_source, found_experts, num_choices, num_rows = _OWN.unpack_from(buffer.data, _SHARED.size)
    if found_source != source or found_experts != num_experts:
        raise MessageMismatch(
            source=source,
            name="source and receiver experts",
            observed=(found_source, found_experts),
            expected=(source, num_experts),
        )
    return num_choices, num_rows
