from __future__ import annotations

import random
import secrets

import numpy as np
import xxhash

from kvstore.node.node_index import NodeIndex
from kvstore.wire.messages import HeldBlocks

SIZE = 4096


def held(*entries):
    columns = list(zip(*entries, strict=True)) if entries else [[]] * 4
    return HeldBlocks(*map(list, columns), pinned=[False] * len(entries))


def test_only_what_lies_there_now_is_told():
    """Random writes over each other against a plain list that is searched from the end."""
    seed = secrets.randbits(32)
    rng = random.Random(seed)
    memory = np.zeros(SIZE, dtype=np.uint8)
    index, story = NodeIndex(SIZE), []
    for _ in range(300):
        length = rng.randint(1, 300)
        offset = rng.randrange(0, SIZE - length)
        data = rng.randbytes(length)
        memory[offset : offset + length] = np.frombuffer(data, dtype=np.uint8)
        entry = (rng.randbytes(16), offset, length, xxhash.xxh3_64_intdigest(data))
        index.record(held(entry))
        story = [e for e in story if e[1] + e[2] <= offset or offset + length <= e[1]] + [entry]
        assert len(index) == len(story), seed
    expected = sorted(story, key=lambda e: e[1])
    told = index.verified(memory)
    columns = (told.keys, told.offsets, told.lengths, told.checksums)
    assert list(zip(*columns, strict=True)) == expected, seed

    damaged = rng.choice(expected)
    memory[damaged[1]] ^= 1
    expected.remove(damaged)
    assert index.verified(memory).keys == [e[0] for e in expected], seed
    memory[damaged[1]] ^= 1
    assert damaged[0] not in index.verified(memory).keys, "once wrong is forgotten"


def test_nonsense_is_ignored():
    index = NodeIndex(SIZE)
    key = secrets.token_bytes(16)
    index.record(held((key, -1, 10, 0), (key, SIZE - 5, 6, 0), (key, 0, 0, 0)))
    assert len(index) == 0
