"""What of this process's memory may be written to, as the kernel has it mapped.

Bytes from a peer that arrive for memory that is mapped read-only would end this process with
SIGSEGV, or break the connection again and again. So it is found out when memory is registered.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_MAPS: Final = Path("/proc/self/maps")
# PROCMAP_QUERY of Linux 6.11, which finds one mapping in a microsecond; the text of all of them
# takes hundreds. size, flags, address in; then start, end and flags of the mapping come out.
_QUERY: Final = struct.Struct("<8Q")
_QUERY_BYTES: Final = 104
_PROCMAP_QUERY: Final = (3 << 30) | (_QUERY_BYTES << 16) | (ord("f") << 8) | 17
_COVERING_OR_NEXT: Final = 0x10
_READABLE: Final = 1
_WRITABLE: Final = 2

_MS_ASYNC: Final = 1
_msync: Final = ctypes.CDLL(None).msync
_msync.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

# First byte, end, whether it may be read, whether it may be written to.
_Mapping = tuple[int, int, bool, bool]


def is_writable(start: int, nbytes: int) -> bool:
    """Whether this process may write to all of `[start, start + nbytes)`.

    Where the kernel does not tell (no /proc), it may.

    Raises:
        ValueError: a part of it is not mapped, or may not even be read.
    """
    try:
        mappings = _mappings_of(start, start + nbytes)
    except OSError:
        return True
    at, writable = start, True
    for low, high, readable, can_write in mappings:
        if low > at or not readable:
            break
        at, writable = high, writable and can_write
    if at < start + nbytes:
        raise ValueError(f"memory at {at:#x}, of {nbytes} bytes at {start:#x}, is not mapped")
    return writable


def is_mapped(start: int, nbytes: int) -> bool:
    """Whether all of `[start, start + nbytes)` is mapped: a quick look, at each access by a peer.

    MS_ASYNC writes nothing back; the kernel only walks the mappings.
    """
    low = start - start % mmap.PAGESIZE
    return bool(_msync(low, start + nbytes - low, _MS_ASYNC) == 0)


def _mappings_of(start: int, end: int) -> list[_Mapping]:
    """Return the mappings of `[start, end)`, in order."""
    descriptor = os.open(_MAPS, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return list(_queried(descriptor, start, end))
    except OSError:  # an older kernel
        return list(_read(start, end))
    finally:
        os.close(descriptor)


def _queried(descriptor: int, start: int, end: int) -> Iterator[_Mapping]:
    at = start
    while at < end:
        query = bytearray(_QUERY_BYTES)
        struct.pack_into("<3Q", query, 0, _QUERY_BYTES, _COVERING_OR_NEXT, at)
        try:
            fcntl.ioctl(descriptor, _PROCMAP_QUERY, query)
        except FileNotFoundError:  # nothing is mapped from here on
            return
        _, _, _, low, high, flags, _, _ = _QUERY.unpack_from(query)
        if low >= end:
            return
        yield low, high, bool(flags & _READABLE), bool(flags & _WRITABLE)
        at = high


def _read(start: int, end: int) -> Iterator[_Mapping]:
    for line in _MAPS.read_text(encoding="utf-8", errors="replace").splitlines():
        span, rights = line.split(" ", 2)[:2]
        low, high = (int(number, 16) for number in span.split("-"))
        if low < end and high > start:
            yield low, high, rights[0] == "r", rights[1] == "w"
