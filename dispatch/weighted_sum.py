"""The end of a combine: weighted rows of a token, summed in a fixed order.

    out[t] = cast(((0 + w[t,0] * row[t,0]) + w[t,1] * row[t,1]) + ...)      in fp32, k ascending

Only elementwise operations: each is rounded on its own whatever stands beside it, so the bits of
a token depend neither on the batch nor on where its experts live. A fused multiply-add or a
library reduction would not promise that.
"""

from __future__ import annotations

import torch

from dispatch.layout import DispatchLayout, RowFormat, Rows

CHUNK_BYTES = 1 << 20  # of products at a time: stays in the cache


class WeightedSum:
    """Gathers the rows of all choices, then sums them. Owns its workspace; not thread-safe."""

    def __init__(self, layout: DispatchLayout) -> None:
        self._layout = layout
        self._gathered: dict[torch.dtype, tuple[torch.Tensor, Rows]] = {}
        product_bytes = 4 * layout.topk * layout.hidden
        self._chunk = min(layout.max_tokens, max(1, CHUNK_BYTES // product_bytes))
        self._products = _workspace(self._chunk, layout.topk, layout.hidden)
        self._sums = _workspace(self._chunk, layout.hidden)

    def gathered(self, dtype: torch.dtype) -> Rows:
        """Return [max_tokens * K, words]: where the row of each choice is to be put."""
        found = self._gathered.get(dtype)
        if found is None:
            layout = self._layout
            rows = _workspace(layout.choices_max, layout.hidden, dtype=dtype)
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
        layout, (num_tokens, topk) = self._layout, weights.shape
        out = torch.empty(num_tokens, layout.hidden, dtype=layout.dtype)
        rows, factors = self._gathered[dtype][0], weights.unsqueeze(2)
        if num_tokens <= self._chunk:
            self._sum(rows[: num_tokens * topk], factors, out)
            return out
        for begin in range(0, num_tokens, self._chunk):
            end = min(begin + self._chunk, num_tokens)
            self._sum(rows[begin * topk : end * topk], factors[begin:end], out[begin:end])
        return out

    def _sum(self, rows: torch.Tensor, factors: torch.Tensor, out: torch.Tensor) -> None:
        num_tokens = len(factors)
        products, total = self._products[:num_tokens], self._sums[:num_tokens]
        products.copy_(rows.view(products.shape))
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
