"""Memory that other processes of this host can map: anonymous memory files.

A memory file has no name in any file system, so a killed process leaves nothing behind. It is
sealed against shrinking and growing: a peer that maps it can rely on its size (touching pages
behind a shrunk end would kill the peer with SIGBUS), and so can we.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import mmap
import os
import platform
import weakref
from enum import StrEnum
from pathlib import Path
from typing import Final, SupportsIndex

import torch

from transfer.memory.by_address import ByAddress
from transfer.memory.huge_pages import AlignedMapping, collapse, huge_page_bytes
from transfer.memory.room import check_room, meminfo
from transfer.memory.small_pages import small_pages

PAGE_BYTES: Final = mmap.PAGESIZE
HUGE_BYTES_MIN: Final = 1 << 20
SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

# Values of the kernel's interface that Python does not name.
_MADV_POPULATE_READ: Final = 22
_MADV_POPULATE_WRITE: Final = 23
_MPOL_PREFERRED: Final = 1
_MBIND: Final = {"x86_64": 237, "aarch64": 235, "riscv64": 235}

# How a peer knows that a file is in huge pages: the kernel tells it nothing of them.
COLLAPSED_NAME: Final = "moe-runtime-huge"

_NODES: Final = Path("/sys/devices/system/node/online")
_SHMEM_HUGE: Final = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


class Pages(StrEnum):
    """What a memory is made of.

    POOL: huge pages that the administrator has set aside (vm.nr_hugepages).
    TRANSPARENT: huge pages of the kernel's own making, except for what is behind the last whole
        one. Where memory files have them by policy, they are used as far as the kernel can.
    PLAIN: pages of the base size.
    """

    POOL = "pool"
    TRANSPARENT = "transparent"
    PLAIN = "plain"


class _NotHugeError(Exception):
    """The kernel made no huge pages of a new file."""


class Memory:
    """Zeroed, page-aligned, prefaulted memory in a sealed memory file.

    Made by `allocate`. Not tied to an engine. Views of `tensor` may outlive `close`: the pages
    are unmapped when the last view is gone.

    Attributes:
        tensor: [nbytes] uint8, contiguous.
        fd: the memory file; -1 once closed.
        pages: what it is made of.
        numa_node: where its pages were asked for, None for wherever the kernel likes.
    """

    def __init__(
        self, nbytes: int, *, huge_pages: bool = True, numa_node: int | None = None
    ) -> None:
        if not isinstance(nbytes, SupportsIndex):
            raise TypeError(f"nbytes must be an int, got {type(nbytes).__name__}")
        if nbytes <= 0:
            raise ValueError(f"nbytes must be positive, got {nbytes}")
        if numa_node is not None and numa_node not in numa_nodes():
            raise ValueError(f"no NUMA node {numa_node}, there are {numa_nodes()}")
        self.fd = -1
        self.start = 0
        self.nbytes = nbytes
        self.numa_node = numa_node
        # A small memory is not worth the question.
        table = meminfo() if nbytes >= HUGE_BYTES_MIN else {}
        mapped = self._make_huge(nbytes, table) if huge_pages else None
        if mapped is None:
            check_room(nbytes, table)
            mapped = self._make_plain(nbytes, huge_pages=huge_pages)
        # The tensor keeps the mapping alive. Never close the mapping by hand: torch holds a
        # bare pointer into it, and reading that after an unmap kills the process.
        self.tensor = torch.frombuffer(mapped.buffer, dtype=torch.uint8)[:nbytes]
        self.start = self.tensor.data_ptr()
        if self.pages is Pages.PLAIN:
            small_pages.add(self, self.start, nbytes)
        _live.add(self.start, weakref.ref(self))

    def close(self) -> None:
        """Close the file and forget the tensor; idempotent. Views that are alive stay valid."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            _live.discard(self.start)
            os.close(fd)
            self.tensor = torch.empty(0, dtype=torch.uint8)

    def __del__(self) -> None:
        if getattr(self, "fd", -1) >= 0:
            _live.discard(self.start)
            os.close(self.fd)

    def _make_huge(self, nbytes: int, table: dict[str, int]) -> AlignedMapping | None:
        page_bytes, free = _pool(table)
        file_bytes = -(-nbytes // page_bytes) * page_bytes if page_bytes else 0
        # A small memory would waste most of a huge page.
        if nbytes < page_bytes or not 0 < file_bytes <= free * page_bytes:
            return None
        self.pages = Pages.POOL
        try:
            return self._make(file_bytes, os.MFD_HUGETLB)
        except OSError:
            return None  # others were faster

    def _make_plain(self, nbytes: int, *, huge_pages: bool) -> AlignedMapping:
        file_bytes = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        if huge_pages:
            self.pages = Pages.TRANSPARENT
            if _asks_for_huge():
                return self._make(file_bytes, 0)
            if 0 < huge_page_bytes() <= nbytes:
                with contextlib.suppress(_NotHugeError):
                    return self._make(file_bytes, 0, collapsed=True)
        self.pages = Pages.PLAIN
        return self._make(file_bytes, 0)

    def _make(self, file_bytes: int, flags: int, *, collapsed: bool = False) -> AlignedMapping:
        name = COLLAPSED_NAME if collapsed else "moe-runtime"
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
        try:
            os.ftruncate(fd, file_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            mapped = AlignedMapping(fd, file_bytes)
            if self.pages is Pages.TRANSPARENT and not collapsed:
                mapped.madvise(mmap.MADV_HUGEPAGE)
            if self.numa_node is not None and len(numa_nodes()) > 1:
                prefer_node(mapped.buffer, self.numa_node)
            if collapsed and not collapse(mapped):
                raise _NotHugeError
            populate(mapped, writable=True)
        except BaseException:
            os.close(fd)
            raise
        self.fd = fd
        return mapped


def allocate(nbytes: int, *, huge_pages: bool = True, numa_node: int | None = None) -> Memory:
    """Allocate memory that same-host peers can map once it is registered and offered.

    Args:
        nbytes: how much.
        huge_pages: take huge pages where the machine has them; `Memory.pages` tells. Those of
            the administrator's pool are taken for at least one page's worth.
        numa_node: take the pages from this node while it has some.

    Raises:
        TypeError, ValueError: `nbytes` is no positive int, or there is no such node.
        OSError: less memory than that is available here, or there are no file descriptors.
    """
    return Memory(nbytes, huge_pages=huge_pages, numa_node=numa_node)


def memory_of(start: int, nbytes: int) -> tuple[Memory, int] | None:
    """Return the live `Memory` that holds `[start, start + nbytes)` and the offset in it.

    So a tensor that is a view of a memory (a KV page, an expert's slab) is as shareable as
    the whole.
    """
    reference = _live.at_or_below(start)
    memory = reference() if reference is not None else None
    if memory is None or memory.fd < 0:
        return None
    offset = start - memory.start
    return (memory, offset) if offset + nbytes <= memory.nbytes else None


def has_small_pages(descriptor: int) -> bool:
    """Tell whether a memory file lies in pages of the base size."""
    if os.fstat(descriptor).st_blksize > PAGE_BYTES or _asks_for_huge():
        return False
    with contextlib.suppress(OSError):  # no /proc
        return f"/memfd:{COLLAPSED_NAME} " not in os.readlink(f"/proc/self/fd/{descriptor}")
    return True


def populate(mapped: AlignedMapping, *, writable: bool) -> None:
    """Map all pages now, so that no copy pays for it.

    Pages mapped by a read (MAP_POPULATE reads shared ones) are clean, and the first store into
    each then has the processor mark it in the page table: half the speed of a copy. So ours are
    mapped by a write where they are to be written.

    Raises:
        OSError: no memory.
    """
    try:
        mapped.madvise(_MADV_POPULATE_WRITE if writable else _MADV_POPULATE_READ)
    except OSError as error:
        if error.errno != errno.EINVAL:  # else a kernel before 5.14: pages come as they are touched
            raise


@functools.cache  # asked for every transfer over several rails
def numa_nodes() -> tuple[int, ...]:
    """Return the NUMA nodes of this machine at the first call; (0,) where it knows of none."""
    with contextlib.suppress(OSError):
        nodes: list[int] = []
        for part in _NODES.read_text(encoding="ascii").strip().split(","):
            first, _, last = part.partition("-")
            nodes.extend(range(int(first), int(last or first) + 1))
        return tuple(nodes)
    return (0,)


def prefer_node(mapped: mmap.mmap | memoryview, node: int) -> None:
    """Have a mapping's pages, for all who map the same file, come from a NUMA node.

    Raises:
        OSError: the kernel refuses, or this processor's call number is not known.
    """
    number = _MBIND.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"mbind is not known on {platform.machine()}")
    mask = (ctypes.c_ulong * (node // 64 + 1))()
    mask[node // 64] = 1 << (node % 64)
    view = (ctypes.c_char * len(mapped)).from_buffer(mapped)
    # The kernel takes one bit less than it is told.
    arguments = (ctypes.addressof(view), len(mapped), _MPOL_PREFERRED, ctypes.addressof(mask),
                 len(mask) * 64 + 1, 0)  # fmt: skip
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(number), *(ctypes.c_ulong(value) for value in arguments)) < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"mbind to node {node}: {os.strerror(error)}")


def _pool(table: dict[str, int]) -> tuple[int, int]:
    """Return the size of the pool's huge pages and how many are free; zeros without a pool."""
    free = table.get("HugePages_Free", 0) - table.get("HugePages_Rsvd", 0)
    return (table.get("Hugepagesize", 0) << 10, free) if free > 0 else (0, 0)


def _asks_for_huge() -> bool:
    """Whether the kernel gives memory files huge pages to those who ask."""
    with contextlib.suppress(OSError):
        chosen = _SHMEM_HUGE.read_text(encoding="ascii").partition("[")[2].partition("]")[0]
        return chosen in ("always", "within_size", "advise", "force")
    return False


# All live memories. A reference, as a memory that nobody holds any more is closed.
_live: Final = ByAddress[weakref.ref[Memory]]()
