"""One value into memory that is not mapped here, with a note to its node.

    write, checksum, and behind it the note ─▶ node       one request, where it carries notes (tcp)
    write ─▶ node, checksum meanwhile; then `Written`     elsewhere

A note that comes with the bytes wakes nobody at the node; see `kvstore/node/mailboxes.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

import xxhash

from kvstore.values.values import Part, RegionPiece
from kvstore.wire.left_notes import Row, write_row
from transfer import Priority

if TYPE_CHECKING:
    from kvstore.client.client_core import ClientCore
    from kvstore.client.segment_keys import SegmentKeys
    from kvstore.wire.messages import NodeAddress
    from transfer import RegionKey


def send_value(
    core: ClientCore,
    segments: SegmentKeys,
    where: NodeAddress,
    key: RegionKey,
    target_offset: int,
    part: Part,
    row_of: Callable[[int], Row],
) -> tuple[int, bool]:
    """Write a value to where it belongs, and wait for the end.

    Args:
        core: The client's operations.
        segments: Keys to the nodes' segments.
        where: The segment.
        key: To the segment.
        target_offset: In the segment.
        part: The value; what does not lie in a region goes by a buffer.
        row_of: What the node is to remember, given the checksum.

    Returns:
        The checksum, and whether the node has the note.

    Raises:
        TransferError: Bytes may be under way, or in place.
    """
    with ExitStack() as stack:
        if not isinstance(part, RegionPiece):
            buffer = stack.enter_context(core.staging.borrow(part.nbytes))
            buffer.array[: part.nbytes] = part
            part = RegionPiece(buffer, 0, part.nbytes)
        region, first, nbytes = part.region, part.offset, part.nbytes
        payload = region.array.data[first : first + nbytes]
        if segments.takes_note(where):
            checksum = xxhash.xxh3_64_intdigest(payload)
            note = write_row(where.segment, row_of(checksum))
            transfer = segments.write(where, region, key, first, target_offset, nbytes, note)
            if transfer is not None:
                transfer.wait()
                return checksum, True
        transfer = core.engine.write(
            where.node, region, key, first, target_offset, nbytes, priority=Priority.KV_PUT
        )
        checksum = xxhash.xxh3_64_intdigest(payload)  # while the bytes are under way
        transfer.wait()
        return checksum, False
