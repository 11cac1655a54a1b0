"""A linear layer with weights in the layout that the CPU's matrix kernels want.

`torch.nn.functional.linear` in bfloat16 reorders the weight at every call; on a CPU with matrix
instructions that costs more than a decode step's arithmetic. So weights are reordered once, when
they are loaded. The reordered copy is opaque: it can't be sent to a peer, and whoever needs the
plain weight as well (expert weights travel) keeps both.

Legend: M rows, K in_features, N out_features.
"""

from __future__ import annotations

from functools import cache

import torch

from configs.schema import Exactness
from moe_runtime.models import tiles
from moe_runtime.models.exactness import ANY_ROWS, RowKernel, RowTiles, apply_tiled, probe_tiles


@cache
def can_reorder(dtype: torch.dtype) -> bool:
    """Whether this build and machine have reordered weights for the type."""
    if not (torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return False
    return dtype == torch.float32 or (
        dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def plain_kernel(weight: torch.Tensor) -> RowKernel:
    """Product with a weight [N, K] as it is."""
    linear = torch.nn.functional.linear

    def product(x: torch.Tensor) -> torch.Tensor:
        return linear(x, weight)

    return product


def reordered_kernel(weight: torch.Tensor) -> RowKernel:
    """Product with a reordered copy of a weight [N, K]; the original may be freed."""
    # The second argument is a typical number of rows: it only guides the choice of the layout. The
    # one for few rows also serves more of them at a time with equal bits (see `exactness`).
    reordered = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), 1)
    linear = torch.ops.mkldnn._linear_pointwise.default

    def product(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = linear(x, reordered, None, "none", [], "")
        return result

    return product


def tile_kernel(weight: torch.Tensor) -> RowKernel:
    """Product with a reordered copy of a weight [N, K] on the tile unit: exact for any rows."""
    return tiles.PackedWeight(weight).product


class Linear:
    """`y = x @ weight.T + bias`, in `bitwise` mode with the same bits for a row in any batch.

    Stateless after construction, so threads may share it.

    Attributes:
        tiles: Row counts that the product is cut into; no sizes in `tolerant` mode, and where the
            product itself is exact.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        *,
        exactness: Exactness,
        bias: torch.Tensor | None = None,
        reorder: bool = True,
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self.tiles: RowTiles = ANY_ROWS
        make_kernel = plain_kernel
        if reorder and tiles.usable(weight.dtype):
            make_kernel = tile_kernel
        elif reorder and can_reorder(weight.dtype):
            make_kernel = reordered_kernel
        if exactness is Exactness.BITWISE and make_kernel is not tile_kernel:
            self.tiles = probe_tiles(
                make_kernel,
                in_features=self.in_features,
                out_features=self.out_features,
                dtype=weight.dtype,
            )
        self._direct = frozenset(self.tiles.sizes)
        self._kernel = make_kernel(weight)
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply to x: [M, K], contiguous, of the weight's dtype; M = 0 is legal. Returns [M, N]."""
        rows = x.shape[0]
        if rows == 0:
            return x.new_empty(0, self.out_features)
        if rows in self._direct or not self._direct:
            y = self._kernel(x)
        else:
            y = apply_tiled(self._kernel, x, self.tiles)
        # Added apart: fused into the product it may choose another kernel than the probe saw.
        return y if self._bias is None else y.add_(self._bias)
