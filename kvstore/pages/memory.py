"""Where a rank's heads lie in its own memory, as pieces that a put gathers and a read scatters to.

Engines order their KV cache in many ways. Any of them is a sum of strides:

    offset(page, layer, part, head, token) = base + page * P + layer * L + part * K + head * H + ...

with the elements of one head and token next to one another. Pieces that touch in memory and in
the block are one piece: with tokens innermost (`head token element`) a piece is all tokens of a
head, with heads innermost (`token head element`) it is one token of one head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.client.pieces import Pieces
from kvstore.errors import InvalidValue
from kvstore.pages.layout import PageLayout
from kvstore.pages.share import HeadShare

if TYPE_CHECKING:
    from transfer import Region

Ints = NDArray[np.int64]


class PageStrides(NamedTuple):
    """Bytes from one to the next. `layer` is ignored where every layer has a region."""

    page: int
    layer: int
    part: int  # from a head's key to its value
    head: int
    token: int

    @classmethod
    def packed(cls, order: str, layout: PageLayout, *, heads: int, pages: int) -> PageStrides:
        """Return the strides of a dense array.

        Args:
            order: Its dimensions from the outermost on, like "layer part page token head".
            layout: Keys and values must be of one size (or there are no values).
            heads: Heads of this rank.
            pages: Pages in the array; matters unless `page` is first.

        Raises:
            InvalidValue: Not these five dimensions, or values of another size than keys.
        """
        sizes = {
            "page": pages,
            "layer": layout.layers,
            "part": len(layout.part_bytes),
            "head": heads,
            "token": layout.block_tokens,
        }
        names = order.split()
        if sorted(names) != sorted(sizes):
            raise InvalidValue(problem=f"dimensions {order!r}, not {' '.join(sizes)} in any order")
        if len(set(layout.part_bytes)) > 1:
            raise InvalidValue(problem="keys and values of different sizes are no dense array")
        strides, step = {}, layout.part_bytes[0]
        for name in reversed(names):
            strides[name] = step
            step *= sizes[name]
        return cls(**strides)


class _Template(NamedTuple):
    """The pieces of page 0; columns of one row per piece."""

    region_idx: Ints
    groups: Ints  # position among the rank's groups
    starts: Ints
    offsets: Ints
    lengths: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedMemory:
    """A rank's paged KV cache.

    Attributes:
        regions: One for all layers, or one for each.
        strides: How pages lie in them.
        base: Offset of page 0, layer 0, head 0.
    """

    regions: tuple[Region, ...]
    strides: PageStrides
    base: int = 0


class PagePieces:
    """Makes the pieces of any pages of one memory. Thread-safe.

    Args:
        layout: What is stored.
        share: Which heads of it.
        memory: Where they are.
    """

    def __init__(self, layout: PageLayout, share: HeadShare, memory: PagedMemory) -> None:
        if len(memory.regions) not in (1, layout.layers):
            raise InvalidValue(
                problem=f"{len(memory.regions)} regions for {layout.layers} layers: 1 or as many"
            )
        self._memory = memory
        self._num_groups = len(share.groups)
        self._template = _template(layout, share, memory)

    @property
    def num_pieces(self) -> int:
        """Pieces per page."""
        return len(self._template.lengths)

    def of(self, pages: Sequence[int] | Ints, *, first: int = 0) -> Pieces:
        """Return the pieces of some pages.

        Block `(first + i) * groups + g` is group g of `pages[i]`.
        """
        numbers = np.asarray(pages, dtype=np.int64)
        one = self._template
        count = len(numbers)
        blocks = (first + np.arange(count)[:, None]) * self._num_groups
        places = numbers[:, None] * self._memory.strides.page
        return Pieces(
            regions=self._memory.regions,
            region_idx=np.tile(one.region_idx, count),
            blocks=(blocks + one.groups).ravel(),
            starts=np.tile(one.starts, count),
            offsets=(places + one.offsets).ravel(),
            lengths=np.tile(one.lengths, count),
        )


def _template(layout: PageLayout, share: HeadShare, memory: PagedMemory) -> _Template:
    strides, parts = memory.strides, np.array(layout.part_bytes)
    # In the block's order: group, head in the group, layer, part, token.
    shape = (
        len(share.groups), layout.heads_per_group, layout.layers, len(parts), layout.block_tokens,
    )  # fmt: skip
    group, head, layer, part, token = np.indices(shape)
    lengths = parts[part]
    many = len(memory.regions) > 1
    offsets = (
        memory.base
        + (group * layout.heads_per_group + head) * strides.head
        + (0 if many else layer * strides.layer)
        + part * strides.part
        + token * strides.token
    )
    starts = lengths.reshape(shape[0], -1).cumsum(axis=1).reshape(shape) - lengths
    region_idx = layer if many else np.zeros_like(layer)
    columns = [column.ravel() for column in (region_idx, group, starts, offsets, lengths)]
    return _merged(_Template(*columns))


def _merged(pieces: _Template) -> _Template:
    """Make one piece of those that follow one another in memory and in the block."""
    ends = pieces.offsets + pieces.lengths
    apart = (
        (pieces.offsets[1:] != ends[:-1])
        | (pieces.region_idx[1:] != pieces.region_idx[:-1])
        | (pieces.groups[1:] != pieces.groups[:-1])
    )
    firsts = np.concatenate([[0], np.flatnonzero(apart) + 1])
    return _Template(
        region_idx=pieces.region_idx[firsts],
        groups=pieces.groups[firsts],
        starts=pieces.starts[firsts],
        offsets=pieces.offsets[firsts],
        lengths=np.add.reduceat(pieces.lengths, firsts),
    )
