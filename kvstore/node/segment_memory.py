"""What every medium can do: the narrow protocol behind which DRAM, SSD and CXL look alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import StoreClosed
from kvstore.node.kept_index import KeptIndex
from kvstore.wire.messages import Medium
from transfer.pieces import Pieces, copy_pieces

if TYPE_CHECKING:
    import torch

    from transfer import Memory
    from transfer.storage.storage import Storage


class SegmentMemory(Protocol):
    """A run of bytes that a node lends. Thread-safe between `open` and `close`."""

    @property
    def medium(self) -> Medium:
        """What the bytes lie in."""

    @property
    def nbytes(self) -> int:
        """How many."""

    @property
    def array(self) -> NDArray[np.uint8] | None:
        """[nbytes] uint8, the bytes themselves; None if they have no address."""

    def open(self) -> KeptIndex:
        """Get hold of the bytes; return what is known of them. Closed by the segment.

        Raises:
            SegmentUnusable: The file or device is not what it should be.
            StorageBusy: Another node has it.
            StorageFull: There is no room for it.
            StorageFailed: It does not work.
            OSError, ValueError: No memory, or no such NUMA node.
        """

    def lend(self) -> Memory | torch.Tensor | Storage:
        """Return what the transfer engine registers."""

    def read(self, target: NDArray[np.uint8], pieces: Pieces, deadline_s: float) -> None:
        """Copy pieces from here into host memory; waits.

        Raises:
            StorageFailed: They cannot be read.
            TransferTimeout: Not in time.
        """

    def write(self, source: NDArray[np.uint8], pieces: Pieces, deadline_s: float) -> None:
        """Copy pieces from host memory to here; waits. Raises as `read`."""

    def close(self) -> None:
        """Give the bytes back, when nobody reads or writes them any more; idempotent."""


class AddressableMemory:
    """The part that all byte-addressable media share: the index lives as long as the process.

    Args:
        medium: What the bytes lie in.
        nbytes: How many.
    """

    def __init__(self, medium: Medium, nbytes: int) -> None:
        self._medium = medium
        self._nbytes = nbytes
        self._array: NDArray[np.uint8] | None = None

    @property
    def medium(self) -> Medium:
        """See `SegmentMemory`."""
        return self._medium

    @property
    def nbytes(self) -> int:
        """See `SegmentMemory`."""
        return self._nbytes

    @property
    def array(self) -> NDArray[np.uint8] | None:
        """See `SegmentMemory`; None while it is not open."""
        return self._array

    def read(self, target: NDArray[np.uint8], pieces: Pieces, deadline_s: float) -> None:
        """See `SegmentMemory`."""
        del deadline_s
        copy_pieces(target, self._opened(), pieces)

    def write(self, source: NDArray[np.uint8], pieces: Pieces, deadline_s: float) -> None:
        """See `SegmentMemory`."""
        del deadline_s
        copy_pieces(self._opened(), source, pieces)

    def _opened(self) -> NDArray[np.uint8]:
        if self._array is None:
            raise StoreClosed(what=f"{self._medium} segment", problem="not open")
        return self._array
