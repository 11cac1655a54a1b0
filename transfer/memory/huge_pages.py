"""Memory files in huge pages, also where the administrator has allowed none for them.

The kernel's policy (`shmem_enabled`) is about what it does by itself. A process that asks for a
range of its own in so many words (MADV_COLLAPSE, Linux 6.1) gets huge pages whatever the policy is,
short of "deny". The range must be mapped at a multiple of the huge page, which `mmap` does not do
by itself. It is asked for while it is empty but for its first page: nothing is copied, and 512 MiB
take a tenth of the time that as many small pages do. (The kernel first has a worker of its own run
on every core: where processes of the highest priority keep cores busy, that may take seconds.)

What comes of it: direct access of a disk needs one descriptor for half a huge page instead of 512,
and copies miss the processor's address cache less often.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import weakref
from pathlib import Path
from typing import Final

import numpy as np

MADV_COLLAPSE: Final = 25
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_FAILED: Final = ctypes.c_void_p(-1).value
_PMD_BYTES: Final = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")

_libc: Final = ctypes.CDLL(None, use_errno=True)
_mmap: Final = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int,
                  ctypes.c_longlong)  # fmt: skip
_munmap: Final = _libc.munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_madvise: Final = _libc.madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class AlignedMapping:
    """A memory file, mapped at a multiple of the huge page.

    Attributes:
        buffer: all of it; read-only unless it was mapped for writing. It is unmapped when the
            last view is gone.
        start: its address.
    """

    def __init__(
        self, descriptor: int, nbytes: int, *, writable: bool = True, private: bool = False
    ) -> None:
        """Map it.

        Args:
            descriptor: The file.
            nbytes: Its size.
            writable: Or read-only.
            private: What is written stays with this process.

        Raises:
            OSError: no address space, or the file cannot be mapped so.
        """
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        # Those of the administrator's pool may be larger still; the file tells.
        alignment = max(huge_page_bytes(), os.fstat(descriptor).st_blksize, mmap.PAGESIZE)
        # Room for what may be written is not set aside: nearly nobody writes.
        flags = mmap.MAP_PRIVATE | _MAP_NORESERVE if private else mmap.MAP_SHARED
        self.start = _map(descriptor, nbytes, protection, alignment, flags)
        self._nbytes = nbytes
        array = (ctypes.c_ubyte * nbytes).from_address(self.start)
        weakref.finalize(array, _munmap, self.start, nbytes).atexit = False
        view = memoryview(array)
        self.buffer = view if writable else view.toreadonly()

    def __len__(self) -> int:
        return self._nbytes

    def madvise(self, advice: int, start: int = 0, nbytes: int | None = None) -> None:
        """Call madvise on a part of it, by default all. Raises OSError."""
        length = self._nbytes - start if nbytes is None else nbytes
        if _madvise(self.start + start, length, advice) != 0:
            raise _error("madvise")


def collapse(mapping: AlignedMapping) -> bool:
    """Have the whole huge pages of a new file come as such; what is behind the last stays small.

    Returns:
        False if the kernel does not do so, or has none: then some small pages are in place.
    """
    page = huge_page_bytes()
    nbytes = len(mapping) // page * page if page else 0
    if not nbytes:
        return False
    np.frombuffer(mapping.buffer, dtype=np.uint8)[:nbytes:page] = 0
    try:
        mapping.madvise(MADV_COLLAPSE, 0, nbytes)
    except OSError:
        return False
    return True


@functools.cache
def huge_page_bytes() -> int:
    """Return the size of a transparent huge page; 0 if the kernel has none."""
    try:
        return int(_PMD_BYTES.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0


def _map(descriptor: int, nbytes: int, protection: int, alignment: int, flags: int) -> int:
    """Map a file at a multiple of `alignment`, within addresses that are reserved first."""
    reserved = nbytes + alignment
    low = _mmap(None, reserved, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if low == _FAILED:
        raise _error("mmap")
    start = -(-low // alignment) * alignment
    if _mmap(start, nbytes, protection, flags | _MAP_FIXED, descriptor, 0) == _FAILED:
        error = _error("mmap")
        _munmap(low, reserved)
        raise error
    end = -(-(start + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    for first, last in ((low, start), (end, low + reserved)):
        if last > first:
            _munmap(first, last - first)
    return int(start)


def _error(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")
