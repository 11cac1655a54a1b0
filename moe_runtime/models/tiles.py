"""Matrix products on the tile unit of a processor (x86-64 AMX), in bfloat16.

The only module that imports `moe_runtime.models._tiles`. Where it was not built, the processor has
no such unit, or MOE_RUNTIME_NATIVE=0, `compiled` is None and the library's products are used.

A row's bits depend on the weight and the row alone, by construction: see `tiles.c`. The weights are
copied into the order in which the unit reads them, so that a decode step, which is all reading of
weights, reads them once from end to end.

Legend: M and R rows, K depth, N columns, H hidden, I width of an expert.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from transfer.compiled_part import compiled_part

compiled = compiled_part("moe_runtime.models._tiles")
if compiled is not None and not compiled.supported():
    compiled = None

TILE_ROWS = 16
DEPTH = 32  # of a tile; sizes are filled up to multiples of it
ELEMENT_BYTES = 2


def usable(dtype: torch.dtype) -> bool:
    """Whether products of this type can be made here.

    With more threads the library's products are faster: these ones use the calling thread only.
    """
    return compiled is not None and dtype == torch.bfloat16 and torch.get_num_threads() == 1


def _filled(size: int) -> int:
    return -(-size // DEPTH) * DEPTH


def _room_for(num_rows: int, *widths: int) -> torch.Tensor:
    """Return memory for so many rows of these widths, or for as many as are computed at a time."""
    assert compiled is not None
    whole_tiles = -(-num_rows // TILE_ROWS) * TILE_ROWS
    return _bytes(min(whole_tiles, compiled.CHUNK_ROWS) * ELEMENT_BYTES * sum(map(_filled, widths)))


class PackedWeight:
    """A weight [N, K], copied. Immutable.

    Args:
        weight: [N, K] bfloat16.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        assert compiled is not None
        self.columns, self.depth = weight.shape
        self._panels = _bytes(ELEMENT_BYTES * _filled(self.columns) * _filled(self.depth))
        plain = weight.detach().contiguous()
        compiled.pack(self._panels.data_ptr(), plain.data_ptr(), self.columns, self.depth, 0)

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows [M, K] bfloat16 times the transposed weight: [M, N]."""
        assert compiled is not None
        assert rows.dtype == torch.bfloat16
        assert rows.shape[1] == self.depth
        rows, num_rows = rows.contiguous(), rows.shape[0]
        out = torch.empty(num_rows, self.columns, dtype=rows.dtype)
        scratch = _room_for(num_rows, self.depth)
        compiled.multiply(
            out.data_ptr(),
            rows.data_ptr(),
            self._panels.data_ptr(),
            num_rows,
            self.columns,
            self.depth,
            scratch.data_ptr(),
        )
        return out


class PackedExpert:
    """The three matrices of an expert, copied. Immutable.

    Attributes:
        address: Of the copy.

    Args:
        gate_up: [2I, H] bfloat16.
        down: [H, I] bfloat16.
    """

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        assert compiled is not None
        hidden, inner = down.shape
        elements = _filled(hidden) * _filled(inner)
        self._panels = _bytes(ELEMENT_BYTES * 3 * elements)
        self.address = self._panels.data_ptr()
        compiled.pack(self.address, gate_up.contiguous().data_ptr(), inner, hidden, 1)
        behind = self.address + ELEMENT_BYTES * 2 * elements
        compiled.pack(behind, down.contiguous().data_ptr(), hidden, inner, 0)


class GatedMLPs:
    """Applies experts to their rows. Owns its workspace; not thread-safe.

    Args:
        hidden: H.
        inner: I.
    """

    def __init__(self, hidden: int, inner: int) -> None:
        assert compiled is not None
        self._hidden, self._inner = hidden, inner
        self._scratch = _room_for(compiled.CHUNK_ROWS, hidden, inner)

    def __call__(
        self,
        rows: torch.Tensor,
        counts: Sequence[int],
        experts: Sequence[PackedExpert],
        out: torch.Tensor,
    ) -> None:
        """Write `down(silu(gate(x)) * up(x))`, rounded after each product.

        Args:
            rows: [R, H] bfloat16, those of an expert beside each other.
            counts: Rows of each expert; they add up to R.
            experts: As many.
            out: [R, H] bfloat16, contiguous.
        """
        assert compiled is not None
        assert rows.dtype == out.dtype == torch.bfloat16
        assert rows.shape == out.shape == (sum(counts), self._hidden)
        rows = rows.contiguous()
        items = np.empty((len(counts), 2), np.int64)
        items[:, 0] = counts
        items[:, 1] = [expert.address for expert in experts]
        compiled.gated(
            out.data_ptr(),
            rows.data_ptr(),
            items.__array_interface__["data"][0],
            len(counts),
            self._hidden,
            self._inner,
            self._scratch.data_ptr(),
        )


def _bytes(count: int) -> torch.Tensor:
    # An ordinary tensor even if made inside inference mode: it is used outside it too.
    with torch.inference_mode(False):
        return torch.empty(count, dtype=torch.uint8)
