"""The index of a segment as a file beside it: a log of what was written and what was forgotten.

    header   magic | version | segment bytes | slab id | xxh3_64 of these             (64 bytes)
    record   body length (u16) | xxh3_64 of the body, seeded by the slab id (u64) | body
    body     PUT     kind, pinned, offset, length, checksum, chunk_bytes, key, stamp, tenant, group
             FORGET  kind, low, high

Replaying the records in their order gives the index. The first record that does not match ends
the log: a torn tail, or what is left of a longer one. It is cut off there. What is lost by that,
or by a power cut before the file system had written it, costs at most blocks of a cache. A record
too many does no harm either: a block is believed only if its bytes match.

The file holds a lock as long as it is open, also over its replacement by a shorter one.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import xxhash

from kvstore.errors import SegmentUnusable
from kvstore.keys import KEY_BYTES
from kvstore.node.block_columns import row_of
from kvstore.node.indexed_block import IndexedBlock
from kvstore.node.node_index import NodeIndex
from kvstore.wire.left_notes import Row
from transfer import StorageBusy, StorageFailed, StorageFull
from transfer.backends.direct_io import FULL

MAGIC: Final = b"kvindex\0"
VERSION: Final = 1
HEADER: Final = struct.Struct("<8sIQ16sQ")
HEADER_BYTES: Final = 64
FRAME: Final = struct.Struct("<HQ")
PUT_BODY: Final = struct.Struct(f"<BBQQQQ{KEY_BYTES}sH")
FORGET_BODY: Final = struct.Struct("<BQQ")
STAMPED_BODY: Final = struct.Struct(f"<BBQQQQ{KEY_BYTES}sHQ")
PUT, FORGET, STAMPED = 1, 2, 3  # PUT: of an earlier version, without a stamp
SLAB_ID_BYTES: Final = 16
OWNER_ONLY: Final = 0o600


class IndexLog:
    """One open log. Not thread-safe; all methods do I/O.

    Args:
        path: The file.
        nbytes: Size of the segment.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path = path
        self._nbytes = nbytes
        self._fd = -1
        self._slab_id = b""
        self._seed = 0
        self.size = 0  # bytes that are known to be right

    @property
    def slab_id(self) -> bytes:
        """Which slab it belongs to; b"" if it is new."""
        return self._slab_id

    @property
    def is_open(self) -> bool:
        """Whether we have it, and its lock."""
        return self._fd >= 0

    def open(self) -> bool:
        """Open or make the file, and lock it.

        Returns:
            Whether there is a header that can be read: a log of this version and size.

        Raises:
            StorageBusy: Another node uses it.
            SegmentUnusable: It is no regular file, not ours, or no log of a segment.
            StorageFailed: It cannot be opened or read.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            self._fd = os.open(self.path, flags, OWNER_ONLY)
            _lock(self._fd)
            self._check_owner()
            return self._read_header()
        except BlockingIOError as error:
            self.close()
            raise StorageBusy(
                str(self.path), "open", "another node uses it", errno=error.errno or 0
            ) from error
        except OSError as error:
            self.close()
            raise log_error(self.path, "open", error) from error
        except SegmentUnusable:
            self.close()
            raise

    def close(self) -> None:
        """Give the file back; idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def replay(self) -> NodeIndex:
        """Read all records, and cut the file behind the last good one.

        Raises:
            StorageFailed: The file cannot be read or cut.
        """
        index = NodeIndex(self._nbytes)
        try:
            content = _read_all(self._fd)
            self.size = HEADER_BYTES
            for kind, value, end in _records(content, self._seed):
                if kind != FORGET:
                    assert isinstance(value, IndexedBlock)
                    index.record(value)
                else:
                    assert isinstance(value, tuple)
                    index.forget_range(*value)
                self.size = end
            os.ftruncate(self._fd, self.size)
        except OSError as error:
            raise log_error(self.path, "read", error) from error
        return index

    def append(self, records: bytes) -> None:
        """Write records behind the last.

        Raises:
            StorageFailed: The file did not take them. It is as it was before, if that could be
                had; `size` says up to where it is right.
        """
        try:
            _write_all(self._fd, records, self.size)
        except OSError as error:
            raise log_error(self.path, "write", error) from error
        self.size += len(records)

    def cut(self) -> None:
        """Forget all records. Needs no space on the disk.

        Raises:
            StorageFailed: The file cannot even be cut.
        """
        try:
            os.ftruncate(self._fd, HEADER_BYTES)
        except OSError as error:
            raise log_error(self.path, "write", error) from error
        self.size = HEADER_BYTES

    def sync(self) -> None:
        """Let the records survive a power cut. Raises StorageFailed."""
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise log_error(self.path, "sync", error) from error

    def replace(self, slab_id: bytes, blocks: Iterable[IndexedBlock]) -> None:
        """Put a new log of these blocks in the place of the file; all of it or nothing.

        Raises:
            StorageFailed: The log is the old one.
        """
        assert len(slab_id) == SLAB_ID_BYTES, len(slab_id)
        seed = _seed_of(slab_id)
        whole = _header(self._nbytes, slab_id) + _records_of(map(row_of, blocks), seed)
        new = self.path.with_name(self.path.name + ".new")
        fd = -1
        try:
            new.unlink(missing_ok=True)
            fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, OWNER_ONLY)
            _lock(fd)
            _write_all(fd, whole, 0)
            os.fsync(fd)
            new.rename(self.path)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
                new.unlink(missing_ok=True)
            raise log_error(self.path, "write", error) from error
        previous, self._fd = self._fd, fd
        os.close(previous)
        self._slab_id, self._seed, self.size = slab_id, seed, len(whole)
        _sync_folder(self.path.parent)

    def put_record(self, block: IndexedBlock) -> bytes:
        """Return the record of a block that was written."""
        return put_record(row_of(block), self._seed)

    def put_records(self, rows: Iterable[Row]) -> bytes:
        """Return the records of many blocks that were written."""
        return _records_of(rows, self._seed)

    def forget_record(self, low: int, high: int) -> bytes:
        """Return the record of a range that is about to be overwritten."""
        return _framed(FORGET_BODY.pack(FORGET, low, high), self._seed)

    def _check_owner(self) -> None:
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            raise SegmentUnusable(path=str(self.path), expected="a regular file", seen="none")
        if status.st_uid != os.geteuid():
            raise SegmentUnusable(
                path=str(self.path),
                expected=f"a file of user {os.geteuid()}",
                seen=f"user {status.st_uid}",
            )

    def _read_header(self) -> bool:
        content = os.pread(self._fd, HEADER_BYTES, 0)
        if not content:
            return False
        if not content.startswith(MAGIC[: len(content)]):
            raise SegmentUnusable(
                path=str(self.path), expected="the index of a segment", seen="something else"
            )
        if len(content) < HEADER_BYTES:
            return False  # killed while it was made
        _, version, nbytes, slab_id, checksum = HEADER.unpack_from(content)
        intact = checksum == xxhash.xxh3_64_intdigest(content[: HEADER.size - 8])
        if not intact or version != VERSION or nbytes != self._nbytes:
            return False
        self._slab_id, self._seed = slab_id, _seed_of(slab_id)
        return True


