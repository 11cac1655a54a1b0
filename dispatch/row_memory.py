"""Memory for large row tensors that is used again when nobody looks at it any more.

Fresh memory of many megabytes is mapped page by page, which costs several times what filling it
does. So the memory of a tensor that has ended is kept for the next one:

    empty() -> tensor -> views of it -> the last of them ends -> kept -> empty()

What keeps the memory is the storage that all views share, so a result may be held for as long as
anybody likes; it is then simply not used again.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

SMALL_BYTES = 1 << 20  # below it the allocator has warm memory anyway
LINE_BYTES = 64  # rows begin at a line of the cache: copies may go past it (`native.c`)
KEPT_MAX = 4  # blocks that nobody uses

Block = npt.NDArray[np.uint8]


class RowMemory:
    """Lends memory for rows. One thread may ask; tensors may end in any."""

    def __init__(self) -> None:
        self._kept: list[Block] = []
        self._lent: dict[int, tuple[weakref.ref[Any], Block]] = {}  # by id: arrays have no hash

    def empty(self, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor [num_rows, width] of unknown content."""
        nbytes = num_rows * width * dtype.itemsize
        if nbytes < SMALL_BYTES:
            return torch.empty(num_rows, width, dtype=dtype)
        block = self._block(nbytes)
        # The tensor's storage holds this array, and nothing else does.
        lent = block[:nbytes]
        reference = weakref.ref(lent, self._ended)
        self._lent[id(reference)] = reference, block
        return torch.from_numpy(lent).view(dtype).view(num_rows, width)

    def _block(self, nbytes: int) -> Block:
        fitting = [block for block in self._kept if nbytes <= len(block)]
        if fitting:
            found = min(fitting, key=len)
            self._kept = [block for block in self._kept if block is not found]
            return found
        # Powers of two, of which only what is written to becomes real.
        block = np.empty((1 << (nbytes - 1).bit_length()) + LINE_BYTES, np.uint8)
        return block[-block.__array_interface__["data"][0] % LINE_BYTES :]

    def _ended(self, reference: weakref.ref[Any]) -> None:
        self._kept.append(self._lent.pop(id(reference))[1])
        if len(self._kept) > KEPT_MAX:
            self._kept.pop(0)
