"""Memory of GPUs of other processes on this host, through CUDA IPC.

A peer's allocation is opened once per process, whoever asks for windows of it, and closed with
the last window and the last copy. Like mapped host memory it is opened as a whole: the bounds of
a window are kept by this side, and what was offered to a peer is that incarnation's until its
process has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Annotated

import msgspec

from transfer.backends.cuda_memory import CudaDevice, CudaDevices, CudaMemory
from transfer.backends.cuda_runtime import HANDLE_BYTES
from transfer.errors import ProtocolViolation


class Place(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a window lies, for another process of this host.

    Attributes:
        uuid: of the device; ordinals differ between processes.
        handle: of the allocation.
        offset: of the window in it.
    """

    uuid: Annotated[str, msgspec.Meta(max_length=64)]
    handle: Annotated[bytes, msgspec.Meta(min_length=HANDLE_BYTES, max_length=HANDLE_BYTES)]
    offset: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]

    def encode(self) -> bytes:
        """Return its bytes."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Place:
        """Undo `encode`.

        Raises:
            ProtocolViolation: the bytes are no place.
        """
        try:
            return msgspec.msgpack.decode(data, type=Place)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise ProtocolViolation(f"place of CUDA memory: {error}") from error


def place_of(memory: CudaMemory, offset: int) -> Place:
    """Tell another process where a window that starts at `offset` lies.

    Raises:
        DeviceUnavailable: the allocation cannot be shared (expandable segments cannot).
    """
    driver, ordinal = memory.device.driver, memory.device.ordinal
    handle, start = driver.export(ordinal, memory.address + offset)
    return Place(driver.uuids()[ordinal], handle, start)


class OpenedAllocation:
    """An allocation of another process, open here while anybody uses it. Thread-safe.

    Every window on it is a user, and so is every copy under way: it is not closed under a copy.
    The first user is who opens it.
    """

    def __init__(self, device: CudaDevice, handle: bytes) -> None:
        self.device = device
        self.address = device.driver.open_handle(device.ordinal, handle)
        self._lock = threading.Lock()
        self._num_users = 1

    def retain(self) -> bool:
        """Become a user; False if it is closed already."""
        with self._lock:
            if not self._num_users:
                return False
            self._num_users += 1
            return True

    def release(self) -> bool:
        """Be no user any more; the last one closes it. Returns whether that was us."""
        with self._lock:
            self._num_users -= 1
            assert self._num_users >= 0
            if self._num_users:
                return False
        self.device.driver.close_handle(self.device.ordinal, self.address)
        return True


class CudaWindows:
    """Windows of peers' device memory that are open here. Thread-safe.

    Two keys of one allocation share its mapping.

    Args:
        devices: those of this process.
    """

    def __init__(self, devices: CudaDevices) -> None:
        self._devices = devices
        self._lock = threading.Lock()
        self._opened: dict[bytes, OpenedAllocation] = {}
        self._windows: dict[tuple[str, bytes], tuple[CudaMemory, bytes]] = {}

    def get(self, peer: str, token: bytes, nbytes: int, ask: Callable[[], bytes]) -> CudaMemory:
        """Return the window of a key, opening it at the first use.

        Args:
            peer: the owner.
            token: of the key.
            nbytes: of the window.
            ask: asks the owner for the bytes of a `Place`; waits.

        Raises:
            DeviceUnavailable: it cannot be opened here.
            ProtocolViolation: the owner told nonsense.
        """
        name = (peer, token)
        if (known := self._windows.get(name)) is not None:
            return known[0]
        place = Place.decode(ask())
        device = self._devices.by_uuid(place.uuid)
        with self._lock:
            if (known := self._windows.get(name)) is not None:
                return known[0]
            opened = self._opened.get(place.handle)
            if opened is None or not opened.retain():
                opened = self._opened[place.handle] = OpenedAllocation(device, place.handle)
            memory = CudaMemory(device, opened.address + place.offset, nbytes, opened)
            self._windows[name] = (memory, place.handle)
            return memory

    def drop(self, peer: str, token: bytes) -> None:
        """Forget a withdrawn key."""
        with self._lock:
            self._drop((peer, token))

    def forget(self, peer: str) -> None:
        """Forget all windows of a lost peer."""
        with self._lock:
            for name in [name for name in self._windows if name[0] == peer]:
                self._drop(name)

    def close(self) -> None:
        """Forget all."""
        with self._lock:
            for name in list(self._windows):
                self._drop(name)

    def _drop(self, name: tuple[str, bytes]) -> None:
        known = self._windows.pop(name, None)
        if known is None:
            return
        handle = known[1]
        others = any(other == handle for _, other in self._windows.values())
        opened = self._opened[handle] if others else self._opened.pop(handle)
        opened.release()
