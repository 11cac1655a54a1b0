"""Memory that other processes of this host can map: anonymous memory files.

A memory file has no name in any file system, so a killed process leaves nothing behind. It is
sealed against shrinking and growing: a peer that maps it can rely on its size (touching pages
behind a shrunk end would kill the peer with SIGBUS), and so can we.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import weakref
from typing import Final

import torch

PAGE_BYTES: Final = mmap.PAGESIZE
SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_live: weakref.WeakSet[Memory] = weakref.WeakSet()
_live_lock = threading.Lock()


class Memory:
    """Zeroed, page-aligned, prefaulted memory in a sealed memory file.

    Made by `allocate`. Not tied to an engine. Views of `tensor` may outlive `close`: the pages
    are unmapped when the last view is gone.

    Attributes:
        tensor: [nbytes] uint8, contiguous.
        fd: the memory file; -1 once closed.
    """

    def __init__(self, nbytes: int) -> None:
        if nbytes <= 0:
            raise ValueError(f"nbytes must be positive, got {nbytes}")
        file_bytes = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        self.fd = os.memfd_create("moe-runtime", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, file_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            mapped = mmap.mmap(self.fd, file_bytes, flags=flags)
        except BaseException:
            os.close(self.fd)
            raise
        self.nbytes = nbytes
        # The tensor keeps the mapping alive. Never close the mapping by hand: torch holds a
        # bare pointer into it, and reading that after an unmap kills the process.
        self.tensor = torch.frombuffer(mapped, dtype=torch.uint8)[:nbytes]
        self.start = self.tensor.data_ptr()
        with _live_lock:
            _live.add(self)

    def close(self) -> None:
        """Close the file and forget the tensor; idempotent. Views that are alive stay valid."""
        with _live_lock:
            _live.discard(self)
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
            self.tensor = torch.empty(0, dtype=torch.uint8)

    def __del__(self) -> None:
        if getattr(self, "fd", -1) >= 0:
            os.close(self.fd)


def allocate(nbytes: int) -> Memory:
    """Allocate memory that same-host peers can map once it is registered and offered.

    Raises:
        ValueError: `nbytes` is not positive.
        OSError: no memory, or no file descriptors.
    """
    return Memory(nbytes)


def memory_of(start: int, nbytes: int) -> tuple[Memory, int] | None:
    """Return the live `Memory` that holds `[start, start + nbytes)` and the offset in it.

    So a tensor that is a view of a memory (a KV page, an expert's slab) is as shareable as
    the whole.
    """
    with _live_lock:
        memories = list(_live)
    for memory in memories:
        offset = start - memory.start
        if memory.fd >= 0 and offset >= 0 and offset + nbytes <= memory.nbytes:
            return memory, offset
    return None
