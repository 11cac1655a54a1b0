"""Rows on their way to the experts: as they are, or in fp8 with their scales.

    native   one column      | H elements of the layout's type |
    fp8      two columns     | H elements e4m3 |   | ceil(H / 128) scales fp32 |

Elements and scales are those of `dispatch.kernels.fp8`. A rank's own rows take the same way: the
bits of a token must not depend on where its experts live.
"""

from __future__ import annotations

import torch

from dispatch.handle import Columns
from dispatch.layout import DispatchLayout, RowFormat
from dispatch.row_memory import RowMemory


class RowWire:
    """Turns rows into columns and back. Immutable.

    Args:
        layout: Type and size of the rows, and what they travel as.
    """

    def __init__(self, layout: DispatchLayout) -> None:
        self._layout = layout
        self._formats = tuple(map(RowFormat, layout.column_bytes))

    def encode(self, x: torch.Tensor) -> Columns:
        """Return the columns of [n, H] rows; in native form they share the rows' memory."""
        if not self._layout.fp8:
            return (self._formats[0].of(x),)
        from dispatch.kernels.fp8 import quantise_torch  # may load triton

        elements, scales = quantise_torch(x.detach())
        return self._formats[0].of(elements), self._formats[1].of(scales)

    def empty(self, num_rows: int, memory: RowMemory) -> tuple[torch.Tensor, ...]:
        """Return room for the columns of `num_rows` rows."""
        layout = self._layout
        if not layout.fp8:
            return (memory.empty(num_rows, layout.hidden, layout.dtype),)
        return tuple(memory.empty(num_rows, n, torch.uint8) for n in layout.column_bytes)

    def decode(self, columns: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return the rows that columns made by `empty` hold."""
        if not self._layout.fp8:
            return columns[0]
        from dispatch.kernels.fp8 import dequantise_torch  # may load triton

        elements, scales = columns
        return dequantise_torch(
            elements.view(torch.float8_e4m3fn), scales.view(torch.float32), self._layout.dtype
        )
