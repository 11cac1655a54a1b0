"""The form of notes that are left in mailboxes: see `kvstore/mailbox.py`.

    1 | segment, key, offset, length, checksum, pinned | tenant bytes | tenant | group
    0 | MessagePack of any other note

One block as nearly all are has a form of its own, since a node reads thousands of them at once: a
row of plain values costs a fifth of a note of columns, most of which is their garbage.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from kvstore.wire.columns import LABEL_MAX
from kvstore.wire.messages import HeldBlocks
from kvstore.wire.peer_messages import Unwritten, Written

# offset, length, key, checksum, pinned, chunk bytes, tenant, group, and when it was told (see
# `HeldBlocks`): a plain tuple is made fastest.
Row = tuple[int, int, bytes, int, bool, int, str, str, int]
Note = Written | Unwritten

_ONE: Final = struct.Struct("<BI16sQQQ?H")
_ROW: Final = 1
_OTHER: Final = b"\0"
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Note).decode


class NoteMalformed(ValueError):
    """What was left is no note."""


def write_note(note: Note) -> bytes:
    """Return what is left of a note in a mailbox; its stamp is kept there."""
    if isinstance(note, Written) and len(note.held.keys) == 1 and not any(note.held.chunk_bytes):
        held = note.held
        row = (
            held.offsets[0], held.lengths[0], held.keys[0], held.checksums[0],
            bool(held.pinned and held.pinned[0]), 0,
            held.tenants[0] if held.tenants else "", held.groups[0] if held.groups else "", 0,
        )  # fmt: skip
        return write_row(note.segment, row)
    return _OTHER + _encode(note)


def write_row(segment: int, row: Row) -> bytes:
    """Return what is left of a block without a part table."""
    offset, length, key, checksum, pinned, chunk_bytes, label, group, _ = row
    assert not chunk_bytes, row
    if not label and not group:  # as nearly always
        return _ONE.pack(_ROW, segment, key, offset, length, checksum, pinned, 0)
    tenant = label.encode()
    head = _ONE.pack(_ROW, segment, key, offset, length, checksum, pinned, len(tenant))
    return head + tenant + group.encode()


def read_note(payload: bytes, told_ns: int = 0) -> tuple[int, Row] | Note:
    """Return a note, or the segment and row of one plain block. Raises NoteMalformed."""
    try:
        if payload[:1] == _OTHER:
            return _decode(payload[1:])
        kind, segment, key, offset, length, checksum, pinned, size = _ONE.unpack_from(payload)
        if kind != _ROW:
            raise NoteMalformed(f"a note of kind {kind}")
        if len(payload) == _ONE.size:  # as nearly always
            return segment, (offset, length, key, checksum, pinned, 0, "", "", told_ns)
        end = _ONE.size + size
        tenant, group = payload[_ONE.size : end].decode(), payload[end:].decode()
        if max(len(tenant), len(group)) > LABEL_MAX:
            raise NoteMalformed(f"a label of more than {LABEL_MAX} characters")
        return segment, (offset, length, key, checksum, pinned, 0, tenant, group, told_ns)
    except (struct.error, UnicodeDecodeError, msgspec.MsgspecError) as error:
        raise NoteMalformed(str(error)) from error


def columns_of_rows(rows: list[Row]) -> HeldBlocks:
    """Return the same in columns."""
    offsets, lengths, keys, checksums, pinned, chunks, tenants, groups, stamps = map(
        list, zip(*rows, strict=True)
    )
    return HeldBlocks(
        keys, offsets, lengths, checksums, pinned,
        chunks if any(chunks) else [],
        tenants if any(tenants) else [],
        groups if any(groups) else [],
        stamps if any(stamps) else [],
    )  # fmt: skip
