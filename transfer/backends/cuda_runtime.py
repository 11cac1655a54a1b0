"""The few calls of the CUDA runtime that moving bytes takes, through ctypes.

torch shares tensors between processes by private calls that count references in files of its own;
the runtime's calls are documented, stable since CUDA 4, and leave the life of a handle to us. The
library is the one that torch has loaded, so contexts and allocations are the same. Nothing is
loaded and no device is touched before `load` is called.

`CudaDriver` is what the rest uses, so that its logic is tested with memory of the host.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

import torch

from transfer.errors import DeviceUnavailable
from transfer.memory.region import Bytes

HANDLE_BYTES: Final = 64
SUCCESS: Final = 0
COPY_DEFAULT: Final = 4
STREAM_NON_BLOCKING: Final = 1
EVENT_BLOCKING_NO_TIMING: Final = 1 | 2
LAZY_PEER_ACCESS: Final = 1


class CudaDriver(Protocol):
    """Devices by their ordinal in this process, streams and addresses as integers.

    Every method may raise `DeviceUnavailable` with what the runtime said.
    """

    def uuids(self) -> Sequence[str]:
        """Identity of each device that this process sees."""

    def can_access(self, device: int, other: int) -> bool:
        """Whether kernels and copies of one device reach the memory of the other."""

    def export(self, device: int, address: int) -> tuple[bytes, int]:
        """Return the handle of the allocation that holds an address, and the offset in it."""

    def open_handle(self, device: int, handle: bytes) -> int:
        """Map another process's allocation; returns its address here. Once per handle."""

    def close_handle(self, device: int, address: int) -> None:
        """Undo `open_handle`."""

    def open_stream(self, device: int) -> int:
        """Make a stream that waits for no other."""

    def close_stream(self, device: int, stream: int) -> None:
        """Free a stream."""

    def mark(self, device: int) -> int:
        """Return an event after all that the calling thread has queued on its current stream."""

    def follow(self, device: int, stream: int, event: int) -> None:
        """Let what is queued on a stream from now on wait for an event."""

    def forget(self, device: int, event: int) -> None:
        """Free an event."""

    def copy(self, device: int, stream: int, target: int, source: int, nbytes: int) -> None:
        """Queue a copy between any two addresses of devices or of pinned memory."""

    def synchronize(self, device: int, stream: int) -> None:
        """Sleep until all that is queued on a stream is done."""

    def pinned(self, nbytes: int) -> Bytes:
        """Return page-locked host memory; freed with its last view."""


