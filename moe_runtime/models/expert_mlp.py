"""The experts' part of a layer: rows sorted by expert through each expert's gated MLP.

Legend: R rows (one per token and chosen local expert), H hidden, I expert width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from configs.schema import Exactness
from dispatch.row_memory import RowMemory
from moe_runtime.models import tiles
from moe_runtime.models.elementwise import silu_and_mul
from moe_runtime.models.experts import ExpertBank
from moe_runtime.models.linear import Linear


class ExpertMLP:
    """Computes rows on the experts of a bank. Used from the rank loop only.

    Args:
        bank: The weights.
        exactness: `bitwise`: a row's result does not depend on the rows beside it.
        reorder: Keep a second, reordered copy of the weights of every expert that was used.
    """

    def __init__(self, bank: ExpertBank, *, exactness: Exactness, reorder: bool = True) -> None:
        self._bank = bank
        self._exactness = exactness
        self._reorder = reorder
        self._memory = RowMemory()
        self._on_tiles: tiles.GatedMLPs | None = None
        if reorder and tiles.usable(bank.dtype):
            spec = bank.spec
            self._on_tiles = tiles.GatedMLPs(spec.hidden_size, spec.moe_intermediate_size)

    def warm_up(self) -> None:
        """Reorder the weights of all resident experts now, instead of at their first rows."""
        prepare = tiles.PackedExpert if self._on_tiles else self._linears
        for moe_layer, expert in self._bank.resident():
            self._bank.prepared(moe_layer, expert, prepare)

    def __call__(
        self, rows: torch.Tensor, counts: Sequence[int], experts: Sequence[int], *, moe_layer: int
    ) -> torch.Tensor:
        """Compute all rows.

        Args:
            rows: [R, H], contiguous, grouped by expert.
            counts: Rows of each expert; they add up to R.
            experts: Logical id of each expert, of the same length.
            moe_layer: Ordinal among the layers with experts.

        Returns:
            [R, H] in the same order.

        Raises:
            ExpertNotResident: A row is for an expert that the bank does not have.
        """
        used = [(count, expert) for count, expert in zip(counts, experts, strict=True) if count]
        if not used:
            return torch.empty_like(rows)
        sizes = [count for count, _ in used]
        if self._on_tiles is None:
            return self._by_linears(rows, sizes, [expert for _, expert in used], moe_layer)
        packed = [self._bank.prepared(moe_layer, expert, tiles.PackedExpert) for _, expert in used]
        out = self._memory.empty(rows.shape[0], rows.shape[1], rows.dtype)
        self._on_tiles(rows, sizes, packed, out)
        return out

    def _by_linears(
        self, rows: torch.Tensor, sizes: list[int], experts: list[int], moe_layer: int
    ) -> torch.Tensor:
        linears = [self._bank.prepared(moe_layer, expert, self._linears) for expert in experts]
        # One activation for all experts: a decode step has few rows for each of many experts, and
        # there the calls cost more than the arithmetic.
        gate_up = [
            pair[0](part) for pair, part in zip(linears, torch.split(rows, sizes), strict=True)
        ]
        inner = silu_and_mul(torch.cat(gate_up), self._exactness)
        return torch.cat(
            [pair[1](part) for pair, part in zip(linears, torch.split(inner, sizes), strict=True)]
        )

    def _linears(self, gate_up: torch.Tensor, down: torch.Tensor) -> tuple[Linear, Linear]:
        exactness, reorder = self._exactness, self._reorder
        return (
            Linear(gate_up, exactness=exactness, reorder=reorder),
            Linear(down, exactness=exactness, reorder=reorder),
        )
