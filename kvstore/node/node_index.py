"""What a node remembers of its own segment, for the day a new master asks."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.checksum import block_checksums
from kvstore.wire.messages import HeldBlocks


class _Entry(NamedTuple):
    offset: int
    length: int
    key: bytes
    checksum: int
    pinned: bool

    @property
    def end(self) -> int:
        return self.offset + self.length


class NodeIndex:
    """Blocks that writers said they put here. Not thread-safe.

    The node is not told what the master evicts; it need not be. A range that was written anew
    replaces the entries it overlaps, and what is left is believed only if the bytes still match
    the checksum. Blocks that were evicted but not yet overwritten thus come back, which is right:
    a key names bytes, and these are the bytes.

    Args:
        nbytes: Size of the segment; entries outside of it are ignored.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._entries: list[_Entry] = []  # by offset; never overlapping

    def __len__(self) -> int:
        return len(self._entries)

    def record(self, held: HeldBlocks) -> None:
        """Enter what a writer says. Malformed and impossible entries are ignored."""
        for key, offset, length, checksum, pinned in zip(
            held.keys, held.offsets, held.lengths, held.checksums, held.pinned, strict=False
        ):
            if offset >= 0 and length > 0 and offset + length <= self._nbytes:
                self._insert(_Entry(offset, length, key, checksum, pinned))

    def verified(self, memory: NDArray[np.uint8]) -> HeldBlocks:
        """Return the entries whose bytes match their checksums; forget the others.

        Args:
            memory: [nbytes] uint8, the segment.
        """
        offsets = np.array([entry.offset for entry in self._entries], dtype=np.int64)
        lengths = np.array([entry.length for entry in self._entries], dtype=np.int64)
        found = block_checksums(memory, offsets, lengths)
        pairs = zip(self._entries, found, strict=True)
        self._entries = [entry for entry, checksum in pairs if entry.checksum == checksum]
        return HeldBlocks(
            keys=[entry.key for entry in self._entries],
            offsets=[entry.offset for entry in self._entries],
            lengths=[entry.length for entry in self._entries],
            checksums=[entry.checksum for entry in self._entries],
            pinned=[entry.pinned for entry in self._entries],
        )

    def _insert(self, entry: _Entry) -> None:
        first = bisect_left(self._entries, entry.offset, key=lambda e: e.offset)
        if (
            first
            and self._entries[first - 1].offset + self._entries[first - 1].length > entry.offset
        ):
            first -= 1
        last = bisect_left(self._entries, entry.end, key=lambda e: e.offset)
        del self._entries[first:last]
        insort(self._entries, entry, key=lambda e: e.offset)
