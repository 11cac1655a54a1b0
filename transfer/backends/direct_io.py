"""Reading and writing a file past the page cache: what it demands, and loops that never come short.

O_DIRECT wants the file offset, the length and the address of the memory to be multiples of what
the file system says (statx, STATX_DIOALIGN). A file system without it may still accept the flag
and go through the page cache (tmpfs), so the flag alone proves nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import struct
from dataclasses import dataclass
from typing import Final

import numpy as np

from transfer.errors import StorageFailed, StorageFull
from transfer.memory.region import Bytes

AT_EMPTY_PATH: Final = 0x1000
STATX_DIOALIGN: Final = 0x2000
ANSWER_BYTES: Final = 256
MASK_AT, DIOALIGN_AT = 0, 152
# tmpfs and ramfs, as fstatfs names them.
MEMORY_FILES: Final = {0x01021994, 0x858458F6}
# File systems write whole blocks of this size; smaller direct writes are slower or exclusive.
BLOCK_BYTES: Final = 4096
HUGE_PAGE_BYTES: Final = 2 << 20
REFUSED: Final = {errno.EINVAL, errno.EOPNOTSUPP}
FULL: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """What every system call on a file must keep to.

    Attributes:
        block: file offsets and lengths are multiples of it; 1 through the page cache.
        memory: addresses are multiples of it; 1 through the page cache.
        why_buffered: why the page cache is used, "" if it is not.
    """

    block: int
    memory: int
    why_buffered: str = ""

    @property
    def direct(self) -> bool:
        """Whether the page cache is passed by."""
        return not self.why_buffered


def buffered(why: str) -> Alignment:
    """The alignment of a file behind the page cache: none."""
    return Alignment(block=1, memory=1, why_buffered=why)


def direct_alignment(fd: int) -> Alignment:
    """Ask the kernel what direct access to an open file demands.

    Kernels before 6.1, and some file systems, do not tell; there the usual block is assumed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    answer = ctypes.create_string_buffer(ANSWER_BYTES)
    statx = getattr(libc, "statx", None)
    if statx is not None and statx(fd, b"", AT_EMPTY_PATH, STATX_DIOALIGN, answer) == 0:
        (mask,) = struct.unpack_from("=I", answer, MASK_AT)
        if mask & STATX_DIOALIGN:
            memory, offset = struct.unpack_from("=II", answer, DIOALIGN_AT)
            if not offset or not memory:
                return buffered("the file system tells that it has no direct access")
            return Alignment(block=max(offset, BLOCK_BYTES), memory=memory)
    # It accepts O_DIRECT since 6.6, and takes no notice of it.
    if libc.fstatfs(fd, answer) == 0 and struct.unpack_from("@l", answer)[0] in MEMORY_FILES:
        return buffered("a file system in memory has no direct access")
    return Alignment(block=BLOCK_BYTES, memory=BLOCK_BYTES)


def refusal(fd: int, alignment: Alignment) -> str:
    """Read a block of a file that is opened for direct access; say why that is refused, or "".

    An overlay takes the flag for files of a file system that refuses what is done with it (Linux
    6.1, over tmpfs). A disk that cannot be read is another matter: its readers are told.
    """
    block = AlignedBuffer(alignment.block).array.data
    try:
        os.preadv(fd, [block], 0)
    except OSError as error:
        if error.errno in REFUSED:
            return f"the file system refuses direct access: {error.strerror}"
    return ""


class AlignedBuffer:
    """Page-aligned anonymous memory, in huge pages where they are to be had.

    Attributes:
        array: [nbytes] uint8. Views may outlive `close`; the pages go with the last one.
    """

    def __init__(self, nbytes: int) -> None:
        # Whole huge pages: O_DIRECT pins every page, and 512 times fewer of them is +45 %.
        rounded = -(-nbytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        mapped = mmap.mmap(-1, rounded, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages
            mapped.madvise(mmap.MADV_HUGEPAGE)
        self.array: Bytes = np.frombuffer(mapped, dtype=np.uint8)[:nbytes]


def storage_error(path: str, operation: str, offset: int, error: OSError) -> StorageFailed:
    """Name a failed system call."""
    number = error.errno or 0
    kind = StorageFull if number in FULL else StorageFailed
    reason = os.strerror(number) if number else str(error)
    return kind(path, operation, reason, offset=offset, errno=number)


def read_fully(fd: int, places: list[memoryview], offset: int, path: str, block: int = 1) -> None:
    """Fill all places from `offset` on.

    Raises:
        StorageFailed: the call failed, or the file ends before.
    """
    wanted = sum(place.nbytes for place in places)
    while wanted:
        try:
            got = os.preadv(fd, places, offset)
        except OSError as error:
            raise storage_error(path, "read", offset, error) from error
        if got < wanted:
            # Direct access cannot go on from the middle of a block.
            got -= got % block
            if not got:
                size = os.fstat(fd).st_size
                reason = f"cut short: {size} bytes are left, {offset + wanted} were expected"
                raise StorageFailed(path, "read", reason, offset=offset)
            places = _after(places, got)
        wanted -= got
        offset += got


def write_fully(fd: int, places: list[memoryview], offset: int, path: str) -> None:
    """Write all places from `offset` on.

    Raises:
        StorageFull: no room.
        StorageFailed: the call failed, or takes nothing.
    """
    wanted = sum(place.nbytes for place in places)
    while wanted:
        try:
            put = os.pwritev(fd, places, offset)
        except OSError as error:
            raise storage_error(path, "write", offset, error) from error
        if not put:
            raise StorageFailed(path, "write", "the file takes no bytes", offset=offset)
        wanted -= put
        offset += put
        if wanted:
            places = _after(places, put)


def _after(places: list[memoryview], done: int) -> list[memoryview]:
    """What is left of the places after `done` bytes."""
    for i, place in enumerate(places):
        if done < place.nbytes:
            return [place[done:], *places[i + 1 :]]
        done -= place.nbytes
    return []
