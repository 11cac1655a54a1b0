"""What a writer says of the blocks of one put, for routers that follow the pool's events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvstore.errors import InvalidValue
from kvstore.events.chains import TOKEN_TYPE, Link
from kvstore.keys import KEY_BYTES

TOKEN_MAX: Final = (1 << 32) - 1
BLOCK_TOKENS_MAX: Final = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chain:
    """Blocks that follow one another, as `prefix_keys` names them.

    Attributes:
        token_ids: Of all blocks, one after the other; those behind the last full block are ignored.
        block_tokens: Tokens per block.
        parent: Key of the block before the first; None: there is none.
    """

    token_ids: Sequence[int]
    block_tokens: int
    parent: bytes | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.block_tokens <= BLOCK_TOKENS_MAX:
            problem = f"block_tokens must be in [1, {BLOCK_TOKENS_MAX}], not {self.block_tokens}"
            raise InvalidValue(problem=problem)
        if self.parent is not None and len(self.parent) != KEY_BYTES:
            raise InvalidValue(problem=f"a parent is a key of {KEY_BYTES} bytes")

    def links(self, keys: Sequence[bytes]) -> list[Link]:
        """Return what each of these blocks is. Raises as `tokens`."""
        tokens = self.tokens(len(keys))
        return list(map(Link, [self.parent, *keys[:-1]], tokens)) if keys else []

    def tokens(self, num_blocks: int) -> list[bytes]:
        """Return the tokens of each block, 4 bytes each.

        Raises:
            InvalidValue: There are too few, or one is no token.
        """
        try:
            ids = np.asarray(self.token_ids, dtype=np.int64)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidValue(problem=f"token_ids are integers: {error}") from None
        needed = num_blocks * self.block_tokens
        if ids.ndim != 1 or len(ids) < needed:
            raise InvalidValue(problem=f"{num_blocks} blocks have {needed} tokens, got {ids.size}")
        if needed and not 0 <= ids[:needed].min() <= ids[:needed].max() <= TOKEN_MAX:
            raise InvalidValue(problem=f"a token is in [0, {TOKEN_MAX}]")
        data = ids[:needed].astype(TOKEN_TYPE).tobytes()
        size = self.block_tokens * TOKEN_TYPE.itemsize
        return [data[at : at + size] for at in range(0, len(data), size)]
