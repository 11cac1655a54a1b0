"""Pages of KV cache: every pair of a writing and a reading split gives the very bytes.

The reference slices numpy arrays. A dictionary stands for the pool: block -> bytes.
"""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import numpy as np
import pytest
import torch

from kvstore.errors import InvalidValue
from kvstore.pages import Content, PagedMemory, PageLayout, PageStrides, share_of
from kvstore.pages.memory import PagePieces
from transfer.memory.region import Region

SPLITS = (1, 2, 3, 4, 8)
DIMENSIONS = ("page", "layer", "part", "head", "token")
PAGES = 5


def layout_of(noise: random.Random, kv_heads: int, **more: Any) -> PageLayout:
    fields: dict[str, Any] = {
        "model": "m",
        "dtype": noise.choice(["bfloat16", "float32", "uint8"]),
        "layers": noise.randint(1, 3),
        "block_tokens": noise.randint(1, 4),
        "kv_heads": kv_heads,
        "key_size": (size := noise.randint(1, 5)),
        "value_size": size,
    }
    return PageLayout(**{**fields, **more})


class Rank:
    """One rank's memory in an order of its own; `array` has all dimensions, and bytes."""

    def __init__(self, noise: random.Random, layout: PageLayout, rank: int, size: int) -> None:
        self.layout = layout
        self.share = share_of(layout, rank=rank, size=size)
        order = list(DIMENSIONS)
        noise.shuffle(order)
        sizes = {
            "page": PAGES,
            "layer": layout.layers,
            "part": len(layout.part_bytes),
            "head": len(self.share.heads),
            "token": layout.block_tokens,
        }
        split = noise.random() < 0.5  # every layer in a region of its own
        if split:
            order.remove("layer")
            order.insert(0, "layer")
        flat = np.zeros((*(sizes[name] for name in order), layout.part_bytes[0]), dtype=np.uint8)
        self.array = np.moveaxis(flat, [order.index(name) for name in DIMENSIONS], range(5))
        tensors = [torch.from_numpy(part) for part in (flat if split else [flat])]
        strides = PageStrides.packed(
            " ".join(order), layout, heads=len(self.share.heads), pages=PAGES
        )
        memory = PagedMemory(regions=tuple(Region(t) for t in tensors), strides=strides)
        self.pieces = PagePieces(layout, self.share, memory)

    def put(self, pool: dict[bytes, bytes], keys: list[bytes], pages: list[int]) -> None:
        names = self.layout.keys(keys, self.share.groups)
        pieces = self.pieces.of(pages)
        blocks = {i: bytearray() for i in range(len(names))}
        for row, array in enumerate(pieces.arrays(range(len(pieces)))):
            block = blocks[int(pieces.blocks[row])]
            assert len(block) == pieces.starts[row], "pieces of a block follow one another"
            block += array.tobytes()
        for i, name in enumerate(names):
            assert len(blocks[i]) == self.layout.block_bytes
            assert name not in pool, "written once"
            pool[name] = bytes(blocks[i])

    def read(self, pool: dict[bytes, bytes], keys: list[bytes], pages: list[int]) -> None:
        names = self.layout.keys(keys, self.share.groups)
        pieces = self.pieces.of(pages)
        for row, array in enumerate(pieces.arrays(range(len(pieces)))):
            start, length = int(pieces.starts[row]), int(pieces.lengths[row])
            block = pool[names[int(pieces.blocks[row])]]
            array[:] = np.frombuffer(block, dtype=np.uint8)[start : start + length]


def splits_for(layout: PageLayout) -> list[int]:
    fitting = []
    for size in SPLITS:
        try:
            share_of(layout, rank=0, size=size)
        except InvalidValue:
            continue
        fitting.append(size)
    return fitting


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 6, 8, 24])
def test_any_split_reads_what_any_other_wrote(kv_heads: int) -> None:
    seed = time.time_ns()
    noise = random.Random(seed)
    layout = layout_of(noise, kv_heads)
    keys = [noise.randbytes(16) for _ in range(3)]
    fitting = splits_for(layout)
    assert {1, kv_heads} & set(fitting) or kv_heads > 8
    for writers, readers in itertools.product(fitting, fitting):
        shape = (
            PAGES, layout.layers, len(layout.part_bytes), kv_heads, layout.block_tokens,
            layout.part_bytes[0],
        )  # fmt: skip
        whole = np.frombuffer(noise.randbytes(int(np.prod(shape))), dtype=np.uint8).reshape(shape)
        pool: dict[bytes, bytes] = {}
        there = noise.sample(range(PAGES), 3)
        for rank in range(writers):
            writer = Rank(noise, layout, rank, writers)
            heads = writer.share.heads
            writer.array[:] = whole[:, :, :, heads.start : heads.stop]
            if writer.share.writes:
                writer.put(pool, keys, there)
        assert len(pool) == len(keys) * layout.num_groups, seed
        here = noise.sample(range(PAGES), 3)
        for rank in range(readers):
            reader = Rank(noise, layout, rank, readers)
            reader.read(pool, keys, here)
            heads = reader.share.heads
            expected = np.zeros_like(reader.array)
            expected[here] = whole[there][:, :, :, heads.start : heads.stop]
            assert np.array_equal(reader.array, expected), (seed, writers, readers)


