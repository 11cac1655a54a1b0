"""The end of a combine: weighted rows of a token, summed in a fixed order.

    out[t] = cast(((0 + w[t,0] * row[t,0]) + w[t,1] * row[t,1]) + ...)      in fp32, k ascending

Only elementwise operations: each is rounded on its own whatever stands beside it, so the bits of
a token depend neither on the batch nor on where its experts live. A fused multiply-add or a
library reduction would not promise that. Where the compiled loops were built they read the rows
where they lie; else torch does the same with a copy of them. The bits are the same, but for those
that no value depends on: the payload of a NaN.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from dispatch import native
from dispatch.layout import DTYPES, DispatchLayout, RowFormat, Rows, copy_rows
from dispatch.routing import Indices

CHUNK_BYTES = 1 << 20  # of products at a time: stays in the cache
COMPILED = (torch.bfloat16, torch.float32)


class WeightedSum:
    """Is told where the rows are, then sums them. Owns its workspace; not thread-safe.

    `start`, then `put` for all rows, then `sum`; rows are put by slot, t * width + k.
    """

    def __init__(self, layout: DispatchLayout) -> None:
        self._hidden = layout.hidden
        self._dtype = layout.dtype
        self._num_sums = self._width = 0
        self._row_bytes = 0
        self._addresses: Indices | None = None
        self._kept: list[Rows] = []  # what the addresses point into
        self._rows: Rows = np.empty((0, 1), np.uint8)
        self._gathered: dict[torch.dtype, torch.Tensor] = {}
        self._workspace = torch.empty(0)

    def start(self, dtype: torch.dtype, num_sums: int, width: int, *, holes: bool) -> None:
        """Begin with `num_sums` sums of `width` rows each.

        Args:
            dtype: Type of the rows.
            num_sums: T.
            width: K.
            holes: Whether some slots will have no row; such a row counts as zeros.
        """
        self._dtype, self._num_sums, self._width = dtype, num_sums, width
        self._row_bytes = self._hidden * dtype.itemsize
        self._addresses = None
        self._kept.clear()
        if native.compiled is not None and dtype in COMPILED:
            self._addresses = np.zeros(num_sums * width, np.int64)
            return
        self._rows = RowFormat(self._row_bytes).of(self._room(dtype, num_sums * width))
        if holes:
            self._rows[:] = 0

    def put(self, slots: Indices, rows: Rows, index: npt.NDArray[np.integer] | None = None) -> None:
        """Let the row of `slots[i]` be `rows[index[i]]`, or `rows[i]`.

        Args:
            slots: [n], each at most once in all.
            rows: [m, words], must not change before `sum`.
            index: [n] rows, below m.
        """
        if self._addresses is not None:
            numbers = np.arange(len(slots)) if index is None else index
            self._kept.append(rows)
            self._addresses[slots] = native.addresses(rows, numbers, self._row_bytes)
        elif index is None:
            self._rows[slots] = rows
        else:
            copy_rows(rows, index, self._rows, slots)

    def sum(self, weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the sums.

        Args:
            weights: [T, K] fp32, contiguous.
            dtype: Of the result.

        Returns:
            [T, H], fresh.
        """
        out = torch.empty(self._num_sums, self._hidden, dtype=dtype)
        if not self._num_sums:
            return out
        if self._addresses is not None:
            total = out if dtype in COMPILED else torch.empty(out.shape)
            assert native.compiled is not None
            native.compiled.weighted_sums(
                total.data_ptr(),
                self._addresses,
                weights.detach().numpy(),
                self._width,
                self._hidden,
                DTYPES[self._dtype],
                DTYPES[total.dtype],
            )
            self._kept.clear()
            return out if total is out else out.copy_(total)
        self._sum_copies(weights.detach().unsqueeze(2), out)
        return out

    def _room(self, dtype: torch.dtype, num_rows: int) -> torch.Tensor:
        found = self._gathered.get(dtype)
        if found is None or len(found) < num_rows:
            # Grown in powers of two and kept: fresh memory costs several times the copy.
            room = 1 << max(num_rows - 1, 0).bit_length()
            found = self._gathered[dtype] = _workspace(room, self._hidden, dtype=dtype)
        return found[:num_rows]

    def _sum_copies(self, factors: torch.Tensor, out: torch.Tensor) -> None:
        width, hidden = self._width, self._hidden
        rows = self._room(self._dtype, self._num_sums * width).view(-1, width, hidden)
        chunk = min(self._num_sums, max(1, CHUNK_BYTES // (4 * width * hidden)))
        needed = chunk * (width + 1) * hidden
        if self._workspace.numel() < needed:
            self._workspace = _workspace(needed)
        rows_at_a_time = self._workspace[:needed].view(-1, hidden)
        products, total = rows_at_a_time[: chunk * width], rows_at_a_time[chunk * width :]
        for begin in range(0, self._num_sums, chunk):
            part = slice(begin, min(begin + chunk, self._num_sums))
            num = part.stop - begin
            _sum(
                rows[part],
                factors[part],
                products.view(chunk, width, hidden)[:num],
                total[:num],
                out[part],
            )


def _sum(
    rows: torch.Tensor,
    factors: torch.Tensor,
    products: torch.Tensor,
    total: torch.Tensor,
    out: torch.Tensor,
) -> None:
    products.copy_(rows)
    products.mul_(factors)
    first, *others = products.unbind(1)
    # The sum starts from 0, also where the first product is -0.
    torch.add(first, 0.0, out=total)
    for product in others:
        total.add_(product)
    out.copy_(total)


def _workspace(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    # An ordinary tensor even if made inside inference mode: it is used outside it too.
    with torch.inference_mode(False):
        return torch.empty(*shape, dtype=dtype)
