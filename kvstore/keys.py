"""Names of blocks: 16 bytes that say what the bytes are, never where they are.

A prefix key is a hash chain over full blocks of token ids, seeded by the namespace:

    key[0] = H(namespace | tokens[0:B])      key[i] = H(key[i-1] | tokens[iB:(i+1)B])

so equal keys mean equal tokens *and* equal everything before them, whoever computed them. Tokens
enter as little-endian int64; the tail that does not fill a block has no key. H is xxh3_128: fast,
and with 128 bits free of accidents, but not made to resist somebody who constructs collisions.
Who must be kept apart gets a secret `salt`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import xxhash

from kvstore.errors import InvalidValue

KEY_BYTES: Final = 16


def block_namespace(model: str, dtype: str, layout: str, salt: str = "") -> bytes:
    """Return the 16-byte seed of all keys of one kind of block.

    Args:
        model: Identity of the weights; KV of other weights must never match.
        dtype: Element type of the stored bytes.
        layout: Shape and order of a block's bytes, block size included.
        salt: Separates users that must not see each other's blocks.
    """
    return _digest("kv", model, dtype, layout, salt)


def named_key(namespace: bytes, name: str) -> bytes:
    """Return the key of a blob that has a name instead of tokens, like an expert's weights."""
    return _digest("name", namespace.hex(), name)


def part_key(key: bytes, part: int, num_parts: int) -> bytes:
    """Return the key of one of the parts into which the block named `key` is divided."""
    return _digest("part", key.hex(), str(part), str(num_parts))


def prefix_keys(
    token_ids: Sequence[int], *, block_tokens: int, namespace: bytes, parent: bytes | None = None
) -> list[bytes]:
    """Return the chained keys of the full blocks of a token sequence, in order.

    Args:
        token_ids: The sequence; its last `len % block_tokens` tokens are ignored.
        block_tokens: Tokens per block, at least 1.
        namespace: From `block_namespace`.
        parent: Key of the block before `token_ids[0]`, to continue a chain.

    Raises:
        InvalidValue: A token that is no integer, no tokens per block, or a name that is no bytes.
    """
    if block_tokens < 1:
        raise InvalidValue(problem=f"block_tokens must be at least 1, not {block_tokens}")
    given = np.asarray(token_ids)
    if given.ndim != 1 or (len(given) and given.dtype.kind not in "iu"):
        problem = f"token_ids must be integers in one row, not {given.dtype} of shape {given.shape}"
        raise InvalidValue(problem=problem)
    tokens = np.ascontiguousarray(given, dtype="<i8")
    num_blocks = len(tokens) // block_tokens
    if num_blocks == 0:
        return []
    blocks = tokens[: num_blocks * block_tokens].data.cast("B")
    block_bytes = block_tokens * tokens.itemsize
    keys = []
    previous = _check_bytes(namespace if parent is None else parent)
    for start in range(0, num_blocks * block_bytes, block_bytes):
        state = xxhash.xxh3_128(previous)
        state.update(blocks[start : start + block_bytes])
        previous = state.digest()
        keys.append(previous)
    return keys


def _check_bytes(name: object) -> bytes:
    if not isinstance(name, bytes):
        raise InvalidValue(problem=f"namespace and parent must be bytes, not {type(name).__name__}")
    return name


def _digest(*parts: str) -> bytes:
    # Lengths go in too, or ("ab", "c") and ("a", "bc") would be one name.
    framed: list[bytes] = []
    for part in parts:
        encoded = part.encode()
        framed += (len(encoded).to_bytes(8, "little"), encoded)
    return xxhash.xxh3_128_digest(b"".join(framed))
