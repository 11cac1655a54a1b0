"""A byte-addressable path: a dax device, or a file of a dax file system, mapped.

CXL memory that the kernel has made a NUMA node needs no mapping of ours: see `DramSegment`.
Peers of the same host reach a mapping by its address, others by the network; what is in it is not
believed after a restart, because nothing beside a device says what it was.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import stat
from pathlib import Path
from typing import Final

import torch

from kvstore.errors import SegmentUnusable, StoreClosed
from kvstore.node.kept_index import KeptIndex
from kvstore.node.node_index import NodeIndex
from kvstore.node.segment_memory import AddressableMemory
from kvstore.wire.messages import Medium
from transfer import StorageBusy, StorageFailed

DEVICES: Final = Path("/sys/dev/char")
DEFAULT_ALIGNMENT: Final = 2 << 20


class CxlSegment(AddressableMemory):
    """See `SegmentMemory`.

    Args:
        path: A dax device, or a regular file that exists and is large enough.
        nbytes: Size of the segment, from the start of it.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        super().__init__(Medium.CXL, nbytes)
        self._path = path
        self._fd = -1
        self._tensor: torch.Tensor | None = None

    def open(self) -> KeptIndex:
        """Lock and map it.

        Raises:
            SegmentUnusable: It is too small, or neither a dax device nor a file.
            StorageBusy: Another node has it.
            StorageFailed: It cannot be opened or mapped.
        """
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mapped = mmap.mmap(self._fd, self._mapped_bytes(), flags=mmap.MAP_SHARED)
        except BlockingIOError as error:
            self.close()
            raise StorageBusy(
                str(self._path), "open", "another node uses it", errno=error.errno or 0
            ) from error
        except OSError as error:
            self.close()
            number = error.errno or 0
            raise StorageFailed(
                str(self._path), "open", os.strerror(number), errno=number
            ) from error
        except SegmentUnusable:
            self.close()
            raise
        # The tensor keeps the mapping alive as long as anybody looks at it.
        self._tensor = torch.frombuffer(mapped, dtype=torch.uint8)[: self._nbytes]
        self._array = self._tensor.numpy()
        return KeptIndex(NodeIndex(self._nbytes))

    def lend(self) -> torch.Tensor:
        """Return the mapped bytes."""
        if self._tensor is None:
            raise StoreClosed(what="cxl segment", problem="not open")
        return self._tensor

    def close(self) -> None:
        """Unlock and forget it; it is unmapped with the last view."""
        fd, self._fd = self._fd, -1
        self._tensor, self._array = None, None
        if fd >= 0:
            os.close(fd)

    def _mapped_bytes(self) -> int:
        """Bytes to map, a multiple of what the device demands."""
        status = os.fstat(self._fd)
        if stat.S_ISREG(status.st_mode):
            size, alignment = status.st_size, mmap.PAGESIZE
        elif stat.S_ISCHR(status.st_mode):
            device = DEVICES / f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
            size = _number(device / "size") or 0
            alignment = _number(device / "align") or DEFAULT_ALIGNMENT
        else:
            raise SegmentUnusable(
                path=str(self._path), expected="a dax device or a file", seen="neither"
            )
        needed = -(-self._nbytes // alignment) * alignment
        if size < self._nbytes or (needed > size and stat.S_ISCHR(status.st_mode)):
            raise SegmentUnusable(
                path=str(self._path), expected=f"at least {needed} bytes", seen=f"{size} bytes"
            )
        return min(needed, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)


def _number(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text(encoding="ascii").strip(), 0)
    return None
