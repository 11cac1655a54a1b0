"""xxh3_64 over a block's bytes: computed by the writer, verified by every reader after its copy.

A block may carry a part table, so that a range of it can be verified without the rest:

    offset                                   nbytes (payload)             + 8 per chunk
    [ chunk 0 )[ chunk 1 ) ... [ last, short )[ xxh3_64 of each, little-endian )

The block's checksum is then that of the table. Tables are of `chunk_bytes` > 0; 0 means none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstore.copying import checksum_column, checksum_of, checksums_of

CHECKSUM_BYTES: Final = 8


def block_checksums(
    memory: NDArray[np.uint8], offsets: NDArray[np.int64], lengths: NDArray[np.int64]
) -> list[int]:
    """Return one unsigned 64-bit checksum per piece `memory[offset : offset + length]`."""
    return checksums_of(memory, offsets, lengths)


def joined_checksum(pieces: Iterable[NDArray[np.uint8]]) -> int:
    """Return the checksum of pieces as if they lay behind one another."""
    state = xxhash.xxh3_64()
    for piece in pieces:
        state.update(piece.data)
    return state.intdigest()


def table_bytes(nbytes: int, chunk_bytes: int) -> int:
    """Return the size of the part table of a payload; 0 if it has none."""
    assert nbytes >= 0, nbytes
    return CHECKSUM_BYTES * -(-nbytes // chunk_bytes) if chunk_bytes else 0


def part_table(pieces: Sequence[NDArray[np.uint8]], chunk_bytes: int) -> NDArray[np.uint8]:
    """Return the part table of a payload that lies in pieces.

    Args:
        pieces: [.] uint8 each, the payload in order.
        chunk_bytes: At least 1.

    Returns:
        [8 * ceil(nbytes / chunk_bytes)] uint8.
    """
    assert chunk_bytes > 0, chunk_bytes
    checksums: list[int] = []
    state, filled = xxhash.xxh3_64(), 0
    for piece in pieces:
        view = piece.data
        start = 0
        while start < len(view):
            step = min(len(view) - start, chunk_bytes - filled)
            state.update(view[start : start + step])
            start, filled = start + step, filled + step
            if filled == chunk_bytes:
                checksums.append(state.intdigest())
                state.reset()
                filled = 0
    if filled:
        checksums.append(state.intdigest())
    return np.array(checksums, dtype="<u8").view(np.uint8)


def table_checksum(table: NDArray[np.uint8]) -> int:
    """Return the checksum of a block whose part table this is."""
    return xxhash.xxh3_64_intdigest(table.data)


def verify_stored(memory: NDArray[np.uint8], nbytes: int, checksum: int, chunk_bytes: int) -> bool:
    """Tell whether a block is whole, table and every chunk included.

    Args:
        memory: [nbytes + table_bytes(nbytes, chunk_bytes)] uint8, as stored.
        nbytes: Bytes of payload.
        checksum: The block's.
        chunk_bytes: 0 if it has no table.
    """
    payload, table = memory[:nbytes], memory[nbytes:]
    if not chunk_bytes:
        return xxhash.xxh3_64_intdigest(payload.data) == checksum
    if table_checksum(table) != checksum:
        return False
    return bool(np.array_equal(part_table([payload], chunk_bytes), table))


def lies_right(
    memory: NDArray[np.uint8], offset: int, nbytes: int, checksum: int, chunk_bytes: int
) -> bool:
    """Tell whether a block that lies in larger memory is whole; False if it does not lie there.

    As `verify_stored`, in the compiled way: a part of the block for each core that is idle.
    """
    stored_bytes = nbytes + table_bytes(nbytes, chunk_bytes)
    if offset < 0 or nbytes <= 0 or stored_bytes > len(memory) - offset:
        return False
    if not chunk_bytes:
        return checksum_of(memory, offset, nbytes) == checksum
    table = memory[offset + nbytes : offset + stored_bytes].copy()  # it may change, as all of it
    if table_checksum(table) != checksum:
        return False
    starts = np.arange(0, nbytes, chunk_bytes, dtype=np.int64)
    lengths = np.minimum(chunk_bytes, nbytes - starts)
    found = checksum_column(memory, offset + starts, lengths)
    return bool(np.array_equal(found, table.view("<u8")))
