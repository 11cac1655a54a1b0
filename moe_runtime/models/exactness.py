"""Row tiles: how a matrix product gives a row the same bits whatever rows stand beside it.

Problem: `y = x @ W.T` picks its kernel by the number of rows, and kernels differ in the order in
which they add along K. So a token decoded alone and the same token inside a prefill chunk get
different bits, and after a few layers different words. Which row counts agree is a fact of the
machine, the library and the shape: nothing is assumed here, it is measured when a model is loaded.

Choice: probe the row counts that serving uses on the actual `(K, N, dtype, threads)` and keep those
that agree with a tile of `ANCHOR_ROWS` rows, at every row position. A product over other counts is
cut into tiles of those sizes, the largest first, so that the weights are read as few times as
possible; for the same reason a tile that is nearly full is filled up with zeros.

                 rows 45, sizes (1, 2, ..., 32)
    [ ............ 32 ............ | ..... 13 ..... ]        two products, no padding

                 rows 45, sizes (1, 2, ..., 32, 48)
    [ ........................ 45 ..............| 0 ]        one product, three rows of zeros

Alternative: always pad to one tile. It needs no probe of many sizes, but wastes most of a decode
step, where an expert sees one to four rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from moe_runtime.errors import ExactnessUnavailable

RowKernel = Callable[[torch.Tensor], torch.Tensor]
"""[M, K] -> [M, N], each row from the same row of the input."""

ANCHOR_ROWS = (16, 32, 64, 128)
"""Tiles that define the bits: the first that gives the same bits at each of its row positions."""

CANDIDATE_ROWS = (*range(1, 33), *range(40, 129, 8), *range(160, 257, 32), 320, 384, 448, 512)
COARSE_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""For weights so large that probing every row count would take seconds."""

COARSE_FROM_ELEMENTS = 1 << 24
PROBE_SEED = 20
PADDING_MAX = 1 / 8  # of a tile: more of it costs more than reading the weights once more


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTiles:
    """Row counts, ascending, whose products agree bit for bit; empty: any count may be used."""

    sizes: tuple[int, ...]

    def cut(self, rows: int) -> list[tuple[int, int, int]]:
        """Cut `rows` rows into `(start, rows, tile rows)`; only the last tile may be larger.

        >>> RowTiles(sizes=(2, 4, 8)).cut(13)
        [(0, 8, 8), (8, 4, 4), (12, 1, 2)]
        """
        pieces: list[tuple[int, int, int]] = []
        start = 0
        while start < rows:
            rest = rows - start
            above = next((size for size in self.sizes if size >= rest), 0)
            if above and above - rest <= above * PADDING_MAX:
                size = above
            else:
                size = max((size for size in self.sizes if size <= rest), default=self.sizes[0])
            pieces.append((start, min(size, rest), size))
            start += size
        return pieces


ANY_ROWS = RowTiles(sizes=())


def apply_tiled(kernel: RowKernel, x: torch.Tensor, tiles: RowTiles) -> torch.Tensor:
    """Apply a row kernel to any number of rows through tiles whose bits agree.

    Args:
        kernel: The product.
        x: [M, K], contiguous, M >= 1.
        tiles: Sizes that a probe of this very kernel found.
    """
    outputs = []
    for start, rows, size in tiles.cut(x.shape[0]):
        tile = x[start : start + rows]
        if rows < size:
            tile = torch.cat((tile, tile.new_zeros(size - rows, x.shape[1])))
        outputs.append(kernel(tile)[:rows])
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def cancelling_data(
    rows: int, in_features: int, out_features: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make an input and a weight whose exact product is zero, so that only rounding is left.

    Columns are paired at random places: equal weights, opposite inputs. Whatever a kernel returns
    is the error of its order of summation, and two orders differ in nearly every element. With
    plain random data the rounding to bfloat16 would hide the difference in all but a few.

    Returns:
        [rows, in_features] input and [out_features, in_features] weight.
    """
    generator = torch.Generator().manual_seed(PROBE_SEED)
    order = torch.randperm(in_features, generator=generator)
    half = in_features // 2
    left, right = order[:half], order[half : 2 * half]
    x = torch.randn(rows, in_features, generator=generator).to(dtype)
    weight = torch.randn(out_features, in_features, generator=generator).to(dtype)
    x[:, right] = -x[:, left]
    weight[:, right] = weight[:, left]
    # An odd column would be the whole result, and rounding to bfloat16 would hide the rest of it.
    weight[:, order[2 * half :]] = 0.0
    return x, weight


def probe_tiles(
    make_kernel: Callable[[torch.Tensor], RowKernel],
    *,
    in_features: int,
    out_features: int,
    dtype: torch.dtype,
) -> RowTiles:
    """Find the row counts that give each row the same bits, for one shape and one kind of kernel.

    Args:
        make_kernel: Makes the kernel of a weight [out_features, in_features]; its identity is part
            of the key under which results are kept for the life of the process.
        in_features: K.
        out_features: N.
        dtype: Of input and weight.

    Raises:
        ExactnessUnavailable: Not even one tile size has equal bits at all row positions.
    """
    return _probe_once(make_kernel, in_features, out_features, dtype, torch.get_num_threads())


@lru_cache(maxsize=256)
def _probe_once(
    make_kernel: Callable[[torch.Tensor], RowKernel],
    in_features: int,
    out_features: int,
    dtype: torch.dtype,
    threads: int,
) -> RowTiles:
    coarse = in_features * out_features >= COARSE_FROM_ELEMENTS
    candidates = COARSE_ROWS if coarse else CANDIDATE_ROWS
    x, weight = cancelling_data(candidates[-1], in_features, out_features, dtype)
    kernel = make_kernel(weight)
    for anchor in ANCHOR_ROWS:
        expected = _at_all_positions(kernel, x, anchor)
        if expected is None:
            continue
        sizes = tuple(size for size in candidates if _agrees(kernel, x, size, expected))
        assert anchor in sizes
        return RowTiles(sizes=sizes)
    raise ExactnessUnavailable(in_features=in_features, out_features=out_features, dtype=str(dtype))


def _at_all_positions(kernel: RowKernel, x: torch.Tensor, anchor: int) -> torch.Tensor | None:
    """Product by tiles of `anchor` rows; None if a row's bits depend on its place in the tile."""
    expected = torch.cat([kernel(tile) for tile in torch.split(x, anchor)])
    tile = x[:anchor]
    for shift in range(1, anchor):
        if not torch.equal(kernel(tile.roll(shift, 0)), expected[:anchor].roll(shift, 0)):
            return None
    return expected


def _agrees(kernel: RowKernel, x: torch.Tensor, size: int, expected: torch.Tensor) -> bool:
    """Whether tiles of `size` rows, at several starts, give the expected rows."""
    starts = {0, min(1, len(x) - size), (len(x) - size) // 2, len(x) - size}
    return all(
        torch.equal(kernel(x[start : start + size]), expected[start : start + size])
        for start in starts
    )
