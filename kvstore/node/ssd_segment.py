"""A file on an SSD, past the page cache, with an index beside it that outlives the process.

    PATH          [ segment, nbytes )[ padding )[ header: magic, version, nbytes, slab id ]
    PATH.index    what lies in it (see `index_log`), bound to the slab by its id

The header lies behind what is lent, so no peer can write to it. A file that is there and has no
header of ours is somebody's data: it is refused, never overwritten. The index is made and locked
first and claims the slab that is made next; so a slab without a header is known to be ours if a
node was killed while it made one, and its index is new.
"""

from __future__ import annotations

import logging
import os
import secrets
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from kvstore.errors import SegmentUnusable
from kvstore.node.index_log import SLAB_ID_BYTES, IndexLog
from kvstore.node.kept_index import KeptIndex
from kvstore.node.node_index import NodeIndex
from kvstore.wire.messages import Medium
from transfer import TransferError
from transfer.backends.direct_io import BLOCK_BYTES, AlignedBuffer
from transfer.backends.file import FileSlab
from transfer.pieces import Pieces
from transfer.storage.storage import Done, Waiter

if TYPE_CHECKING:
    from configs.files import FileConfig

logger = logging.getLogger(__name__)

MAGIC: Final = b"kvslab\0\0"
VERSION: Final = 1
HEADER: Final = struct.Struct("<8sIQ16s")
INDEX_SUFFIX: Final = ".index"

MakeSlab = Callable[[Path, int, "FileConfig"], FileSlab]


