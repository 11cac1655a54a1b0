"""Exclusive sums down the columns of a table of counts, and over their totals.

counts   1 2 0      become   0 0 0      totals   4 3 5
         3 1 5               1 2 0      bounds   0 4 7 12
"""

from __future__ import annotations

from dispatch.kernels.language import jit, tl


@jit
def scan_columns(
    runs_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    num_runs: tl.tensor,
    num_columns: tl.tensor,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ALIGN: tl.constexpr,
) -> None:
    """Turn [runs, columns] counts into exclusive sums down each column, in place.

    `totals` become the sums of the columns, `bounds` [columns + 1] the exclusive sums of these,
    each rounded up to a multiple of ALIGN.
    """
    before = tl.zeros((), tl.int32)
    tl.store(bounds_ptr, before)
    for first_column in range(0, num_columns, BLOCK_C):
        column = first_column + tl.arange(0, BLOCK_C)
        total = tl.zeros((BLOCK_C,), tl.int32)
        for first_run in range(0, num_runs, BLOCK_P):
            run = first_run + tl.arange(0, BLOCK_P)
            inside = (run < num_runs)[:, None] & (column < num_columns)[None, :]
            at = runs_ptr + run.to(tl.int64)[:, None] * num_columns + column[None, :]
            counts = tl.load(at, mask=inside, other=0)
            tl.store(at, tl.cumsum(counts, 0) - counts + total[None, :], mask=inside)
            total += tl.sum(counts, 0)
        tl.store(totals_ptr + column, total, mask=column < num_columns)
        share = (total + ALIGN - 1) // ALIGN * ALIGN
        ends = before + tl.cumsum(share, 0)
        tl.store(bounds_ptr + 1 + column, ends, mask=column < num_columns)
        before += tl.sum(share, 0)
