"""Checksums at the speed of memory: of many pieces in one call, and in the same pass as a copy.

The only module that imports `kvstore._native`, which is built where a C compiler was found;
MOE_RUNTIME_NATIVE=0 keeps it from being used. Without it both functions do the same in two passes.

Where a core of the machine is idle, a second thread takes a share of what is large (8 MiB): see
`kvstore/compiled/second_core.c`. Who has `kvstore.share_copies: false` forbids it to the process.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

Ints = npt.NDArray[np.int64]
Sums = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]

compiled: ModuleType | None
try:
    if os.environ.get("MOE_RUNTIME_NATIVE") == "0":
        raise ImportError("turned off by MOE_RUNTIME_NATIVE=0")
    from kvstore import _native
except ImportError:
    compiled = None
else:
    compiled = _native

COMPILED: Final = compiled is not None
_NEVER, _WHERE_IDLE = 0, 1
_objections = 0  # to the second core, by those who are open
_lock = threading.Lock()
# From how many bytes on, in all pieces together, a copy goes past the caches on its way into the
# target. What is read will be used at once, so only what would not stay in a cache anyway. What is
# stored need not be: a store that misses the caches first reads the line that it overwrites. That
# costs more than half of the copy; below, a value may well be read while it is in a cache.
READ_STREAM_BYTES_MIN: Final = 4 << 20
WRITE_STREAM_BYTES_MIN: Final = 16 << 10


@contextlib.contextmanager
def sharing_copies(share: bool) -> Iterator[None]:
    """Unless `share`, keep the copies of the whole process in the threads that ask for them.

    As long as anybody has asked for that; there is one second core for all.
    """
    if share:
        yield
        return
    _object(1)
    try:
        yield
    finally:
        _object(-1)


def _object(more: int) -> None:
    global _objections
    with _lock:
        _objections += more
        if compiled is not None:
            compiled.share_copies(_NEVER if _objections else _WHERE_IDLE)


def checksums_of(memory: Bytes, offsets: Ints, lengths: Ints) -> list[int]:
    """As `checksum_column`, as integers."""
    found: list[int] = checksum_column(memory, offsets, lengths).tolist()
    return found


def checksum_column(memory: Bytes, offsets: Ints, lengths: Ints) -> Sums:
    """Return the xxh3_64 of each piece `memory[offset : offset + length]`, [N] uint64.

    Args:
        memory: [.] uint8, contiguous.
        offsets: [N] int64, the pieces inside of the memory: the caller has checked.
        lengths: [N] int64.
    """
    if compiled is not None and len(lengths) and int(lengths.min()) > _native.SHORT_BYTES:
        sums = _native.sums(memory.ctypes.data, _plain(offsets), _plain(lengths))
        return np.frombuffer(sums, dtype=np.uint64)
    view = memory.data
    found = [
        xxhash.xxh3_64_intdigest(view[offset : offset + length])
        for offset, length in zip(offsets.tolist(), lengths.tolist(), strict=True)
    ]
    return np.array(found, dtype=np.uint64)


def checksum_of(memory: Bytes, offset: int, nbytes: int) -> int:
    """Return the xxh3_64 of one piece; otherwise as `checksum_column`."""
    if compiled is not None and nbytes > _native.SHORT_BYTES:
        return _native.sum_one(memory, offset, nbytes)
    return xxhash.xxh3_64_intdigest(memory.data[offset : offset + nbytes])


def copy_with_checksums(
    target: Bytes,
    source: Bytes,
    target_offsets: Ints,
    source_offsets: Ints,
    lengths: Ints,
    *,
    stream_bytes: int = READ_STREAM_BYTES_MIN,
) -> list[int]:
    """As `copy_and_sum`, with the checksums as integers."""
    found: list[int] = copy_and_sum(
        target, source, target_offsets, source_offsets, lengths, stream_bytes=stream_bytes
    ).tolist()
    return found


def copy_and_sum(
    target: Bytes,
    source: Bytes,
    target_offsets: Ints,
    source_offsets: Ints,
    lengths: Ints,
    *,
    stream_bytes: int = READ_STREAM_BYTES_MIN,
) -> Sums:
    """Copy pieces, and return the xxh3_64 of each as it lies in the target, [N] uint64.

    Args:
        target: [.] uint8, contiguous, not the memory of the source.
        source: [.] uint8, contiguous; others may change it, then the checksums tell.
        target_offsets: [N] int64; the caller has checked all bounds.
        source_offsets: [N] int64.
        lengths: [N] int64.
        stream_bytes: From so many bytes in all on they go past the processor's caches;
            `WRITE_STREAM_BYTES_MIN` where the target is not read at once. Where two cores copy,
            from eight times as many on.
    """
    if compiled is not None and len(lengths) and int(lengths.min()) > _native.SHORT_BYTES:
        sums = _native.copy_summed(
            target.ctypes.data,
            source.ctypes.data,
            _plain(target_offsets),
            _plain(source_offsets),
            _plain(lengths),
            stream_bytes,
        )
        return np.frombuffer(sums, dtype=np.uint64)
    rows = zip(target_offsets.tolist(), source_offsets.tolist(), lengths.tolist(), strict=True)
    for to, start, length in rows:
        target[to : to + length] = source[start : start + length]
    return checksum_column(target, target_offsets, lengths)


def copy_with_checksum(
    target: Bytes,
    target_offset: int,
    source: Bytes,
    source_offset: int,
    nbytes: int,
    *,
    stream_bytes: int = WRITE_STREAM_BYTES_MIN,
) -> int:
    """Copy one piece, by default one that is not read at once; else as `copy_with_checksums`."""
    if compiled is not None and nbytes > _native.SHORT_BYTES:
        return _native.copy_one_summed(
            target, target_offset, source, source_offset, nbytes, stream_bytes
        )
    target[target_offset : target_offset + nbytes] = source[source_offset : source_offset + nbytes]
    return xxhash.xxh3_64_intdigest(target.data[target_offset : target_offset + nbytes])


def bytes_with_checksum(source: Bytes, offset: int, nbytes: int) -> tuple[bytes, int]:
    """Return a piece as bytes, and the xxh3_64 of what they are; otherwise as `copy_and_sum`."""
    if compiled is not None and nbytes > _native.SHORT_BYTES:
        return _native.bytes_summed(source, offset, nbytes, READ_STREAM_BYTES_MIN)
    value = source[offset : offset + nbytes].tobytes()
    return value, xxhash.xxh3_64_intdigest(value)


def _plain(column: Ints) -> Ints:
    return np.ascontiguousarray(column, dtype=np.int64)