class CudaRuntime:
    """The real one.

    Args:
        library: libcudart as torch has loaded it.
        driver: libcuda.
    """

    def __init__(self, library: ctypes.CDLL, driver: ctypes.CDLL) -> None:
        self._library = library
        self._driver = driver
        library.cudaGetErrorString.restype = ctypes.c_char_p

    def uuids(self) -> Sequence[str]:
        """See `CudaDriver`."""
        count = torch.cuda.device_count()
        return [str(torch.cuda.get_device_properties(i).uuid) for i in range(count)]

    def can_access(self, device: int, other: int) -> bool:
        """See `CudaDriver`."""
        return device == other or torch.cuda.can_device_access_peer(device, other)

    def export(self, device: int, address: int) -> tuple[bytes, int]:
        """See `CudaDriver`."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        with torch.cuda.device(device):
            status = self._driver.cuMemGetAddressRange_v2(
                ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)
            )
            if status != SUCCESS:
                raise DeviceUnavailable(f"cuda:{device}", f"no allocation (driver error {status})")
            handle = _Handle()
            self._call(device, "cudaIpcGetMemHandle", ctypes.byref(handle), _pointer(base.value))
        return bytes(handle.reserved), address - base.value

    def open_handle(self, device: int, handle: bytes) -> int:
        """See `CudaDriver`."""
        opened = ctypes.c_void_p()
        given = _Handle((ctypes.c_ubyte * HANDLE_BYTES).from_buffer_copy(handle))
        with torch.cuda.device(device):
            self._call(
                device, "cudaIpcOpenMemHandle", ctypes.byref(opened), given, LAZY_PEER_ACCESS
            )
        return opened.value or 0

    def close_handle(self, device: int, address: int) -> None:
        """See `CudaDriver`."""
        with torch.cuda.device(device):
            self._call(device, "cudaIpcCloseMemHandle", _pointer(address))

    def open_stream(self, device: int) -> int:
        """See `CudaDriver`."""
        stream = ctypes.c_void_p()
        with torch.cuda.device(device):
            self._call(
                device, "cudaStreamCreateWithFlags", ctypes.byref(stream), STREAM_NON_BLOCKING
            )
        return stream.value or 0

    def close_stream(self, device: int, stream: int) -> None:
        """See `CudaDriver`."""
        with torch.cuda.device(device):
            self._call(device, "cudaStreamDestroy", _pointer(stream))

    def mark(self, device: int) -> int:
        """See `CudaDriver`."""
        with torch.cuda.device(device):
            event = self._new_event(device)
            current = torch.cuda.current_stream(device).cuda_stream
            self._call(device, "cudaEventRecord", _pointer(event), _pointer(current))
        return event

    def follow(self, device: int, stream: int, event: int) -> None:
        """See `CudaDriver`."""
        with torch.cuda.device(device):
            self._call(device, "cudaStreamWaitEvent", _pointer(stream), _pointer(event), 0)

    def forget(self, device: int, event: int) -> None:
        """See `CudaDriver`."""
        with torch.cuda.device(device):
            self._call(device, "cudaEventDestroy", _pointer(event))

    def copy(self, device: int, stream: int, target: int, source: int, nbytes: int) -> None:
        """See `CudaDriver`."""
        self._call(
            device,
            "cudaMemcpyAsync",
            _pointer(target),
            _pointer(source),
            ctypes.c_size_t(nbytes),
            COPY_DEFAULT,
            _pointer(stream),
        )

    def synchronize(self, device: int, stream: int) -> None:
        """See `CudaDriver`."""
        with torch.cuda.device(device):
            # A blocking event sleeps, where synchronizing a stream may burn a core.
            event = self._new_event(device)
            try:
                self._call(device, "cudaEventRecord", _pointer(event), _pointer(stream))
                self._call(device, "cudaEventSynchronize", _pointer(event))
            finally:
                self._call(device, "cudaEventDestroy", _pointer(event))

    def pinned(self, nbytes: int) -> Bytes:
        """See `CudaDriver`."""
        array: Bytes = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
        return array

    def _new_event(self, device: int) -> int:
        event = ctypes.c_void_p()
        self._call(
            device, "cudaEventCreateWithFlags", ctypes.byref(event), EVENT_BLOCKING_NO_TIMING
        )
        return event.value or 0

    def _call(self, device: int, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != SUCCESS:
            # Also takes the error off, so that torch does not stumble over it later.
            self._library.cudaGetLastError()
            text = self._library.cudaGetErrorString(status)
            raise DeviceUnavailable(f"cuda:{device}", f"{name}: {text.decode()}")


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


_lock = threading.Lock()
_loaded: CudaDriver | None = None


def load() -> CudaDriver:
    """Return the runtime, loading it at the first call.

    Raises:
        DeviceUnavailable: this build of torch, or this machine, has no CUDA.
    """
    global _loaded
    with _lock:
        if _loaded is None:
            _loaded = _load()
        return _loaded


def _load() -> CudaRuntime:
    if not torch.cuda.is_available():
        why = "torch was built without CUDA" if torch.version.cuda is None else "no device is seen"
        raise DeviceUnavailable("cuda", why)
    torch.cuda.current_device()  # makes the context
    for path in _mapped_libraries("libcudart"):
        try:
            return CudaRuntime(ctypes.CDLL(path), ctypes.CDLL("libcuda.so.1"))
        except OSError as error:
            raise DeviceUnavailable("cuda", str(error)) from error
    raise DeviceUnavailable("cuda", "torch has loaded no libcudart")


def _mapped_libraries(name: str) -> list[str]:
    """Paths of the libraries of this process whose file name starts with `name`."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    paths = dict.fromkeys(line[line.find("/") :] for line in lines if "/" in line)
    return [path for path in paths if Path(path).name.startswith(name)]


def _pointer(address: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(address)
