"""The paged KV cache of one rank: memory, layout, and the write of new keys and values.

Layout, page-major:  [num_pages, L, 2, page_tokens, Hkv, D]   (0 = keys, 1 = values)

A page holds its tokens' keys and values of *all* layers, so it is one contiguous piece: the pooled
store and the wire move a block with one offset and one length. The cost is a stride of a whole
page between the pages of one layer, which is free where a row of keys is several cache lines long.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from moe_runtime.models.spec import ModelSpec


class Buffer(Protocol):
    """Memory that somebody else allocates and frees (for instance `transfer.Memory`)."""

    @property
    def tensor(self) -> torch.Tensor:
        """The bytes: uint8 [nbytes]."""
        ...


class PagedKV:
    """Pages of keys and values in a buffer that the caller owns and keeps alive.

    Not thread-safe: one rank loop writes and reads it. Nobody else may write a page that a
    running step reads.

    Attributes:
        pages: [num_pages, L, 2, page_tokens, Hkv, D] view of the buffer.
        page_bytes: Bytes of one page; page `p` is the bytes `[p * page_bytes, (p+1) * page_bytes)`.
    """

    def __init__(
        self,
        memory: Buffer | torch.Tensor,
        num_pages: int,
        spec: ModelSpec,
        page_tokens: int,
        dtype: torch.dtype,
    ) -> None:
        data = memory if isinstance(memory, torch.Tensor) else memory.tensor
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self.dtype = dtype
        self.page_bytes = spec.page_bytes(page_tokens, dtype)
        assert data.dtype == torch.uint8
        assert data.numel() >= num_pages * self.page_bytes
        shape = (num_pages, spec.num_layers, 2, page_tokens, spec.num_kv_heads, spec.head_dim)
        self.pages = data[: num_pages * self.page_bytes].view(dtype).view(shape)
        # One token's keys as one numpy item (a void of Hkv * D elements): an assignment by index is
        # then one copy loop in C, while torch's index_copy_ on CPU costs ten times as much.
        self._row = np.dtype((np.void, spec.kv_size * dtype.itemsize))
        rows = data[: num_pages * self.page_bytes].numpy().view(self._row)
        self._rows = rows.reshape(num_pages, spec.num_layers, 2, page_tokens)

    @classmethod
    def nbytes(cls, num_pages: int, spec: ModelSpec, page_tokens: int, dtype: torch.dtype) -> int:
        """Bytes of memory that a cache of this size needs."""
        return num_pages * spec.page_bytes(page_tokens, dtype)

    def keys(self, layer: int) -> torch.Tensor:
        """Keys of one layer: [num_pages, page_tokens, Hkv, D], a strided view."""
        return self.pages[:, layer, 0]

    def values(self, layer: int) -> torch.Tensor:
        """Values of one layer: [num_pages, page_tokens, Hkv, D], a strided view."""
        return self.pages[:, layer, 1]

    def write(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Store new keys and values.

        Args:
            layer: Layer.
            k: [T, Hkv, D] keys (rotated), of the cache's dtype; any strides.
            v: [T, Hkv, D] values, likewise.
            slot_mapping: [T] int64, `page * page_tokens + offset`; in range, no duplicates.
        """
        page, offset = np.divmod(slot_mapping.numpy(), self.page_tokens)
        self._rows[page, layer, 0, offset] = self._as_rows(k)
        self._rows[page, layer, 1, offset] = self._as_rows(v)

    def _as_rows(self, values: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.void]]:
        assert values.dtype == self.dtype
        flat = values.contiguous().view(torch.uint8).flatten()
        assert flat.numel() == values.shape[0] * self._row.itemsize
        return flat.numpy().view(self._row)
