"""Pages go through a real pool from one rank to another, beside the loop, and come back."""

from __future__ import annotations

import secrets
import threading
import time
from functools import partial

import numpy as np
import pytest

from kvstore import WriteThrough
from moe_runtime.block_fetcher import BlockFetcher, Fetched, FetcherFailed
from moe_runtime.pool_load import pool_counters
from moe_runtime.pooled_blocks import PooledBlocks
from moe_runtime.scheduler import FetchBlocks, StoreBlock
from tests.support.pool_member import WAIT_S, start_pool

PAGE_BYTES = 1024
NUM_PAGES = 32


class Rank:
    def __init__(self, stack, member, *, queue_blocks=64):
        self.member = member
        self.woken = threading.Event()
        writer = WriteThrough(
            member.client, member.region, block_bytes=PAGE_BYTES, queue_blocks=queue_blocks
        )
        self.fetcher = BlockFetcher(
            member.client,
            member.region,
            page_bytes=PAGE_BYTES,
            timeout_s=WAIT_S,
            on_fetched=self.woken.set,
        )
        self.blocks = PooledBlocks(
            writer,
            self.fetcher,
            page_bytes=PAGE_BYTES,
            on_stored=self.woken.set,
            pool_counters=partial(pool_counters, member.client, member.node),
        )
        for part in (writer, self.fetcher):
            stack.callback(part.close)
            part.open()

    @property
    def pages(self):
        return self.member.bytes.numpy().reshape(-1, PAGE_BYTES)

    def until(self, take, count):
        """What `take()` returns, collected each time that the loop would be woken."""
        found, deadline = [], time.monotonic() + WAIT_S
        while len(found) < count:
            assert time.monotonic() < deadline, found
            self.woken.wait(0.1)
            self.woken.clear()
            found += take()
        return found

    def store(self, keys, pages):
        self.blocks.store([StoreBlock(key=k, page=p) for k, p in zip(keys, pages, strict=True)])
        return self.until(self.blocks.stored_pages, len(keys))

    def fetch(self, name, keys, pages):
        self.blocks.fetch(FetchBlocks(request_id=name, keys=tuple(keys), pages=tuple(pages)))


def ranks(stack, count=2, **options):
    _, members = start_pool(stack, members=count, nbytes=NUM_PAGES * PAGE_BYTES)
    return [Rank(stack, member, **options) for member in members]


def fresh_keys(count):
    return [secrets.token_bytes(16) for _ in range(count)]


def test_blocks_of_one_rank_are_found_by_another(stack):
    first, second = ranks(stack)
    keys, pages, places = fresh_keys(5), [30, 2, 7, 0, 11], [4, 31, 9, 1, 20]
    assert first.store(keys, pages) == pages
    before = second.pages.copy()
    second.fetch("all", keys, places)
    assert second.until(second.blocks.fetched, 1) == [Fetched(request_id="all", num_blocks=5)]
    assert (second.pages[places] == first.pages[pages]).all()
    others = np.setdiff1d(np.arange(NUM_PAGES), places)
    assert (second.pages[others] == before[others]).all()
    counters = first.blocks.counters()
    wanted = {
        "pool_blocks_stored": 5.0,
        "pool_blocks_skipped": 0.0,
        "pool_blocks_fetched": 0.0,
        "pool_client_stored_blocks": 5.0,
        "pool_client_failed_blocks": 0.0,
        "pool_scrub_bad_blocks": 0.0,
        "pool_copies_done": 0.0,
    }
    assert {name: counters[name] for name in wanted} == wanted
    assert second.blocks.counters()["pool_blocks_fetched"] == 5.0


def test_only_the_leading_run_counts(stack):
    first, second = ranks(stack)
    keys = fresh_keys(4)
    first.store([keys[0], keys[1], keys[3]], [0, 1, 3])
    second.fetch("gap", keys, [0, 1, 2, 3])
    second.fetch("nothing", keys[2:], [4, 5])
    assert second.until(second.blocks.fetched, 2) == [
        Fetched(request_id="gap", num_blocks=2),
        Fetched(request_id="nothing", num_blocks=0),
    ]


def test_pages_come_back_even_if_the_queue_is_full(stack):
    (rank,) = ranks(stack, 1, queue_blocks=2)
    assert rank.store(fresh_keys(5), [0, 1, 2, 3, 4]) == [0, 1, 2, 3, 4]
    assert rank.blocks.counters()["pool_blocks_skipped"] == 3.0


def test_a_pool_out_of_reach_is_a_miss(stack):
    master, (member,) = start_pool(
        stack, members=1, nbytes=NUM_PAGES * PAGE_BYTES, request_timeout_s=0.3
    )
    rank = Rank(stack, member)
    rank.fetcher._timeout_s = 0.3
    master.close()
    rank.fetch("r", fresh_keys(2), [0, 1])
    assert rank.until(rank.blocks.fetched, 1) == [Fetched(request_id="r", num_blocks=0)]
    assert rank.store(fresh_keys(1), [5]) == [5]


def test_an_error_nobody_foresaw_is_told_to_the_loop(stack, monkeypatch):
    (rank,) = ranks(stack, 1)

    def broken(*args, **options):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(rank.member.client, "lookup_prefix", broken)
    rank.fetch("r", fresh_keys(1), [0])
    assert rank.woken.wait(WAIT_S)
    with pytest.raises(FetcherFailed, match="a bug") as told:
        rank.blocks.fetched()
    assert isinstance(told.value.__cause__, ZeroDivisionError)
