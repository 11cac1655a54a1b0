"""Transfers with a peer's device memory: opened here where it can be, else moved by its owner."""

from __future__ import annotations

from typing import Protocol

from transfer.backends.cuda_memory import CudaMemory
from transfer.errors import AccessRefused, DeviceUnavailable, StorageFailed
from transfer.memory.region import Region, RegionKey
from transfer.pieces import Pieces
from transfer.storage.batch_queue import Work
from transfer.storage.bounce import End, StagedWork, StorageEnd, near_end
from transfer.storage.storage import Done, StorageRegion, Waiter


class Opener(Protocol):
    """What opens windows and moves between regions of this process: the engine's `Staging`."""

    def open_window(self, key: RegionKey, deadline: float) -> StorageRegion:
        """See `Staging`."""

    def move(
        self,
        source: Region,
        target: Region,
        pieces: Pieces,
        operation: str,
        deadline: float,
        done: Done,
    ) -> None:
        """See `Staging`."""

    def staged(
        self, source: End, target: End, pieces: Pieces, deadline: float, peer: str = ""
    ) -> StagedWork:
        """See `Staging`."""


class OpenedWork:
    """Work of a `BatchQueue`, of one step.

    Args:
        opener: the engine's.
        own: our region.
        key: of the peer's device memory, with both rights.
        pieces: what to move.
        fallback: moves them with the owner's help.
        write: the direction.
        deadline: of the operation.
    """

    def __init__(
        self,
        opener: Opener,
        own: Region,
        key: RegionKey,
        pieces: Pieces,
        fallback: Work,
        *,
        write: bool,
        deadline: float,
    ) -> None:
        self._opener = opener
        self._own = own
        self._key = key
        self._pieces = pieces
        self._fallback = fallback
        self._write = write
        self._deadline = deadline

    def __len__(self) -> int:
        return 1

    def weigh(self, index: int) -> int:
        """All bytes."""
        return self._pieces.nbytes

    def perform(self, index: int, lane: int) -> None:
        """Open the window, and let the copy engine do the rest."""
        try:
            window = self._opener.open_window(self._key, self._deadline)
        except (DeviceUnavailable, StorageFailed, AccessRefused):
            work = self._fallback
        else:
            if self._directly(window):
                return
            far = StorageEnd(window.storage)
            near = near_end(self._own)
            source, target = (near, far) if self._write else (far, near)
            work = self._opener.staged(source, target, self._pieces, self._deadline)
        for step in range(len(work)):
            work.perform(step, lane)

    def _directly(self, window: StorageRegion) -> bool:
        """Move without a bounce buffer of ours, if both ends can."""
        source, target = (self._own, window) if self._write else (window, self._own)
        if isinstance(source, StorageRegion) and isinstance(target, StorageRegion):
            ours, theirs = source.storage, target.storage
            if not isinstance(ours, CudaMemory) or not ours.reaches(theirs):
                return False
        operation = "write" if self._write else "read"
        waiter = Waiter(window.kind, operation, self._deadline)
        self._opener.move(source, target, self._pieces, operation, self._deadline, waiter.end)
        waiter.wait()
        return True
