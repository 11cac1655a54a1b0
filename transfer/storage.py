"""Memory without a host address: a file, a GPU. What such memory must be able to do.

Everything else in the package works on host memory. What has no address is moved by its own
`Storage`, into host memory or out of it; between two storages, and between a storage and a peer,
the bytes pass through a bounce buffer (see `staging`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from transfer.errors import TransferError
from transfer.pieces import Pieces
from transfer.region import Bytes

Done = Callable[[TransferError | None], object]


@runtime_checkable
class Storage(Protocol):
    """A run of bytes that only its owner can move. Thread-safe."""

    @property
    def kind(self) -> str:
        """Kind of memory: "file", "cuda:0"."""

    @property
    def nbytes(self) -> int:
        """Size."""

    def fetch(self, target: Bytes, pieces: Pieces, deadline: float, done: Done) -> None:
        """Move pieces from here into host memory.

        The bounds have been checked. Returns at once; `done(error)` is called exactly once, from
        any thread. Until then `target` must stay untouched.

        Args:
            target: [M] uint8, contiguous.
            pieces: source offsets count here, target offsets in `target`.
            deadline: `time.monotonic` after which nothing new is begun.
            done: gets None, or why it failed; then some bytes may be in place.

        Raises:
            TransferError: nothing was begun, `done` is not called.
        """

    def store(self, source: Bytes, pieces: Pieces, deadline: float, done: Done) -> None:
        """Move pieces from host memory to here. As `fetch`, the other way."""
