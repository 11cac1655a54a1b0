"""What a page of KV cache is in the pool: one block per head group, the same for every split.

    page      all layers of `block_tokens` tokens, named by a prefix key
    group     consecutive KV heads; the smallest part that one rank may write
    block     one group of one page, head by head:

              head 0                                     head 1
              [ layer 0: K tokens | V tokens ][ layer 1 ... ][ layer 0: K tokens | V ...

A block has one writer and is verified as a whole, so what two ranks write must be two blocks. The
alternative, one block with a part table per page, would save names but would have to be written by
one rank, which would first have to collect the others' heads. With one head per group any split
that divides the heads can write and read; `groups` may be less where larger splits do not occur.

The first group goes by the page's own key, so that whoever follows the pool's events sees the keys
that `prefix_keys` gives; the others' keys are derived from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvstore.errors import InvalidValue
from kvstore.keys import block_namespace, part_key

# What an element of each type takes. Names as of torch.
ELEMENT_BYTES = {
    "bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1, "float8_e5m2": 1, "uint8": 1,
}  # fmt: skip


class Content(StrEnum):
    """What a token leaves behind in a layer."""

    HEADS = "heads"  # a key and a value for each KV head
    LATENT = "latent"  # MLA: one vector, the same on every rank


@dataclass(frozen=True, slots=True, kw_only=True)
class PageLayout:
    """A model's pages. Two layouts that differ in anything never share a key.

    Attributes:
        model: Identity of the weights.
        dtype: Element type, as torch names it.
        layers: Layers that have KV cache.
        block_tokens: Tokens in a page.
        kv_heads: KV heads of the whole model; 1 for `LATENT`.
        key_size: Elements of one head's key, or of the whole latent vector.
        value_size: Elements of one head's value; 0 for `LATENT`.
        content: What a token leaves.
        groups: Head groups; None: one per head.
    """

    model: str
    dtype: str
    layers: int
    block_tokens: int
    kv_heads: int
    key_size: int
    value_size: int
    content: Content = Content.HEADS
    groups: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in ELEMENT_BYTES:
            raise InvalidValue(problem=f"dtype {self.dtype!r} is none of {sorted(ELEMENT_BYTES)}")
        if min(self.layers, self.block_tokens, self.kv_heads, self.key_size) < 1:
            raise InvalidValue(problem="a page has layers, tokens, heads and elements")
        latent = self.content is Content.LATENT
        if latent and (self.kv_heads, self.value_size) != (1, 0):
            raise InvalidValue(problem="a latent vector is one head without values")
        if not latent and self.value_size < 1:
            raise InvalidValue(problem=f"values of {self.value_size} elements")
        if self.kv_heads % self.num_groups:
            raise InvalidValue(problem=f"{self.kv_heads} heads in {self.num_groups} groups")

    @classmethod
    def latent(
        cls, *, model: str, dtype: str, layers: int, block_tokens: int, size: int
    ) -> PageLayout:
        """Return the layout of an MLA model whose latent vectors have `size` elements."""
        return cls(
            model=model, dtype=dtype, layers=layers, block_tokens=block_tokens, kv_heads=1,
            key_size=size, value_size=0, content=Content.LATENT,
        )  # fmt: skip

    @property
    def num_groups(self) -> int:
        """Blocks per page."""
        return self.kv_heads if self.groups is None else max(1, self.groups)

    @property
    def heads_per_group(self) -> int:
        """KV heads in one block."""
        return self.kv_heads // self.num_groups

    @property
    def part_bytes(self) -> tuple[int, ...]:
        """Bytes of a token's key and value of one head; of its latent vector alone."""
        element = ELEMENT_BYTES[self.dtype]
        sizes = (self.key_size, self.value_size) if self.value_size else (self.key_size,)
        return tuple(element * size for size in sizes)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.heads_per_group * self.layers * self.block_tokens * sum(self.part_bytes)

    def namespace(self, salt: str = "") -> bytes:
        """Return the seed for `prefix_keys`: model, type and everything about the layout."""
        layout = (
            f"{self.content}: {self.kv_heads} heads in {self.num_groups} groups, "
            f"{self.layers} layers, {self.block_tokens} tokens, {self.key_size}+{self.value_size}"
        )
        return block_namespace(self.model, self.dtype, layout, salt)

    def keys(self, page_keys: Sequence[bytes], groups: range) -> list[bytes]:
        """Return the keys of some groups of pages, page by page."""
        return [
            part_key(key, group, self.num_groups) if group else key
            for key in page_keys
            for group in groups
        ]