def put_record(row: Row, seed: int) -> bytes:
    """Return the record of a block."""
    offset, length, key, checksum, pinned, chunk_bytes, tenant_name, group, stamp = row
    tenant = tenant_name.encode()
    body = STAMPED_BODY.pack(
        STAMPED, pinned, offset, length, checksum, chunk_bytes, key, len(tenant), stamp
    )
    return _framed(body + tenant + group.encode(), seed)


def _records_of(rows: Iterable[Row], seed: int) -> bytes:
    return b"".join([put_record(row, seed) for row in rows])


def log_error(path: Path, operation: str, error: OSError) -> StorageFailed:
    """Name a failed system call on a log."""
    number = error.errno or 0
    kind = StorageFull if number in FULL else StorageFailed
    return kind(str(path), operation, os.strerror(number) if number else str(error), errno=number)


def _records(
    content: bytes, seed: int
) -> Iterator[tuple[int, IndexedBlock | tuple[int, int], int]]:
    """Yield (kind, value, end of the record) up to the first record that is not right."""
    at = HEADER_BYTES
    while at + FRAME.size <= len(content):
        size, checksum = FRAME.unpack_from(content, at)
        start, end = at + FRAME.size, at + FRAME.size + size
        body = content[start:end]
        if len(body) < size or xxhash.xxh3_64_intdigest(body, seed) != checksum:
            return
        value = _parsed(body)
        if value is None:
            return
        yield body[0], value, end
        at = end


def _parsed(body: bytes) -> IndexedBlock | tuple[int, int] | None:
    if len(body) == FORGET_BODY.size and body[0] == FORGET:
        _, low, high = FORGET_BODY.unpack(body)
        return low, high
    form = {PUT: PUT_BODY, STAMPED: STAMPED_BODY}.get(body[0] if body else 0)
    if form is None or len(body) < form.size:
        return None
    _, pinned, offset, length, checksum, chunk_bytes, key, tenant_bytes, *stamp = form.unpack_from(
        body
    )
    labels = body[form.size :]
    try:
        tenant, group = labels[:tenant_bytes].decode(), labels[tenant_bytes:].decode()
    except UnicodeDecodeError:
        return None
    return IndexedBlock(
        offset=offset,
        length=length,
        key=key,
        checksum=checksum,
        pinned=bool(pinned),
        chunk_bytes=chunk_bytes,
        tenant=tenant,
        group=group,
        stamp=stamp[0] if stamp else 0,
    )


def _framed(body: bytes, seed: int) -> bytes:
    return FRAME.pack(len(body), xxhash.xxh3_64_intdigest(body, seed)) + body


def _header(nbytes: int, slab_id: bytes) -> bytes:
    known = HEADER.pack(MAGIC, VERSION, nbytes, slab_id, 0)[:-8]
    whole = known + xxhash.xxh3_64_intdigest(known).to_bytes(8, "little")
    return whole.ljust(HEADER_BYTES, b"\0")


def _seed_of(slab_id: bytes) -> int:
    return int.from_bytes(slab_id[:8], "little")


def _lock(fd: int) -> None:
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _read_all(fd: int) -> bytes:
    parts, at = [], 0
    while part := os.pread(fd, 1 << 24, at):
        parts.append(part)
        at += len(part)
    return b"".join(parts)


def _write_all(fd: int, content: bytes, at: int) -> None:
    view = memoryview(content)
    while view:
        written = os.pwrite(fd, view, at)
        view, at = view[written:], at + written


def _sync_folder(folder: Path) -> None:
    """Let the new name survive a power cut; where folders cannot be synced, the old log does."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        os.fsync(fd)
    except OSError:
        return
    finally:
        os.close(fd)
