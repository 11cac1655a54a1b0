"""Memory of the GPUs of this process as storage.

Threads of a device copy on streams of their own, after whatever the caller had queued on its
current stream; an operation ends when the copy has ended, so its bytes are there for every stream.
Between GPUs that reach one another the copy engine moves the bytes directly, between host and
device they pass through pinned memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, Protocol, TypeGuard, runtime_checkable

import torch

from transfer.backends.cuda_runtime import CudaDriver, load
from transfer.errors import DeviceUnavailable, EngineClosed, TransferError
from transfer.memory.region import Bytes
from transfer.pieces import Pieces, copy_pieces, join_neighbours
from transfer.rails.slices import cut
from transfer.storage.batch_queue import BatchQueue
from transfer.storage.storage import Done

THREADS: Final = 2
QUEUED_MAX: Final = 256
PINNED_BYTES: Final = 4 << 20
STEP_PIECES: Final = 1024


@runtime_checkable
class Allocation(Protocol):
    """Memory of another process, which may be closed while copies want to use it."""

    def retain(self) -> bool:
        """Become a user; False if it is closed already."""

    def release(self) -> bool:
        """Be no user any more. Returns whether that closed it."""


class CudaDevice:
    """The threads and streams that copy to and from one device. Thread-safe."""

    def __init__(self, driver: CudaDriver, ordinal: int) -> None:
        self.driver = driver
        self.ordinal = ordinal
        self.kind = f"cuda:{ordinal}"
        self.streams = [driver.open_stream(ordinal) for _ in range(THREADS)]
        self.pinned = [driver.pinned(PINNED_BYTES) for _ in range(THREADS)]
        self.queue = BatchQueue(
            self.kind,
            backend="cuda",
            threads=THREADS,
            queued_max=QUEUED_MAX,
            turn_bytes=PINNED_BYTES,
            closed=lambda name, operation: EngineClosed(f"{name} was closed"),
        )
        self.queue.open()

    def close(self) -> None:
        """End the threads, free the streams."""
        if self.queue.close():
            for stream in self.streams:
                self.driver.close_stream(self.ordinal, stream)


class CudaMemory:
    """A run of bytes on a device; a `Storage`. Thread-safe.

    Args:
        device: copies to and from it.
        address: on the device.
        nbytes: size.
        owner: kept while this is; a peer's allocation is told of every copy under way.
    """

    def __init__(
        self,
        device: CudaDevice,
        address: int,
        nbytes: int,
        owner: torch.Tensor | Allocation,
    ) -> None:
        self.device = device
        self.address = address
        self.nbytes = nbytes
        self._owner = owner

    @property
    def kind(self) -> str:
        """Kind of memory, "cuda:0"."""
        return self.device.kind

    def fetch(
        self, target: Bytes, pieces: Pieces, deadline: float, done: Done, *, wait: bool = True
    ) -> None:
        """Copy to host memory; see `Storage.fetch`."""
        self._start("read", _Fetch(self, target, pieces), (self,), deadline, done, wait=wait)

    def store(self, source: Bytes, pieces: Pieces, deadline: float, done: Done) -> None:
        """Copy from host memory; see `Storage.store`."""
        self._start("write", _Store(self, source, pieces), (self,), deadline, done)

    def reaches(self, other: object) -> TypeGuard[CudaMemory]:
        """Whether the copy engine can move bytes from here to there."""
        return isinstance(other, CudaMemory) and self.device.driver.can_access(
            self.device.ordinal, other.device.ordinal
        )

    def move_to(self, other: CudaMemory, pieces: Pieces, deadline: float, done: Done) -> None:
        """Copy to other device memory that is reached; source offsets count here."""
        self._start("write", _Move(self, other, pieces), (self, other), deadline, done)

    def retain(self) -> None:
        """Keep a peer's allocation open.

        Raises:
            DeviceUnavailable: it is closed: the key was withdrawn, or the peer is lost.
        """
        if isinstance(self._owner, Allocation) and not self._owner.retain():
            raise DeviceUnavailable(self.kind, "the window of the peer was closed")

    def release(self) -> None:
        """Undo `retain`."""
        if isinstance(self._owner, Allocation):
            self._owner.release()

    def _start(
        self,
        operation: str,
        work: _Work,
        memories: tuple[CudaMemory, ...],
        deadline: float,
        done: Done,
        *,
        wait: bool = True,
    ) -> None:
        retained: list[CudaMemory] = []

        def let_go() -> None:
            work.forget()
            for memory in retained:
                memory.release()

        def ended(error: TransferError | None) -> None:
            let_go()
            done(error)

        try:
            for memory in memories:
                memory.retain()
                retained.append(memory)
            self.device.queue.submit(work, operation, deadline, ended, wait=wait)
        except TransferError:
            let_go()
            raise


class _Work:
    """Copies of one operation, a pinned buffer full at a time."""

    def __init__(self, memory: CudaMemory, pieces: Pieces) -> None:
        self._memory = memory
        self._device = memory.device
        self._steps = cut(
            join_neighbours(pieces), slice_bytes=PINNED_BYTES, slice_pieces=STEP_PIECES
        )
        self._event = self._device.driver.mark(self._device.ordinal)

    def __len__(self) -> int:
        return len(self._steps)

    def perform(self, index: int, lane: int) -> None:
        """Take one step; the kinds of copies differ here."""
        raise NotImplementedError

    def weigh(self, index: int) -> int:
        """Bytes of a step."""
        return self._steps[index].nbytes

    def forget(self) -> None:
        """Free the event; at the end."""
        self._device.driver.forget(self._device.ordinal, self._event)

    def _copy(self, lane: int, targets: list[int], sources: list[int], lengths: list[int]) -> None:
        driver, ordinal = self._device.driver, self._device.ordinal
        stream = self._device.streams[lane]
        driver.follow(ordinal, stream, self._event)
        try:
            for target, source, length in zip(targets, sources, lengths, strict=True):
                driver.copy(ordinal, stream, target, source, length)
        finally:
            # Even after a failure: what was queued must not touch memory later.
            driver.synchronize(ordinal, stream)


class _HostWork(_Work):
    def __init__(self, memory: CudaMemory, array: Bytes, pieces: Pieces) -> None:
        super().__init__(memory, pieces)
        self._array = array


class _Fetch(_HostWork):
    def perform(self, index: int, lane: int) -> None:
        """Device to pinned memory, then to where it belongs."""
        step, pinned = self._steps[index], self._device.pinned[lane]
        packed = step.lengths.cumsum() - step.lengths
        self._copy(
            lane,
            (packed + pinned.ctypes.data).tolist(),
            (step.source_offsets + self._memory.address).tolist(),
            step.lengths.tolist(),
        )
        copy_pieces(self._array, pinned, Pieces(packed, step.target_offsets, step.lengths))


class _Store(_HostWork):
    def perform(self, index: int, lane: int) -> None:
        """To pinned memory, then to the device."""
        step, pinned = self._steps[index], self._device.pinned[lane]
        packed = step.lengths.cumsum() - step.lengths
        copy_pieces(pinned, self._array, Pieces(step.source_offsets, packed, step.lengths))
        self._copy(
            lane,
            (step.target_offsets + self._memory.address).tolist(),
            (packed + pinned.ctypes.data).tolist(),
            step.lengths.tolist(),
        )


class _Move(_Work):
    def __init__(self, source: CudaMemory, target: CudaMemory, pieces: Pieces) -> None:
        super().__init__(source, pieces)
        self._target = target

    def perform(self, index: int, lane: int) -> None:
        """Device to device."""
        step = self._steps[index]
        self._copy(
            lane,
            (step.target_offsets + self._target.address).tolist(),
            (step.source_offsets + self._memory.address).tolist(),
            step.lengths.tolist(),
        )


class CudaDevices:
    """The devices of this process that are in use. Thread-safe.

    Args:
        driver: loads the runtime at the first use.
    """

    def __init__(self, driver: Callable[[], CudaDriver] = load) -> None:
        self._load = driver
        self._lock = threading.Lock()
        self._devices: dict[int, CudaDevice] = {}
        self._closed = False

    def get(self, ordinal: int) -> CudaDevice:
        """Return a device, starting its threads at the first use.

        Raises:
            DeviceUnavailable: there is none.
        """
        driver = self._load()
        with self._lock:
            if self._closed:
                raise EngineClosed("the devices were closed")
            if not 0 <= ordinal < len(driver.uuids()):
                raise DeviceUnavailable(f"cuda:{ordinal}", "this process does not see it")
            if ordinal not in self._devices:
                self._devices[ordinal] = CudaDevice(driver, ordinal)
            return self._devices[ordinal]

    def by_uuid(self, uuid: str) -> CudaDevice:
        """Return a device by its identity, whatever its ordinal is here. Raises as `get`."""
        uuids = list(self._load().uuids())
        if uuid not in uuids:
            raise DeviceUnavailable("cuda", f"device {uuid} is not visible to this process")
        return self.get(uuids.index(uuid))

    def memory_of(self, tensor: torch.Tensor) -> CudaMemory:
        """Return a contiguous CUDA tensor as storage.

        Raises:
            ValueError: not contiguous.
            DeviceUnavailable: its device cannot be used.
        """
        if not tensor.is_contiguous():
            raise ValueError("only contiguous tensors can be registered")
        index = tensor.device.index
        device = self.get(torch.cuda.current_device() if index is None else index)
        nbytes = tensor.numel() * tensor.element_size()
        return CudaMemory(device, tensor.data_ptr(), nbytes, tensor)

    def close(self) -> None:
        """End all threads, free all streams."""
        with self._lock:
            self._closed = True
            devices, self._devices = list(self._devices.values()), {}
        for device in devices:
            device.close()
