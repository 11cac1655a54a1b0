from __future__ import annotations

import random
import secrets

import numpy as np
import pytest
import xxhash

from kvstore import KEY_BYTES, InvalidValue, block_namespace, named_key, prefix_keys


def naive_keys(tokens, block_tokens, namespace):
    """Straight from the definition, one bytes object per block."""
    keys, parent = [], namespace
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        block = b"".join(
            t.to_bytes(8, "little", signed=True) for t in tokens[start : start + block_tokens]
        )
        parent = xxhash.xxh3_128_digest(parent + block)
        keys.append(parent)
    return keys


def test_prefix_keys_are_the_chain():
    seed = secrets.randbits(32)
    rng = random.Random(seed)
    for _ in range(50):
        block_tokens = rng.randint(1, 20)
        tokens = [rng.randrange(200_000) for _ in range(rng.randint(0, 100))]
        namespace = rng.randbytes(16)
        expected = naive_keys(tokens, block_tokens, namespace)
        given = rng.choice([tokens, tuple(tokens), np.array(tokens, dtype=np.int32)])
        assert prefix_keys(given, block_tokens=block_tokens, namespace=namespace) == expected, seed
        assert all(len(key) == KEY_BYTES for key in expected)
        if expected:
            rest = tokens[block_tokens:]
            tail = prefix_keys(
                rest, block_tokens=block_tokens, namespace=namespace, parent=expected[0]
            )
            assert tail == expected[1:], seed


def test_a_strided_view_has_the_keys_of_its_copy():
    tokens = np.arange(64)[::2]
    copied = prefix_keys(list(tokens), block_tokens=8, namespace=b"n" * 16)
    assert prefix_keys(tokens, block_tokens=8, namespace=b"n" * 16) == copied


def test_a_change_reaches_all_later_keys_and_no_earlier():
    tokens = list(range(40))
    other = [*tokens[:17], 999, *tokens[18:]]
    a = prefix_keys(tokens, block_tokens=8, namespace=b"x" * 16)
    b = prefix_keys(other, block_tokens=8, namespace=b"x" * 16)
    assert a[:2] == b[:2]
    assert not set(a[2:]) & set(b[2:])


def test_namespaces_separate_every_part():
    parts = ("model", "bfloat16", "layout", "salt")
    names = {block_namespace(*parts)}
    for i in range(4):
        changed = list(parts)
        changed[i] += "!"
        names.add(block_namespace(*changed))
    names.add(block_namespace("modelb", "float16", "layout", "salt"))  # the border moved
    assert len(names) == 6
    assert len({named_key(n, x) for n in names for x in ("expert/1/2", "expert/12", "")}) == 18


def test_block_tokens_must_be_positive():
    with pytest.raises(ValueError, match="block_tokens"):
        prefix_keys([1], block_tokens=0, namespace=b"")


@pytest.mark.parametrize("tokens", [["a"], [1.0], [None], [True], [[1]], "text", 7], ids=repr)
def test_what_is_no_row_of_integers_has_no_keys(tokens):
    with pytest.raises(InvalidValue, match="token_ids must be integers"):
        prefix_keys(tokens, block_tokens=1, namespace=b"n" * 16)


@pytest.mark.parametrize("names", [{"namespace": "n"}, {"namespace": b"n", "parent": "p"}])
def test_names_of_text_are_refused(names):
    with pytest.raises(InvalidValue, match="must be bytes, not str"):
        prefix_keys([1], block_tokens=1, **names)
