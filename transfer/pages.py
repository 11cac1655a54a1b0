"""Pages: equally long pieces, given by their numbers instead of their offsets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from transfer.pieces import Ints, Pieces, make_pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """Which pages of a region or window: page `i` starts at `offset + i * stride` bytes.

    Attributes:
        numbers: [N] integers, not negative; may repeat where they are read.
        stride: bytes from one page to the next.
        offset: byte at which page 0 starts.
    """

    numbers: npt.ArrayLike
    stride: int
    offset: int = 0

    def starts(self) -> Ints:
        """Return [N] int64 bytes.

        Raises:
            ValueError: no integers, or out of any range.
        """
        numbers = np.atleast_1d(np.asarray(self.numbers))
        if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
            raise ValueError("page numbers must be a 1-d array of integers")
        if not 0 < self.stride <= 1 << 22 << 20 or not 0 <= self.offset <= 1 << 60:
            raise ValueError(f"stride {self.stride} or offset {self.offset} is out of range")
        if numbers.size and not 0 <= int(numbers.min()) <= int(numbers.max()) < 1 << 62:
            raise ValueError("a page number is out of range")
        if numbers.size and int(numbers.max()) > (1 << 62) // self.stride:
            raise ValueError("a page number is out of range")
        return numbers.astype(np.int64) * self.stride + self.offset


def pieces_of_pages(source: Pages, target: Pages, page_bytes: int) -> Pieces:
    """Return one piece per pair of pages, in order; pages that follow one another are joined later.

    Raises:
        ValueError: the numbers of pages differ, or a page is longer than a stride.
    """
    if not 0 <= page_bytes <= min(source.stride, target.stride):
        raise ValueError(f"pages of {page_bytes} bytes do not fit their stride")
    sources, targets = source.starts(), target.starts()
    if len(sources) != len(targets):
        raise ValueError(f"{len(sources)} source pages, {len(targets)} target pages")
    return make_pieces(sources, targets, page_bytes)