def test_a_latent_page_is_written_once_and_read_whole() -> None:
    seed = time.time_ns()
    noise = random.Random(seed)
    layout = PageLayout.latent(model="m", dtype="bfloat16", layers=3, block_tokens=4, size=9)
    for size in (*SPLITS, 7):
        ranks = [Rank(noise, layout, rank, size) for rank in range(size)]
        assert [rank.share.writes for rank in ranks] == [True] + [False] * (size - 1)
        content = np.frombuffer(noise.randbytes(ranks[0].array.size), dtype=np.uint8)
        ranks[0].array[:] = content.reshape(ranks[0].array.shape)
        pool: dict[bytes, bytes] = {}
        key = noise.randbytes(16)
        ranks[0].put(pool, [key], [2])
        assert list(pool) == [key], "under the page's own key"
        for rank in ranks[1:]:
            rank.read(pool, [key], [2])
            assert np.array_equal(rank.array[2], ranks[0].array[2]), seed


def test_coarser_groups_serve_the_splits_they_allow() -> None:
    noise = random.Random(time.time_ns())
    layout = layout_of(noise, 8, groups=2)
    assert layout.heads_per_group == 4
    assert splits_for(layout) == [1, 2]
    with pytest.raises(InvalidValue, match="4 groups or more"):
        share_of(layout, rank=0, size=4)
    whole = [Rank(noise, layout, 0, 1)]
    halves = [Rank(noise, layout, rank, 2) for rank in range(2)]
    content = np.frombuffer(noise.randbytes(whole[0].array.size), dtype=np.uint8)
    whole[0].array[:] = content.reshape(whole[0].array.shape)
    pool: dict[bytes, bytes] = {}
    key = noise.randbytes(16)
    whole[0].put(pool, [key], [0])
    for rank, half in enumerate(halves):
        half.read(pool, [key], [0])
        mine = whole[0].array[0, :, :, 4 * rank : 4 * rank + 4]
        assert np.array_equal(half.array[0], mine)


@pytest.mark.parametrize(("heads", "size"), [(4, 3), (8, 3), (6, 4), (3, 8), (2, 3)])
def test_heads_that_do_not_split_are_refused(heads: int, size: int) -> None:
    layout = layout_of(random.Random(1), heads)
    with pytest.raises(InvalidValue, match="do not split"):
        share_of(layout, rank=0, size=size)


def test_a_rank_of_another_group_is_refused() -> None:
    layout = layout_of(random.Random(1), 4)
    for rank, size in ((-1, 2), (2, 2), (0, 0)):
        with pytest.raises(InvalidValue, match="rank"):
            share_of(layout, rank=rank, size=size)


def test_whatever_differs_makes_other_keys() -> None:
    fields: dict[str, Any] = {
        "model": "m", "dtype": "bfloat16", "layers": 2, "block_tokens": 4, "kv_heads": 4,
        "key_size": 8, "value_size": 8,
    }  # fmt: skip
    others: dict[str, Any] = {
        "model": "n", "dtype": "float16", "layers": 3, "block_tokens": 8, "kv_heads": 8,
        "key_size": 4, "value_size": 4, "groups": 2,
    }  # fmt: skip
    spaces = {PageLayout(**fields).namespace(), PageLayout(**fields).namespace("salt")}
    for name, value in others.items():
        spaces.add(PageLayout(**{**fields, name: value}).namespace())
    spaces.add(
        PageLayout.latent(model="m", dtype="bfloat16", layers=2, block_tokens=4, size=8).namespace()
    )
    assert len(spaces) == 3 + len(others)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"dtype": "int3"}, "dtype"),
        ({"layers": 0}, "layers"),
        ({"value_size": 0}, "values of 0"),
        ({"groups": 3}, "in 3 groups"),
        ({"content": Content.LATENT}, "latent"),
    ],
)
def test_layouts_that_make_no_sense(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidValue, match=problem):
        layout_of(random.Random(1), 4, **change)


def test_pieces_are_as_long_as_the_memory_allows() -> None:
    layout = PageLayout(
        model="m", dtype="bfloat16", layers=4, block_tokens=16, kv_heads=8, key_size=64,
        value_size=64,
    )  # fmt: skip
    share = share_of(layout, rank=0, size=1)
    region = Region(torch.zeros(8 * layout.block_bytes, dtype=torch.uint8))

    def count(order: str) -> int:
        strides = PageStrides.packed(order, layout, heads=8, pages=1)
        memory = PagedMemory(regions=(region,), strides=strides)
        return PagePieces(layout, share, memory).num_pieces

    assert count("page head layer part token") == 8  # the pool's own order: one per block
    assert count("page layer part head token") == 8 * 4 * 2
    assert count("page layer part token head") == 8 * 4 * 2 * 16
    with pytest.raises(InvalidValue, match="dimensions"):
        count("page layer head token")
