"""The end of a combine: weighted rows of a token, summed in a fixed order.

    out[t] = cast(((0 + w[t,0] * row[t,0]) + w[t,1] * row[t,1]) + ...)      in fp32, k ascending

Only elementwise operations: each is rounded on its own whatever stands beside it, so the bits of
a token depend neither on the batch nor on where its experts live. A fused multiply-add or a
library reduction would not promise that.
"""

from __future__ import annotations

import torch

from dispatch.layout import DispatchLayout, RowFormat, Rows

CHUNK_BYTES = 1 << 20  # of products at a time: stays in the second-level cache


class WeightedSum:
    """Gathers the rows of all choices, then sums them. Owns its workspace; not thread-safe."""

    def __init__(self, layout: DispatchLayout) -> None:
        self._layout = layout
        self._gathered: dict[torch.dtype, tuple[torch.Tensor, Rows]] = {}
        product_bytes = 4 * layout.topk * layout.hidden
        self._chunk = min(layout.max_tokens, max(1, CHUNK_BYTES // product_bytes))

    def gathered(self, dtype: torch.dtype) -> Rows:
        """Return [max_tokens * K, words]: where the row of each choice is to be put."""
        found = self._gathered.get(dtype)
        if found is None:
            layout = self._layout
            # An ordinary tensor even if made inside inference mode: it is used outside it too.
            with torch.inference_mode(False):
                rows = torch.empty(layout.choices_max, layout.hidden, dtype=dtype)
            found = rows, RowFormat(layout.hidden * dtype.itemsize).of(rows)
            self._gathered[dtype] = found
        return found[1]

    def sum(self, dtype: torch.dtype, weights: torch.Tensor) -> torch.Tensor:
        """Return the sums of the rows that were put into `gathered(dtype)`.

        Args:
            dtype: Type of the rows.
            weights: [T, K] fp32.

        Returns:
            [T, H] of the layout's type, fresh.
        """
        num_tokens, topk = weights.shape
        rows, factors = self._gathered[dtype][0], weights.unsqueeze(2)
        if num_tokens <= self._chunk:
            return self._sum(rows[: num_tokens * topk], factors)
        layout = self._layout
        out = torch.empty(num_tokens, layout.hidden, dtype=layout.dtype)
        for begin in range(0, num_tokens, self._chunk):
            end = min(begin + self._chunk, num_tokens)
            out[begin:end] = self._sum(rows[begin * topk : end * topk], factors[begin:end])
        return out

    def _sum(self, rows: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        num_tokens, topk, _ = factors.shape
        products = rows.to(torch.float32, copy=True).view(num_tokens, topk, self._layout.hidden)
        products.mul_(factors)
        first, *others = products.unbind(1)
        total = first.add(0.0)  # a sum that starts from 0, also where the first product is -0
        for product in others:
            total.add_(product)
        return total.to(self._layout.dtype)
