"""One-sided copies into and out of a peer's mapped memory, on the same host.

The first use of a key fetches the memory's descriptor from its owner; then a write is a copy,
and the owner's processor takes no part. Rights are kept by mapping read-only what was offered
for reading only, the bounds by this side: a mapped memory is mapped as a whole.
"""

from __future__ import annotations

import fcntl
import os
import threading
import weakref
from collections.abc import Callable

import numpy as np

from transfer import native
from transfer.errors import AccessRefused
from transfer.memory.copy_on_write import CopyOnWrite
from transfer.memory.huge_pages import AlignedMapping
from transfer.memory.memory import SEALS, has_small_pages, populate
from transfer.memory.region import Access, Bytes, RegionKey
from transfer.memory.small_pages import small_pages


class MappedMemory:
    """A peer's memory file, mapped here until the last window on it is gone."""

    def __init__(self, descriptor: int, nbytes: int, *, writable: bool) -> None:
        mapped = AlignedMapping(descriptor, nbytes, writable=writable)
        populate(mapped, writable=writable)
        self.array: Bytes = np.frombuffer(mapped.buffer, dtype=np.uint8)
        if has_small_pages(descriptor):
            small_pages.add(self, self.array.ctypes.data, nbytes)
        self._lock = threading.Lock()
        self._copy_on_write: CopyOnWrite | None = None
        self._descriptor = os.dup(descriptor)
        weakref.finalize(self, os.close, self._descriptor).atexit = False

    def copy_on_write(self) -> CopyOnWrite:
        """Return it mapped once more: what is written there stays here. Raises OSError."""
        with self._lock:
            if self._copy_on_write is None:
                self._copy_on_write = CopyOnWrite(self._descriptor, len(self.array))
            return self._copy_on_write


class Window(native.MappedWindow):
    """What one key opens.

    Attributes:
        array: [nbytes] uint8 view of the peer's memory; read-only if the key is.
        start: its address.
        nbytes: its size.
        rights: those of the key.
        live: False once the key was withdrawn, or its peer is lost.
    """

    __slots__ = ("array", "memory")

    def __init__(self, memory: MappedMemory, offset: int, nbytes: int, rights: int) -> None:
        self.memory = memory
        self.nbytes = nbytes
        self.rights = rights
        self.array: Bytes = memory.array[offset : offset + nbytes]
        self.start = memory.array.ctypes.data + offset
        self.live = True


class Windows:
    """The keys of one peer that are mapped here. Thread-safe.

    Args:
        fetch: asks the owner: (token, deadline) -> (descriptor, offset, nbytes).
    """

    def __init__(self, peer: str, *, fetch: Callable[[bytes, float], tuple[int, int, int]]) -> None:
        self._peer = peer
        self._fetch = fetch
        self._windows: dict[bytes, Window] = {}
        self._lock = threading.Lock()
        # Keys of one memory share its mapping: the file's identity and whether it is writable.
        self._memories: weakref.WeakValueDictionary[tuple[int, int, bool], MappedMemory] = (
            weakref.WeakValueDictionary()
        )

    @property
    def by_token(self) -> dict[bytes, Window]:
        """All of them, as they come and go: for the short way, which only looks."""
        return self._windows

    def find(self, key: RegionKey) -> Window | None:
        """Return the window of a key that is mapped already."""
        window = self._windows.get(key.token)
        # What was mapped for a key says nothing about another with the same token.
        if window is None or window.nbytes != key.nbytes or window.rights != key.rights:
            return None
        return window

    def get(self, key: RegionKey, deadline: float) -> Window:
        """Return the window of a key, mapping it at the first use.

        Raises:
            AccessRefused, PeerLost, TransferTimeout: the owner's answer, or none.
        """
        window = self.find(key)
        if window is not None:
            return window
        descriptor, offset, nbytes = self._fetch(key.token, deadline)
        try:
            with self._lock:
                window = self._map(descriptor, key, offset, nbytes)
                self._windows[key.token] = window
                return window
        finally:
            os.close(descriptor)

    def drop(self, token: bytes) -> None:
        """Forget a withdrawn key."""
        with self._lock:
            window = self._windows.pop(token, None)
        if window is not None:
            window.live = False

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            windows = list(self._windows.values())
            self._windows.clear()
        for window in windows:
            window.live = False

    def _map(self, descriptor: int, key: RegionKey, offset: int, nbytes: int) -> Window:
        status = os.fstat(descriptor)
        # An unsealed file could be cut short under us, and touching it would kill this process.
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        except OSError:
            seals = 0  # no memory file at all
        if seals & SEALS != SEALS:
            raise AccessRefused(self._peer, "its memory is not sealed")
        if nbytes != key.nbytes or not 0 <= offset <= offset + nbytes <= status.st_size:
            raise AccessRefused(self._peer, f"window [{offset}, +{nbytes}) of {status.st_size}")
        writable = Access.WRITE in key.access
        identity = (status.st_dev, status.st_ino, writable)
        memory = self._memories.get(identity)
        if memory is None:
            try:
                memory = MappedMemory(descriptor, status.st_size, writable=writable)
            except (OSError, ValueError, OverflowError) as error:
                raise AccessRefused(self._peer, f"mapping failed: {error}") from error
            self._memories[identity] = memory
        return Window(memory, offset, nbytes, key.rights)
