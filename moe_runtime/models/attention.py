"""Causal attention over paged keys and values, with bits that don't depend on the batch.

Legend: T tokens, Hq and Hkv heads, G = Hq / Hkv, D head size, Q queries per tile, R = Q * G rows
per tile, N keys. How a batch is cut into tiles, and why, is told in `attention_plan`.
"""

from __future__ import annotations

import logging

import torch
from torch.nn.functional import scaled_dot_product_attention

from configs.schema import Exactness
from moe_runtime.errors import MoeRuntimeError
from moe_runtime.models.attention_plan import (
    KEY_BLOCK,
    AttentionPlan,
    AttentionShape,
    Gather,
    TileGroup,
    causal_mask,
    padded_keys,
    plan_exact,
    plan_tolerant,
)
from moe_runtime.models.batch import ForwardBatch
from moe_runtime.models.paged_kv import PagedKV
from moe_runtime.models.spec import ModelSpec

_logger = logging.getLogger(__name__)


class AttentionNotInvariant(MoeRuntimeError):
    """On this machine the attention of a query depends on what else is in the batch."""

    num_keys: int
    head_dim: int
    dtype: str

    def _message(self) -> str:
        return (
            f"attention in {self.dtype} with head size {self.head_dim} over {self.num_keys} keys"
            " gives other bits in a batch than alone on this machine: use exactness: tolerant"
        )


