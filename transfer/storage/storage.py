"""Memory without a host address: a file, a GPU. What such memory must be able to do.

Everything else in the package works on host memory. What has no address is moved by its own
`Storage`, into host memory or out of it; between two storages, and between a storage and a peer,
the bytes pass through a bounce buffer (see `staging`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, NoReturn, Protocol, runtime_checkable

import torch

from transfer.errors import TransferError, TransferTimeout
from transfer.memory.address_space import is_writable
from transfer.memory.memory import Memory
from transfer.memory.region import Bytes, ReadOnlyRegion, Region
from transfer.pieces import Pieces

# Whoever waits for an operation gives its threads this long to notice the deadline themselves.
GRACE_S: Final = 1.0

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

    def fetch(
        self, target: Bytes, pieces: Pieces, deadline: float, done: Done, *, wait: bool = True
    ) -> None:
        """Move pieces from here into host memory.

        The bounds have been checked. Returns once there is room in its queue; `done(error)` is
        called exactly once, from any thread. Until then `target` must stay untouched.

        Args:
            target: [M] uint8, contiguous.
            pieces: source offsets count here, target offsets in `target`.
            deadline: `time.monotonic` after which nothing new is begun.
            done: gets None, or why it failed; then some bytes may be in place.
            wait: whether to wait for room, until the deadline.

        Raises:
            TransferTimeout: no room; nothing was begun, `done` is not called.
            TransferError: nothing was begun, `done` is not called.
        """

    def store(self, source: Bytes, pieces: Pieces, deadline: float, done: Done) -> None:
        """Move pieces from host memory to here. As `fetch`, the other way; waits for room."""


class StorageRegion(Region):
    """A region whose bytes only its storage can move.

    It has no address and no array: whoever takes it for host memory gets an `AttributeError`.

    Attributes:
        storage: moves the bytes.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.kind = storage.kind
        self.nbytes = storage.nbytes
        self.memory = None
        self.memory_offset = 0

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a region of {self.__dict__.get('kind')} memory has no {name!r}")


def make_region(memory: Memory | torch.Tensor | Storage) -> Region:
    """Make the region of whatever memory it is.

    Raises:
        ValueError: a tensor that is not contiguous, of a device that is not supported, or whose
            memory is not mapped.
        DeviceUnavailable: a tensor of a device that this process cannot use.
    """
    if not isinstance(memory, Memory | torch.Tensor) and isinstance(memory, Storage):
        return StorageRegion(memory)
    region = Region(memory)
    # What lies in a `Memory` is ours to write to.
    if region.memory is None and region.nbytes and not is_writable(region.start, region.nbytes):
        return ReadOnlyRegion(memory)
    return region


class Waiter:
    """Waits for the `done` of one operation on a storage.

    Args:
        name: of the storage, for the error.
        operation: "read", "write" or "sync".
        deadline: of the operation.
    """

    def __init__(self, name: str, operation: str, deadline: float) -> None:
        self._name = name
        self._operation = operation
        self._deadline = deadline
        self._started = time.monotonic()
        self._ended = threading.Event()
        self._error: TransferError | None = None

    def end(self, error: TransferError | None) -> None:
        """The `done` to hand over."""
        self._error = error
        self._ended.set()

    def wait(self) -> None:
        """Wait for the end.

        Raises:
            TransferTimeout: not ended in time; it may still move bytes.
            TransferError: how it ended.
        """
        if not self._ended.wait(max(self._deadline - time.monotonic(), 0.0) + GRACE_S):
            elapsed_s = time.monotonic() - self._started
            raise TransferTimeout(self._name, self._operation, elapsed_s=elapsed_s)
        if self._error is not None:
            raise self._error


def fetch_now(storage: Storage, target: Bytes, pieces: Pieces, deadline: float) -> None:
    """`Storage.fetch`, and wait. Raises as `Waiter.wait`."""
    waiter = Waiter(storage.kind, "read", deadline)
    storage.fetch(target, pieces, deadline, waiter.end)
    waiter.wait()


def store_now(storage: Storage, source: Bytes, pieces: Pieces, deadline: float) -> None:
    """`Storage.store`, and wait. Raises as `Waiter.wait`."""
    waiter = Waiter(storage.kind, "write", deadline)
    storage.store(source, pieces, deadline, waiter.end)
    waiter.wait()
