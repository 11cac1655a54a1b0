"""The header of a message: what it is, checked field by field by whoever receives it.

Layout, little endian (drawn with sizes in `dispatch.layout`):

    magic u32 | phase u16 | dtype u16 | epoch u64 | pass u64 | layer u32 | source i32 |
    receiver experts u32 | choices u32 | rows u32 | hidden u32
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import StrEnum

import torch

from dispatch.errors import MessageMismatch
from dispatch.layout import DTYPES, HEADER_BYTES, Bytes

MAGIC = 0x3145_4F4D  # "MOE1"
_HEADER = struct.Struct("<IHHQQIiIIII")
assert _HEADER.size <= HEADER_BYTES
_FIELDS = (
    "magic",
    "phase",
    "dtype",
    "epoch",
    "pass",
    "layer",
    "source",
    "receiver experts",
    "choices",
    "rows",
    "hidden",
)


class Phase(StrEnum):
    """The two phases of an exchange."""

    DISPATCH = "dispatch"
    COMBINE = "combine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """Which exchange a message belongs to. `phase` alternates, so its parity picks the window."""

    epoch: int
    pass_id: int
    layer: int
    phase: Phase

    @property
    def parity(self) -> int:
        """0 for dispatch, 1 for combine."""
        return int(self.phase is Phase.COMBINE)


def write_header(
    buffer: Bytes,
    stamp: Stamp,
    *,
    source: int,
    dtype: torch.dtype,
    num_experts: int,
    num_choices: int,
    num_rows: int,
    hidden: int,
) -> None:
    """Write the header to the first bytes of `buffer`."""
    _HEADER.pack_into(
        buffer.data,
        0,
        MAGIC,
        stamp.parity,
        DTYPES[dtype],
        stamp.epoch,
        stamp.pass_id,
        stamp.layer,
        source,
        num_experts,
        num_choices,
        num_rows,
        hidden,
    )


def read_header(
    buffer: Bytes,
    stamp: Stamp,
    *,
    source: int,
    dtype: torch.dtype,
    num_experts: int,
    hidden: int,
) -> tuple[int, int]:
    """Check the header at the start of `buffer`; return its numbers of choices and of rows.

    Raises:
        MessageMismatch: A field is not as expected; names the first that differs.
    """
    observed = _HEADER.unpack_from(buffer.data)
    num_choices: int = observed[8]
    num_rows: int = observed[9]
    expected = (
        MAGIC,
        stamp.parity,
        DTYPES[dtype],
        stamp.epoch,
        stamp.pass_id,
        stamp.layer,
        source,
        num_experts,
        num_choices,
        num_rows,
        hidden,
    )
    if observed != expected:
        for name, seen, due in zip(_FIELDS, observed, expected, strict=True):
            if seen != due:
                raise MessageMismatch(source=source, name=name, observed=seen, expected=due)
    return num_choices, num_rows
