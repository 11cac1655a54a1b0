"""A CUDA driver whose devices are host memory: copies are queued, and made when waited for.

Processes are simulated: one `FakeHost` holds the allocations of all, a `FakeCuda` is what one
process sees of it. It complains about whatever the real runtime would refuse.
"""

from __future__ import annotations

import ctypes
import itertools
import secrets
import threading
from collections.abc import Sequence

import numpy as np

from transfer.errors import DeviceUnavailable


class FakeHost:
    """Devices of a host, by identity, and the allocations on them."""

    def __init__(self, uuids: Sequence[str], *, islands: Sequence[set[str]] = ()) -> None:
        self.uuids = tuple(uuids)
        self.islands = islands or [set(uuids)]
        self.allocations: dict[bytes, tuple[FakeCuda, str, np.ndarray]] = {}


class FakeCuda:
    """One process; `visible` are the devices that it sees, in its order."""

    def __init__(self, host: FakeHost, visible: Sequence[str]) -> None:
        self.host = host
        self.visible = tuple(visible)
        self.lock = threading.Lock()
        self.ids = itertools.count(1)
        self.streams: dict[int, list[tuple[int, int, int]]] = {}
        self.events: set[int] = set()
        self.opened: dict[int, bytes] = {}
        self.num_opens = 0
        self.num_copies = 0
        self.fail_copies = False

    def allocate(self, device: int, nbytes: int) -> np.ndarray:
        memory = np.zeros(nbytes, dtype=np.uint8)
        handle = secrets.token_bytes(64)
        self.host.allocations[handle] = (self, self.visible[device], memory)
        return memory

    def uuids(self) -> Sequence[str]:
        return self.visible

    def can_access(self, device: int, other: int) -> bool:
        pair = {self.visible[device], self.visible[other]}
        return any(pair <= island for island in self.host.islands)

    def export(self, device: int, address: int) -> tuple[bytes, int]:
        for handle, (owner, uuid, memory) in self.host.allocations.items():
            offset = address - memory.ctypes.data
            if owner is self and uuid == self.visible[device] and 0 <= offset < len(memory):
                return handle, offset
        raise DeviceUnavailable(f"cuda:{device}", "no allocation")

    def open_handle(self, device: int, handle: bytes) -> int:
        owner, uuid, memory = self.host.allocations[handle]
        if owner is self:
            raise DeviceUnavailable(f"cuda:{device}", "opened by its own process")
        if uuid != self.visible[device]:
            raise DeviceUnavailable(f"cuda:{device}", "of another device")
        if handle in self.opened.values():
            raise DeviceUnavailable(f"cuda:{device}", "opened twice")
        self.opened[memory.ctypes.data] = handle
        self.num_opens += 1
        return memory.ctypes.data

    def close_handle(self, device: int, address: int) -> None:
        del self.opened[address]

    def open_stream(self, device: int) -> int:
        stream = next(self.ids)
        self.streams[stream] = []
        return stream

    def close_stream(self, device: int, stream: int) -> None:
        assert not self.streams.pop(stream), "a stream is closed with copies on it"

    def mark(self, device: int) -> int:
        event = next(self.ids)
        self.events.add(event)
        return event

    def follow(self, device: int, stream: int, event: int) -> None:
        assert event in self.events

    def forget(self, device: int, event: int) -> None:
        self.events.remove(event)

    def copy(self, device: int, stream: int, target: int, source: int, nbytes: int) -> None:
        if self.fail_copies:
            raise DeviceUnavailable(f"cuda:{device}", "the copy was refused")
        self.streams[stream].append((target, source, nbytes))

    def synchronize(self, device: int, stream: int) -> None:
        queued, self.streams[stream] = self.streams[stream], []
        for target, source, nbytes in queued:
            ctypes.memmove(target, source, nbytes)
        with self.lock:
            self.num_copies += len(queued)

    def pinned(self, nbytes: int) -> np.ndarray:
        return np.empty(nbytes, dtype=np.uint8)
