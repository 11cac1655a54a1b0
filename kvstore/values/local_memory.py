"""Finds or makes regions for the memory of values, so that the engine can move their bytes."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

import numpy as np

from kvstore.client.pieces import Pieces
from kvstore.values.values import Bytes, Part, RegionPiece, as_tensor

if TYPE_CHECKING:
    import torch

    from kvstore.client.staging import Staging
    from transfer import Memory, Region, TransferEngine

# Smaller parts are copied through a staging buffer: a transfer of its own costs more than that.
DIRECT_BYTES_MIN: Final = 256 << 10
_ALIGNMENT: Final = 64


class LocalMemory:
    """Regions of this process's memory. Thread-safe.

    Args:
        engine: Registers it.
        staging: For small parts.
    """

    def __init__(self, engine: TransferEngine, staging: Staging) -> None:
        self._engine = engine
        self._staging = staging
        self._lock = threading.Lock()
        self._starts: list[int] = []
        self._regions: list[Region] = []  # by start; those that the user registered

    def register(self, memory: Memory | torch.Tensor) -> Region:
        """Register memory once; values and targets inside of it move without a copy from then on.

        It stays the caller's, who releases the region before it is freed.
        """
        region = self._engine.register(memory)
        with self._lock:
            index = bisect.bisect(self._starts, region.start)
            self._starts.insert(index, region.start)
            self._regions.insert(index, region)
        return region

    def release(self, region: Region) -> None:
        """Forget registered memory."""
        with self._lock:
            if region in self._regions:
                index = self._regions.index(region)
                del self._regions[index], self._starts[index]
        self._engine.release(region)

    def close(self) -> None:
        """Forget everything that was registered here."""
        with self._lock:
            regions, self._regions, self._starts = self._regions, [], []
        for region in regions:
            self._engine.release(region)

    def place(self, values: Sequence[Sequence[Part]], stack: ExitStack, *, copy: bool) -> Placed:
        """Say where the bytes of values are to be read from or written to.

        Args:
            values: The parts of each.
            stack: Takes what has to be given back after the transfer.
            copy: Copy what is staged into the staging buffer now; else `Placed.copy_out` does the
                reverse after a get.
        """
        placed = Placed()
        for block, parts in enumerate(values):
            start = 0
            for part in parts:
                piece = self.registered(part)
                if piece is None and part.nbytes >= DIRECT_BYTES_MIN:
                    assert not isinstance(part, RegionPiece), part
                    region = self._engine.register(as_tensor(part))
                    stack.callback(self._engine.release, region)
                    piece = RegionPiece(region, 0, part.nbytes)
                placed.add(block, start, part, piece)
                start += part.nbytes
        placed.stage(self._staging, stack, copy=copy)
        return placed

    def registered(self, part: Part) -> RegionPiece | None:
        """Return where bytes are in a region that was registered; None if they are in none."""
        if isinstance(part, RegionPiece):
            return part
        if not self._regions:
            return None
        start: int = part.__array_interface__["data"][0]  # sooner had than `ctypes.data`
        with self._lock:
            index = bisect.bisect(self._starts, start) - 1
            region = self._regions[index] if index >= 0 else None
        if region is None or start + part.nbytes > region.start + region.nbytes:
            return None
        return RegionPiece(region, start - region.start, part.nbytes)


class Placed:
    """Pieces being collected. Rows without a region yet are staged together."""

    def __init__(self) -> None:
        self._regions: list[Region] = []
        self._numbers: dict[int, int] = {}  # id of a region -> its index
        self._rows: list[tuple[int, int, int, int, int]] = []
        self._staged: list[tuple[int, Bytes]] = []  # row, memory
        self._buffer: Region | None = None

    def add(self, block: int, start: int, part: Part, piece: RegionPiece | None) -> None:
        """Add one part of a value; `piece`: where it is, None if it must be staged."""
        if piece is None:
            assert not isinstance(part, RegionPiece), part
            self._staged.append((len(self._rows), part))
            self._rows.append((-1, block, start, 0, part.nbytes))
            return
        self._rows.append((self._number(piece.region), block, start, piece.offset, piece.nbytes))

    def stage(self, staging: Staging, stack: ExitStack, *, copy: bool) -> None:
        """Give the staged rows their places."""
        if not self._staged:
            return
        sizes = [-(-part.nbytes // _ALIGNMENT) * _ALIGNMENT for _, part in self._staged]
        buffer = stack.enter_context(staging.borrow(sum(sizes)))
        number, offset = self._number(buffer), 0
        for (row, part), size in zip(self._staged, sizes, strict=True):
            _, block, start, _, nbytes = self._rows[row]
            self._rows[row] = (number, block, start, offset, nbytes)
            if copy:
                buffer.array[offset : offset + nbytes] = part
            offset += size
        self._buffer = buffer

    def pieces(self) -> Pieces:
        """Return them as columns."""
        table = np.array(self._rows, dtype=np.int64).reshape(-1, 5).T
        region_idx, blocks, starts, offsets, lengths = np.ascontiguousarray(table)
        return Pieces(
            regions=tuple(self._regions),
            region_idx=region_idx,
            blocks=blocks,
            starts=starts,
            offsets=offsets,
            lengths=lengths,
            one_each=bool(len(blocks)) and len(blocks) == int(blocks[-1]) + 1,
        )

    def copy_out(self, good: Sequence[bool]) -> None:
        """Copy what was staged to where it was wanted; only of the good blocks."""
        if self._buffer is None:
            return
        for row, target in self._staged:
            _, block, _, offset, nbytes = self._rows[row]
            if good[block]:
                target[:] = self._buffer.array[offset : offset + nbytes]

    def _number(self, region: Region) -> int:
        number = self._numbers.setdefault(id(region), len(self._regions))
        if number == len(self._regions):
            self._regions.append(region)
        return number