class SsdSegment:
    """See `SegmentMemory`; also the `Storage` that the engine registers.

    Args:
        path: Of the slab; its folder must exist.
        nbytes: Size of the segment.
        config: How the file is read and written.
        make_slab: What reads and writes it.
    """

    kind: Final = "file"
    medium: Final = Medium.SSD
    array: None = None

    def __init__(
        self, path: Path, nbytes: int, config: FileConfig, *, make_slab: MakeSlab = FileSlab
    ) -> None:
        self.nbytes = nbytes
        self._path = path
        self._header_at = -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
        self._timeout_s = config.operation_timeout_s
        self._slab = make_slab(path, self._header_at + BLOCK_BYTES, config)
        self._log = IndexLog(path.with_name(path.name + INDEX_SUFFIX), nbytes)
        self._index = KeptIndex(NodeIndex(nbytes))
        self._before_writes: Callable[[], object] = _nothing

    def on_write(self, call: Callable[[], object]) -> None:
        """Call something before what lies there is forgotten, at each write. It must not fail."""
        self._before_writes = call

    def open(self) -> KeptIndex:
        """Make the two files, or find out what is in them.

        Raises:
            As `SegmentMemory.open`. Files that this call made are removed again.
        """
        index_is_new = not os.path.lexists(self._log.path)
        slab_is_new = False
        try:
            readable = self._log.open()
            slab_is_new = not os.path.lexists(self._path) or not self._path.lstat().st_size
            if slab_is_new and not readable:
                self._log.replace(secrets.token_bytes(SLAB_ID_BYTES), [])
                readable = True
            self._slab.open()
            self._index = KeptIndex(self._bind(slab_is_new, readable), self._log)
        except (SegmentUnusable, TransferError):
            self._abandon(slab_is_new, index_is_new)
            raise
        return self._index

    def lend(self) -> SsdSegment:
        """Return this object, as a `Storage`."""
        return self

    def close(self) -> None:
        """Make everything durable and give the files back; idempotent."""
        try:
            self._slab.sync(timeout_s=self._timeout_s)
        except TransferError as error:
            logger.debug("%s not synced: %s", self._path, error)
        self._slab.close()
        self._index.close()
        self._log.close()

    def fetch(
        self,
        target: NDArray[np.uint8],
        pieces: Pieces,
        deadline: float,
        done: Done,
        *,
        wait: bool = True,
    ) -> None:
        """See `Storage.fetch`."""
        self._slab.fetch(target, pieces, deadline, done, wait=wait)

    def store(self, source: NDArray[np.uint8], pieces: Pieces, deadline: float, done: Done) -> None:
        """See `Storage.store`. What lies there is forgotten before it is overwritten."""
        self._before_writes()
        self._forget(pieces)
        self._slab.store(source, pieces, deadline, done)

    def read(self, target: NDArray[np.uint8], pieces: Pieces, deadline_s: float) -> None:
        """See `SegmentMemory.read`."""
        waiter = Waiter(str(self._path), "read", deadline_s)
        self.fetch(target, pieces, deadline_s, waiter.end)
        waiter.wait()

    def write(self, source: NDArray[np.uint8], pieces: Pieces, deadline_s: float) -> None:
        """See `SegmentMemory.write`."""
        waiter = Waiter(str(self._path), "write", deadline_s)
        self.store(source, pieces, deadline_s, waiter.end)
        waiter.wait()

    def _forget(self, pieces: Pieces) -> None:
        """Forget what lies where pieces are written; one note for those behind one another."""
        runs: list[tuple[int, int]] = []
        offsets, lengths = pieces.target_offsets.tolist(), pieces.lengths.tolist()
        for start, length in sorted(zip(offsets, lengths, strict=True)):
            if runs and runs[-1][1] == start:
                runs[-1] = runs[-1][0], start + length
            else:
                runs.append((start, start + length))
        self._index.forget_ranges(runs)

    def _bind(self, slab_is_new: bool, readable: bool) -> NodeIndex:
        """Find out whether slab and index belong together; return what is to be believed."""
        header = self._read_header()
        if slab_is_new or (readable and not header.any()):
            index = self._log.replay()
            if not slab_is_new and len(index):
                raise self._unusable("a slab with a header", "none, and an index that is not empty")
            self._write_header(self._log.slab_id)
            self._log.replace(self._log.slab_id, [])
            return NodeIndex(self.nbytes)
        slab_id = self._check_header(header)
        if readable and self._log.slab_id == slab_id:
            return self._log.replay()
        logger.warning(
            "%s is not the index of %s: what is in there is forgotten", self._log.path, self._path
        )
        self._log.replace(slab_id, [])
        return NodeIndex(self.nbytes)

    def _read_header(self) -> NDArray[np.uint8]:
        buffer = AlignedBuffer(BLOCK_BYTES).array
        self._slab.read(torch.from_numpy(buffer), 0, self._header_at, BLOCK_BYTES)
        return buffer

    def _write_header(self, slab_id: bytes) -> None:
        buffer = AlignedBuffer(BLOCK_BYTES).array
        known = HEADER.pack(MAGIC, VERSION, self.nbytes, slab_id)
        known += xxhash.xxh3_64_digest(known)
        buffer[: len(known)] = np.frombuffer(known, dtype=np.uint8)
        self._slab.write(torch.from_numpy(buffer), 0, self._header_at, BLOCK_BYTES)
        self._slab.sync()

    def _check_header(self, header: NDArray[np.uint8]) -> bytes:
        content = header.tobytes()
        magic, version, nbytes, slab_id = HEADER.unpack_from(content)
        expected = f"a slab of version {VERSION} for {self.nbytes} bytes"
        if magic != MAGIC:
            raise self._unusable(expected, "no header of a slab")
        checksum = content[HEADER.size : HEADER.size + 8]
        if checksum != xxhash.xxh3_64_digest(content[: HEADER.size]):
            raise self._unusable(expected, "a damaged header")
        if (version, nbytes) != (VERSION, self.nbytes):
            raise self._unusable(expected, f"version {version} for {nbytes} bytes")
        return bytes(slab_id)

    def _unusable(self, expected: str, seen: str) -> SegmentUnusable:
        return SegmentUnusable(path=str(self._path), expected=expected, seen=seen)

    def _abandon(self, slab_is_new: bool, index_is_new: bool) -> None:
        """After a failure: remove what was made, touch nothing that was there."""
        held = self._log.is_open
        self._slab.close()
        if held and slab_is_new:
            self._path.unlink(missing_ok=True)
        if held and index_is_new:
            self._log.path.unlink(missing_ok=True)
        self._log.close()


def _nothing() -> None:
    """Nobody wants to know of writes."""