class PagedAttention:
    """Attention of one model over its paged cache.

    With `Exactness.BITWISE`, the output of a query is a function of the query, its position, and
    the keys and values at positions up to its own, to the last bit: not of the other queries and
    sequences in the batch, the chunk it is computed in, the page ids or the number of tokens.
    (All of these must be finite: a NaN in a later token of the same sequence reaches the earlier
    ones of its chunk.) The bits are those of one kind of machine, torch build and thread count.

    Owns a workspace that grows to the largest gather so far and is reused: a copy into fresh memory
    takes up to eight times as long. Not thread-safe.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        page_tokens: int,
        dtype: torch.dtype,
        exactness: Exactness = Exactness.BITWISE,
        device: torch.device | str = "cpu",
    ) -> None:
        self.shape = AttentionShape(
            num_layers=spec.num_layers,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            page_tokens=page_tokens,
            dtype=dtype,
        )
        self.scale = spec.scale
        self.exactness = exactness
        self.device = torch.device(device)
        self._workspace = torch.empty(0, self.shape.page_row, dtype=dtype, device=self.device)
        self._large_tiles_equal: dict[int, bool] = {}

    def plan(self, batch: ForwardBatch) -> AttentionPlan:
        """Compute what all layers of a step share; once per step.

        The first step that reaches a new multiple of 128 keys runs a probe of some milliseconds;
        `warm_up` runs them ahead.

        Raises:
            AttentionNotInvariant: Bitwise exactness can't be had on this machine.
        """
        if self.exactness is Exactness.TOLERANT:
            return plan_tolerant(batch, self.shape)
        return plan_exact(batch, self.shape, large_tiles_equal=self.large_tiles_equal)

    def __call__(
        self, q: torch.Tensor, kv: PagedKV, layer: int, plan: AttentionPlan
    ) -> torch.Tensor:
        """Attend from every query to its sequence's keys at positions up to its own.

        Args:
            q: [T, Hq, D] rotated queries of the cache's dtype, rows as in the planned batch.
            kv: The cache; the step's own keys and values are written already.
            layer: Layer.
            plan: `plan(batch)`.

        Returns:
            [T, Hq, D], contiguous.
        """
        assert q.dtype == kv.dtype == self.shape.dtype
        assert kv.page_tokens == self.shape.page_tokens
        assert q.shape[0] == plan.output_slots.shape[0]
        if not plan.groups:
            return torch.empty_like(q)
        rows = kv.pages.view(-1, self.shape.page_row)[2 * layer :]
        slots = [self._attend(q, rows, group) for group in plan.groups]
        joined = slots[0] if len(slots) == 1 else torch.cat(slots)
        return joined.index_select(0, plan.output_slots)

    def _attend(self, q: torch.Tensor, rows: torch.Tensor, group: TileGroup) -> torch.Tensor:
        """Compute all tiles of one shape: [tiles * Q, Hq, D]."""
        shape, queries = self.shape, group.queries_per_tile
        tiles = to_tiles(q.index_select(0, group.query_rows), queries, shape)
        outputs: list[torch.Tensor] = []
        for gather in group.gathers:
            keys, values = self._gather(rows, gather)
            for call in gather.calls:
                count = call.stop - call.start
                output = scaled_dot_product_attention(
                    tiles[call.start : call.stop],
                    keys[:, :, : call.num_keys].expand(count, -1, -1, -1),
                    values[:, :, : call.num_keys].expand(count, -1, -1, -1),
                    attn_mask=call.mask,
                    scale=self.scale,
                )
                outputs.append(output)
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return from_tiles(joined, queries, shape)

    def _gather(self, rows: torch.Tensor, gather: Gather) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy pages into the workspace: keys and values, each [W, Hkv, P * page_tokens, D]."""
        shape, count = self.shape, gather.rows.shape[0]
        if count > self._workspace.shape[0]:
            self._workspace = torch.empty(
                count, shape.page_row, dtype=shape.dtype, device=self.device
            )
        copy = self._workspace[:count]
        torch.index_select(rows, 0, gather.rows, out=copy)
        if gather.stale is not None:
            tokens = copy.view(-1, shape.num_kv_heads * shape.head_dim)
            tokens.index_fill_(0, gather.stale, 0.0)
        tokens_per_sequence = gather.num_pages * shape.page_tokens
        both = copy.view(
            2, gather.num_sequences, tokens_per_sequence, shape.num_kv_heads, shape.head_dim
        ).transpose(2, 3)
        return both[0], both[1]

    def warm_up(self, context_len_max: int) -> None:
        """Run the probes for contexts up to this many tokens.

        Raises:
            AttentionNotInvariant: Bitwise exactness can't be had on this machine.
        """
        if self.exactness is Exactness.BITWISE:
            for num_keys in range(KEY_BLOCK, padded_keys(context_len_max) + 1, KEY_BLOCK):
                self.large_tiles_equal(num_keys)

    def large_tiles_equal(self, num_keys: int) -> bool:
        """Whether large tiles give the bits of small ones at this many padded keys (measured once).

        Raises:
            AttentionNotInvariant: Not even small tiles give equal bits alone and in a batch.
        """
        known = self._large_tiles_equal.get(num_keys)
        if known is None:
            known = self._probe(num_keys)
            self._large_tiles_equal[num_keys] = known
            if not known:
                _logger.warning("attention over %s keys: large tiles not exact, unused", num_keys)
        return known

    def _probe(self, num_keys: int) -> bool:
        """Compare random queries: in a large tile, in small tiles of one batch, and alone."""
        shape = self.shape
        generator = torch.Generator().manual_seed(num_keys)
        size = (2, 1, num_keys, shape.num_kv_heads, shape.head_dim)
        keys, values = torch.randn(size, generator=generator).to(self.device, shape.dtype)
        large, small = shape.prefill_queries, shape.decode_queries
        q = torch.randn(large, shape.num_heads, shape.head_dim, generator=generator)
        q = q.to(self.device, shape.dtype)
        first = num_keys - KEY_BLOCK + KEY_BLOCK // 2
        positions = torch.arange(first, first + large, device=self.device)

        def attend(rows: torch.Tensor, queries: int) -> torch.Tensor:
            tiles = to_tiles(q[rows], queries, shape)
            mask = causal_mask(positions[rows].view(-1, queries), num_keys, shape)
            output = scaled_dot_product_attention(
                tiles,
                keys.transpose(1, 2).expand(len(tiles), -1, -1, -1),
                values.transpose(1, 2).expand(len(tiles), -1, -1, -1),
                attn_mask=mask,
                scale=self.scale,
            )
            return from_tiles(output, queries, shape)

        every = torch.arange(large, device=self.device)
        # Each query in all slots of a tile of its own, as decoding computes it.
        repeated = attend(every.repeat_interleave(small), small)
        alone = torch.cat([attend(every[i : i + 1].repeat(small), small) for i in range(large)])
        if not torch.equal(repeated, alone):
            raise AttentionNotInvariant(
                num_keys=num_keys, head_dim=shape.head_dim, dtype=str(shape.dtype)
            )
        slots = every * small + every % small
        return torch.equal(attend(every, large), repeated[slots])


def to_tiles(q: torch.Tensor, queries: int, shape: AttentionShape) -> torch.Tensor:
    """Arrange slots as tiles: [tiles * Q, Hq, D] -> [tiles, Hkv, Q * G, D]."""
    kv_heads, group = shape.num_kv_heads, shape.group_size
    tiles = q.view(-1, queries, kv_heads, group, shape.head_dim).permute(0, 2, 1, 3, 4)
    return tiles.reshape(-1, kv_heads, queries * group, shape.head_dim)


def from_tiles(tiles: torch.Tensor, queries: int, shape: AttentionShape) -> torch.Tensor:
    """Undo `to_tiles`: [tiles, Hkv, Q * G, D] -> [tiles * Q, Hq, D]."""
    kv_heads, group = shape.num_kv_heads, shape.group_size
    slots = tiles.reshape(-1, kv_heads, queries, group, shape.head_dim).permute(0, 2, 1, 3, 4)
    return slots.reshape(-1, shape.num_heads, shape.head_dim)
