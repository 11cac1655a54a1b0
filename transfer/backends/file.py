"""Slabs: preallocated files whose pieces are read and written past the page cache.

The tier below DRAM: a file of fixed size on an SSD, owned by one process at a time, that is
addressed like memory. Offsets and lengths are arbitrary; what is aligned moves without a copy.

    slab = FileSlab("/ssd/slab", 64 << 30, FileConfig()).open()
    slab.write(tensor, source_offsets, slab_offsets, lengths)        # waits, or
    key = engine.offer(engine.register(slab), to=engine.name, access=...)
    engine.write(engine.name, region, key, ...)                      # does not

The alternatives: io_uring gains nothing over four threads on the machines measured and is often
forbidden in containers; the page cache would hold every block twice.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import torch

from configs.schema import DirectIO, FileConfig, SyncPolicy
from transfer.backends.block_locks import BlockLocks
from transfer.backends.call_queue import CallQueue
from transfer.backends.direct_io import (
    BLOCK_BYTES,
    AlignedBuffer,
    Alignment,
    buffered,
    direct_alignment,
    refusal,
    storage_error,
)
from transfer.backends.file_work import FileAccess, ReadWork, SyncWork, WriteWork
from transfer.errors import StorageBusy, StorageFailed, StorageFull
from transfer.memory.region import Bytes, as_bytes
from transfer.pieces import Ints, IntsLike, Pieces, make_pieces, out_of_bounds
from transfer.storage.storage import Done, Waiter

logger = logging.getLogger(__name__)

OWNER_ONLY: Final = 0o600
STAT_BLOCK_BYTES: Final = 512  # whatever the file system's own

_open_slabs: weakref.WeakSet[FileSlab] = weakref.WeakSet()


class FileSlab:
    """A preallocated file of fixed size, addressed like memory. Thread-safe.

    Writes that overlap and are under way together end in either order, byte by byte; neighbours
    never disturb one another, aligned or not. After an operation has failed by its deadline, a
    system call that hangs may still move its bytes: the memory must not be reused before `close`
    has returned.

    Args:
        path: the file; made, with all its blocks, if there is none.
        nbytes: size of the slab.
        config: the knobs.

    Attributes:
        alignment: what the file system demands; `alignment.why_buffered` says why the page cache
            is used, if it is. Known once open.
    """

    kind: Final = "file"

    def __init__(
        self, path: str | os.PathLike[str], nbytes: int, config: FileConfig | None = None
    ) -> None:
        if nbytes <= 0:
            raise ValueError(f"nbytes must be positive, got {nbytes}")
        self.path = Path(path)
        self.nbytes = nbytes
        self.alignment = Alignment(block=BLOCK_BYTES, memory=BLOCK_BYTES)
        self._config = config or FileConfig()
        # What reads and writes extents; a slab that does it otherwise puts its own here.
        self._read_work: Callable[[FileAccess, Bytes, Ints, Ints, Ints, float], ReadWork] = ReadWork
        self._write_work: Callable[[FileAccess, Bytes, Ints, Ints, Ints, float], WriteWork] = (
            WriteWork
        )
        self._file_bytes = -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
        self._access: FileAccess | None = None
        self._queue: CallQueue | None = None

    def open(self) -> Self:
        """Open or make the file, lock it, start the threads.

        Raises:
            StorageBusy: somebody else owns it.
            StorageFull: no room for all of it; what was made is removed.
            StorageFailed: it has another size, others may open it, it is no regular file, or its
                file system has no direct access and the configuration requires it.
        """
        if self._queue is not None:
            raise StorageFailed(str(self.path), "open", "it is open")
        fd, made = self._open_file()
        try:
            self._lock(fd)
            self._check(fd)
            self._allocate(fd)
            self.alignment = self._align(fd)
        except StorageFailed:
            if made:
                self.path.unlink(missing_ok=True)
            os.close(fd)
            raise
        config = self._config
        self._queue = CallQueue(
            str(self.path),
            threads=config.threads,
            queued_max=config.queued_max,
            turn_bytes=config.io_bytes,
            backend="file",
            closed=_not_open,
        )
        self._access = FileAccess(
            fd=fd,
            path=str(self.path),
            file_bytes=self._file_bytes,
            alignment=self.alignment,
            locks=BlockLocks(),
            buffers=tuple(AlignedBuffer(config.io_bytes) for _ in range(config.threads)),
            line=self._queue.line,
        )
        self._queue.open()
        _open_slabs.add(self)
        return self

    def close(self) -> None:
        """Fail what has not begun, wait for what has, give the file back; idempotent."""
        queue, self._queue = self._queue, None
        access, self._access = self._access, None
        if queue is None or access is None:
            return
        _open_slabs.discard(self)
        if queue.close():
            os.close(access.fd)
        else:
            # Its number could be given to another file while the call still uses it.
            logger.error("a system call on %s does not come back; its file stays open", self.path)

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def read(
        self,
        target: torch.Tensor,
        target_offsets: IntsLike,
        slab_offsets: IntsLike,
        lengths: IntsLike,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Read pieces into host memory; waits.

        Args:
            target: contiguous host tensor, taken as bytes.
            target_offsets: [N] int64 bytes, or one integer.
            slab_offsets: [N] int64 bytes, or one integer.
            lengths: [N] int64 bytes, or one integer for all.
            timeout_s: default `operation_timeout_s`.

        Raises:
            ValueError: a piece is outside of the slab or of the target.
            StorageFailed: the file did not give the bytes.
            TransferTimeout: not ended in time.
        """
        memory = as_bytes(target).numpy()
        pieces = make_pieces(slab_offsets, target_offsets, lengths)
        self._check_bounds(pieces.source_offsets, pieces.target_offsets, pieces, len(memory))
        deadline = self._deadline(timeout_s)
        waiter = Waiter(str(self.path), "read", deadline)
        self.fetch(memory, pieces, deadline, waiter.end)
        waiter.wait()

    def write(
        self,
        source: torch.Tensor,
        source_offsets: IntsLike,
        slab_offsets: IntsLike,
        lengths: IntsLike,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Write pieces from host memory; waits. As `read`, the other way."""
        memory = as_bytes(source).numpy()
        pieces = make_pieces(source_offsets, slab_offsets, lengths)
        self._check_bounds(pieces.target_offsets, pieces.source_offsets, pieces, len(memory))
        deadline = self._deadline(timeout_s)
        waiter = Waiter(str(self.path), "write", deadline)
        self.store(memory, pieces, deadline, waiter.end)
        waiter.wait()

    def sync(self, *, timeout_s: float | None = None) -> None:
        """Make all writes that have ended survive a power cut; waits.

        Raises:
            StorageFailed: the disk reported an error; which bytes are lost is not known.
            TransferTimeout: not ended in time.
        """
        queue, access = self._opened("sync")
        deadline = self._deadline(timeout_s)
        waiter = Waiter(str(self.path), "sync", deadline)
        queue.submit(SyncWork(access), "sync", deadline, waiter.end)
        waiter.wait()

    def fetch(
        self, target: Bytes, pieces: Pieces, deadline: float, done: Done, *, wait: bool = True
    ) -> None:
        """Read pieces without waiting for them; see `Storage.fetch`."""
        queue, access = self._opened("read")
        if not len(pieces):
            done(None)
            return
        work = self._read_work(
            access, target, pieces.target_offsets, pieces.source_offsets, pieces.lengths, deadline
        )
        calls = work.whole_calls()
        if calls is not None:
            queue.submit_calls(calls, "read", deadline, done, wait=wait)
        else:
            queue.submit(work, "read", deadline, done, wait=wait)

    def store(self, source: Bytes, pieces: Pieces, deadline: float, done: Done) -> None:
        """Write pieces without waiting; see `Storage.store`. Waits for room in the queue."""
        queue, access = self._opened("write")
        if not len(pieces):
            done(None)
            return
        work = self._write_work(
            access, source, pieces.source_offsets, pieces.target_offsets, pieces.lengths, deadline
        )
        calls = work.whole_calls()
        if calls is not None:
            queue.submit_calls(calls, "write", deadline, done)
        else:
            queue.submit(work, "write", deadline, done)

    def _opened(self, operation: str) -> tuple[CallQueue, FileAccess]:
        queue, access = self._queue, self._access
        if queue is None or access is None:
            raise _not_open(str(self.path), operation)
        return queue, access

    def _deadline(self, timeout_s: float | None) -> float:
        limit = self._config.operation_timeout_s if timeout_s is None else timeout_s
        return time.monotonic() + limit

    def _check_bounds(self, slab: Ints, memory: Ints, pieces: Pieces, memory_bytes: int) -> None:
        for what, offsets, size in (("slab", slab, self.nbytes), ("memory", memory, memory_bytes)):
            problem = out_of_bounds(offsets, pieces.lengths, size)
            if problem is not None:
                raise ValueError(f"{what}: {problem}")

    def _failed(self, reason: str) -> StorageFailed:
        return StorageFailed(str(self.path), "open", reason)

    def _open_file(self) -> tuple[int, bool]:
        """Return the descriptor, and whether the file is new. Never follows a link."""
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        if self._config.sync is SyncPolicy.EACH_WRITE:
            flags |= os.O_DSYNC
        try:
            try:
                return os.open(self.path, flags | os.O_CREAT | os.O_EXCL, OWNER_ONLY), True
            except FileExistsError:
                return os.open(self.path, flags), False
        except OSError as error:
            raise storage_error(str(self.path), "open", -1, error) from error

    def _lock(self, fd: int) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            reason = "another process, or another slab of this one, owns it"
            raise StorageBusy(str(self.path), "open", reason, errno=error.errno or 0) from error
        except OSError as error:
            raise storage_error(str(self.path), "open", -1, error) from error

    def _check(self, fd: int) -> None:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise self._failed("it is no regular file")
        if status.st_uid != os.geteuid():
            raise self._failed(f"it belongs to user {status.st_uid}, not to us")
        if status.st_mode & 0o077:
            raise self._failed(f"mode {stat.S_IMODE(status.st_mode):o} lets others in")
        if status.st_size not in (0, self._file_bytes):
            raise self._failed(f"it has {status.st_size} bytes, not {self._file_bytes}")

    def _allocate(self, fd: int) -> None:
        status, room = os.fstat(fd), os.fstatvfs(fd)
        missing = self._file_bytes - status.st_blocks * STAT_BLOCK_BYTES
        free = room.f_frsize * (room.f_bavail if os.geteuid() else room.f_bfree)
        # Asked first: the system says no only when it has given us all that others need, too.
        if missing > free and room.f_blocks:  # some file systems do not tell
            raise self._full(os.strerror(errno.ENOSPC), errno.ENOSPC, free)
        try:
            os.posix_fallocate(fd, 0, self._file_bytes)
        except OSError as error:
            failure = storage_error(str(self.path), "open", -1, error)
            if isinstance(failure, StorageFull):
                failure = self._full(failure.reason, failure.errno, free)
            raise failure from error

    def _full(self, why: str, number: int, free: int) -> StorageFull:
        reason = f"{why}: {self._file_bytes} bytes are needed, {free} are free"
        return StorageFull(str(self.path), "open", reason, errno=number)

    def _align(self, fd: int) -> Alignment:
        if self._config.direct is DirectIO.OFF:
            return buffered("the configuration says so")
        alignment = direct_alignment(fd)
        if alignment.direct:
            try:
                flags = fcntl.fcntl(fd, fcntl.F_GETFL)
                fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
                why = refusal(fd, alignment)
                if not why:
                    return alignment
                fcntl.fcntl(fd, fcntl.F_SETFL, flags)
                alignment = buffered(why)
            except OSError as error:
                alignment = buffered(f"the file system refuses O_DIRECT: {error.strerror}")
        if self._config.direct is DirectIO.REQUIRE:
            raise self._failed(alignment.why_buffered)
        logger.warning("%s goes through the page cache: %s", self.path, alignment.why_buffered)
        return alignment

    def _abandon(self) -> None:
        """In a forked child, which has none of the threads: close our copy of the descriptor."""
        access, self._access, self._queue = self._access, None, None
        if access is not None:
            os.close(access.fd)


def _not_open(path: str, operation: str) -> StorageFailed:
    return StorageFailed(path, operation, "the slab is not open")


def _abandon_all() -> None:
    for slab in list(_open_slabs):
        slab._abandon()
    _open_slabs.clear()


os.register_at_fork(after_in_child=_abandon_all)
