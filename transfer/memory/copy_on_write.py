"""A memory file, mapped so that what is written here stays here.

For whoever is handed bytes of a peer and cannot be kept from writing: the kernel gives this
process a page of its own at the first store into it, and the file keeps what it has.
"""

from __future__ import annotations

import mmap
import os
from typing import Final

import numpy as np
from numpy.typing import NDArray

from transfer.memory.huge_pages import AlignedMapping

_PAGE_BYTES: Final = mmap.PAGESIZE


class CopyOnWrite:
    """All of a memory file. It stays mapped for as long as anybody has a view of it. Thread-safe.

    Pages are mapped as they are touched.

    Args:
        descriptor: The file; not needed any more afterwards.
        nbytes: Its size.

    Attributes:
        array: [nbytes] uint8.

    Raises:
        OSError: It cannot be mapped so.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self._mapping = AlignedMapping(descriptor, nbytes, private=True)
        self._page_bytes = max(_PAGE_BYTES, os.fstat(descriptor).st_blksize)
        self.array: NDArray[np.uint8] = np.frombuffer(self._mapping.buffer, dtype=np.uint8)

    def forget(self, start: int, nbytes: int) -> None:
        """Undo what was written here into `[start, start + nbytes)`, and into the pages around it.

        Raises:
            OSError: The kernel does not.
        """
        page = self._page_bytes
        first, end = start // page * page, -(-(start + nbytes) // page) * page
        self._mapping.madvise(mmap.MADV_DONTNEED, first, min(end, len(self._mapping)) - first)
