"""What a node remembers, against plain lists that are searched from the end."""

from __future__ import annotations

import random
import secrets

import numpy as np

from kvstore.node.block_columns import BlockColumns, block_of, slot_of
from kvstore.node.indexed_block import IndexedBlock, blocks_of, columns_of
from kvstore.node.node_index import NodeIndex
from kvstore.wire.messages import HeldBlocks

SIZE = 4096


def random_block(rng: random.Random, size: int = SIZE) -> IndexedBlock:
    length = rng.randint(1, 300)
    return IndexedBlock(
        key=rng.randbytes(16),
        offset=rng.randrange(0, size - 400),
        length=length,
        checksum=rng.getrandbits(64),
        pinned=rng.random() < 0.2,
        chunk_bytes=rng.choice([0, 0, 64, 1000]),
        tenant=rng.choice(["", "ä", "\U0001f600" * 64]),
        group=rng.choice(["", "g"]),
    )


def facts(block: IndexedBlock):
    return (
        block.offset,
        block.length,
        block.key,
        block.checksum,
        block.pinned,
        block.chunk_bytes,
        block.tenant,
        block.group,
    )


def apart(block: IndexedBlock, low: int, high: int) -> bool:
    return block.end <= low or high <= block.offset


def test_only_what_was_written_last_is_left():
    seed = secrets.randbits(32)
    rng = random.Random(seed)
    index, story = NodeIndex(SIZE), []
    for _ in range(600):
        action = rng.random()
        if action < 0.7:
            block = random_block(rng)
            assert index.record(block)
            story = [b for b in story if apart(b, block.offset, block.end)] + [block]
        elif action < 0.9:
            low = rng.randrange(SIZE)
            high = low + rng.randrange(200)
            left = [b for b in story if apart(b, low, high)] if low < high else story
            assert index.forget_range(low, high) == len(story) - len(left), seed
            story = left
        elif story:
            chosen = rng.choice(story)
            assert index.forget(chosen), seed
            assert not index.forget(chosen), seed
            story.remove(chosen)
        expected = sorted(story, key=lambda b: b.offset)
        assert list(index) == expected, seed
        assert index.held_bytes == sum(b.nbytes for b in story), seed
        start = rng.randrange(SIZE)
        assert index.after(start, 3) == [b for b in expected if b.offset >= start][:3], seed


def random_columns(rng: random.Random) -> list[IndexedBlock]:
    """Blocks behind one another, of one size or many; now and then in disorder, or overlapping."""
    size, at = rng.choice([0, 64, 96]), rng.randrange(0, SIZE)
    blocks: list[IndexedBlock] = []
    for _ in range(rng.randrange(1, 30)):
        block = random_block(rng)
        if size:
            block.length, block.chunk_bytes = size, 0
            at = at // size * size if rng.random() < 0.9 else at
        block.offset = at
        at = block.end + rng.choice([0, 0, 0, rng.randrange(100)])
        if rng.random() < 0.02:
            at = rng.randrange(SIZE)
        blocks.append(block)
    if rng.random() < 0.2:
        rng.shuffle(blocks)
    return blocks


def test_many_at_once_are_as_one_after_the_other():
    seed = secrets.randbits(32)
    rng = random.Random(seed)
    index, alone = NodeIndex(SIZE), NodeIndex(SIZE)
    entered = 0
    for turn in range(400):
        blocks = random_columns(rng)
        held = columns_of(blocks)
        if rng.random() < 0.05:
            spoiled = rng.choice(("offsets", "lengths", "checksums"))
            getattr(held, spoiled)[rng.randrange(len(blocks))] = rng.choice([-1, 1 << 63])
        expected = [alone.record(block) for block in blocks_of(held)]
        assert index.record_all(held) == sum(expected), seed
        entered += sum(expected)
        if rng.random() < 0.3:
            low = rng.randrange(SIZE)
            high = low + rng.randrange(300)
            assert index.forget_range(low, high) == alone.forget_range(low, high), seed
        assert index.held_bytes == alone.held_bytes, (seed, turn)
        assert len(index) == len(alone), (seed, turn)
        if rng.random() < 0.3:
            assert list(map(facts, index)) == list(map(facts, alone)), (seed, turn)
    assert entered > 1000, seed
    for mine, theirs in list(zip(index, alone, strict=True)):
        assert index.at(mine.offset) is mine  # once made, it stays the same
        assert index.forget(mine)
        assert alone.forget(theirs)
    assert index.held_bytes == alone.held_bytes == 0


def test_short_columns_are_read_as_far_as_they_go():
    index = NodeIndex(SIZE)
    keys = [secrets.token_bytes(16) for _ in range(3)]
    assert index.record_all(HeldBlocks(keys, [0, 64, 128], [5, 5, 5], [7, 8])) == 2
    assert index.record_all(HeldBlocks(keys, [0, 64, 128], [5, 5, 5], [7, 8, 9], [True])) == 3
    assert [(b.key, b.pinned) for b in index] == [(key, False) for key in keys]
    assert index.record_all(HeldBlocks()) == 0


def test_columns_say_all_and_empty_ones_mean_the_default():
    seed = secrets.randbits(32)
    rng = random.Random(seed)
    blocks = [random_block(rng) for _ in range(20)]
    assert [facts(b) for b in blocks_of(columns_of(blocks))] == [facts(b) for b in blocks], seed
    plain = HeldBlocks([b"k" * 16], [0], [5], [7])
    (block,) = blocks_of(plain)
    assert facts(block) == (0, 5, b"k" * 16, 7, False, 0, "", "")
    assert columns_of([block]) == HeldBlocks([b"k" * 16], [0], [5], [7], [False])
    assert not list(blocks_of(HeldBlocks([b"k" * 16], [0], [5], [])))


def test_nonsense_is_ignored():
    index = NodeIndex(SIZE)
    key = secrets.token_bytes(16)
    for offset, length, chunk in ((-1, 10, 0), (SIZE - 5, 6, 0), (0, 0, 0), (SIZE - 10, 10, 4)):
        block = IndexedBlock(key=key, offset=offset, length=length, checksum=0, chunk_bytes=chunk)
        assert not index.record(block)
    assert not index.record(IndexedBlock(key=key, offset=0, length=1, checksum=-1))
    assert len(index) == 0


def test_slots_of_offsets_differ_and_are_the_same_in_columns():
    rng = np.random.default_rng()
    step, nbytes = int(rng.integers(1, 70_000)), 1 << 40
    offsets = np.unique([*range(0, 3000 * step, step), *rng.integers(0, nbytes - 1, 3000)])
    assert len({slot_of(offset) for offset in offsets.tolist()}) == len(offsets)
    count = len(offsets)
    held = HeldBlocks([secrets.token_bytes(16)] * count, offsets.tolist(), [1] * count, [0] * count)
    columns = BlockColumns.of(held, nbytes)
    assert columns is not None
    assert columns.slots == [slot_of(offset) for offset in columns.offsets]


def test_offsets_outside_of_the_segment_have_no_block():
    index = NodeIndex(1 << 20)
    index.record(block_of((4096, 64, secrets.token_bytes(16), 0, False, 0, "", "", 0)))
    assert index.at(4096) is not None
    for offset in (-4096, 4096 + (1 << 62), 4096 + (1 << 74), 1 << 200):
        assert index.at(offset) is None
