"""Pages: equally long pieces, given by their numbers instead of their offsets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from transfer.arguments import check_integer, check_type
from transfer.pieces import Ints, Pieces, make_pieces

STRIDE_MAX: Final = 1 << 42


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
            TypeError, ValueError: no integers, or out of any range.
        """
        check_integer("stride", self.stride, 1, STRIDE_MAX)
        check_integer("offset", self.offset, 0, 1 << 60)
        numbers = np.atleast_1d(np.asarray(self.numbers))
        if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
            raise ValueError("page numbers must be a 1-d array of integers")
        if numbers.size and not 0 <= int(numbers.min()) <= int(numbers.max()) < 1 << 62:
            raise ValueError("a page number is out of range")
        if numbers.size and int(numbers.max()) > (1 << 62) // self.stride:
            raise ValueError("a page number is out of range")
        return numbers.astype(np.int64) * self.stride + self.offset


def pieces_of_pages(source: Pages, target: Pages, page_bytes: int) -> Pieces:
    """Return one piece per pair of pages, in order; pages that follow one another are joined later.

    Raises:
        TypeError, ValueError: the numbers of pages differ, a page is longer than a stride, or these
            are no pages.
    """
    for pages in (source, target):
        check_type("pages", pages, Pages)
        check_integer("stride", pages.stride, 1, STRIDE_MAX)
    check_integer("page_bytes", page_bytes, -(2**63), 2**63)
    if not 0 <= page_bytes <= min(source.stride, target.stride):
        raise ValueError(f"pages of {page_bytes} bytes do not fit their stride")
    sources, targets = source.starts(), target.starts()
    if len(sources) != len(targets):
        raise ValueError(f"{len(sources)} source pages, {len(targets)} target pages")
    return make_pieces(sources, targets, page_bytes)
