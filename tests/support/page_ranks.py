"""Ranks of tensor-parallel groups in a worker of the pool, which store and read pages of KV."""

from __future__ import annotations

import random

import numpy as np

from kvstore.pages import PagedClient, PagedMemory, PageLayout, PageStrides, share_of
from tests.support.store_worker import Commands
from transfer import allocate

DIMENSIONS = ("page", "layer", "part", "head", "token")
PAGES = 8
TOKENS = 5 * 4 + 3


def tokens_of(seed: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=TOKENS)


def whole_cache(layout: PageLayout, seed: int) -> np.ndarray:
    """[pages, layers, parts, heads, tokens, bytes] of the unsplit model."""
    shape = (
        TOKENS // layout.block_tokens, layout.layers, len(layout.part_bytes), layout.kv_heads,
        layout.block_tokens, layout.part_bytes[0],
    )  # fmt: skip
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


class Rank:
    """One rank, with memory of its own in a random order."""

    def __init__(self, commands: Commands, layout: PageLayout, rank: int, size: int) -> None:
        self.engine = commands.engine
        heads = len(share_of(layout, rank=rank, size=size).heads)
        noise = random.Random(f"{rank} {size}")
        order = noise.sample(DIMENSIONS, k=5)
        sizes = {
            "page": PAGES,
            "layer": layout.layers,
            "part": len(layout.part_bytes),
            "head": heads,
            "token": layout.block_tokens,
        }
        shape = (*(sizes[name] for name in order), layout.part_bytes[0])
        self.memory = allocate(int(np.prod(shape)))
        self.region = self.engine.register(self.memory)
        flat = self.region.array.reshape(shape)
        flat[:] = 0
        self.array = np.moveaxis(flat, [order.index(name) for name in DIMENSIONS], range(5))
        strides = PageStrides.packed(" ".join(order), layout, heads=heads, pages=PAGES)
        memory = PagedMemory(regions=(self.region,), strides=strides)
        self.pages = PagedClient(commands.client, layout, memory, rank=rank, size=size)

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.engine.release(self.region)
        del self.array
        self.memory.close()


def store(
    commands: Commands, layout: PageLayout, ranks: list[int], size: int, seed: int
) -> list[list[bool]]:
    """Let some ranks of a group store all pages."""
    whole, outcomes = whole_cache(layout, seed), []
    for number in ranks:
        with Rank(commands, layout, number, size) as rank:
            places = np.random.default_rng(number).permutation(PAGES)[: len(whole)]
            heads = rank.pages.share.heads
            rank.array[places] = whole[:, :, :, heads.start : heads.stop]
            outcomes.append(rank.pages.put(rank.pages.keys(tokens_of(seed)), places))
    return outcomes


def load(
    commands: Commands, layout: PageLayout, ranks: list[int], size: int, seed: int
) -> list[tuple[int, int, bool]]:
    """Let some ranks read all pages: (pages found, pages good, whether those are equal) of each."""
    whole, found = whole_cache(layout, seed), []
    for number in ranks:
        with Rank(commands, layout, number, size) as rank:
            hit = rank.pages.lookup(rank.pages.keys(tokens_of(seed)))
            places = np.random.default_rng(number + 1).permutation(PAGES)[: hit.num_pages]
            good = rank.pages.read(hit, places)
            rank.pages.release(hit)
            heads = rank.pages.share.heads
            expected = whole[:good, :, :, heads.start : heads.stop]
            equal = np.array_equal(rank.array[places[:good]], expected)
            found.append((hit.num_pages, good, equal))
    return found
