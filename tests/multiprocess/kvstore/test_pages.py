"""What one tensor-parallel group stored, another reads: real engines, nodes and master."""

from __future__ import annotations

import itertools
import time

import pytest

from configs.schema import TransferBackend
from kvstore.pages import PageLayout
from tests.support.page_ranks import load, store
from tests.support.store_worker import StorePool


def layout_of(kv_heads: int, **more: int | None) -> PageLayout:
    return PageLayout(
        model=f"m{time.time_ns()}", dtype="bfloat16", layers=3, block_tokens=4,
        kv_heads=kv_heads, key_size=40, value_size=40, groups=more.get("groups"),
    )  # fmt: skip


@pytest.mark.parametrize("backend", [TransferBackend.SHARED_MEMORY, TransferBackend.TCP])
def test_any_group_reads_what_any_other_stored(backend: TransferBackend) -> None:
    with StorePool(2, backend=backend, segment_bytes=8 << 20) as pool:
        one, two = pool.workers
        for kv_heads, splits in ((24, (1, 2, 4, 8, 3)), (2, (1, 2, 4, 8))):
            for writers, readers in itertools.product(splits, splits):
                layout, seed = layout_of(kv_heads), time.time_ns()
                half = writers // 2
                # Two processes play a group's ranks, as two hosts would.
                parts = (list(range(half)), list(range(half, writers)))
                for worker, ranks in zip((one, two), parts, strict=True):
                    stored = worker.ask("run", store, layout, ranks, writers, seed)
                    assert all(all(pages) for pages in stored), seed
                for worker in (one, two):
                    found = worker.ask("run", load, layout, list(range(readers)), readers, seed)
                    assert found == [(5, 5, True)] * readers, (seed, writers, readers)
        assert pool.statistics().leases == 0


def test_a_latent_page_is_stored_once_for_all_ranks() -> None:
    layout, seed = (
        PageLayout.latent(model="mla", dtype="bfloat16", layers=3, block_tokens=4, size=72),
        time.time_ns(),
    )
    with StorePool(2, segment_bytes=4 << 20) as pool:
        one, two = pool.workers
        one.ask("run", store, layout, [1, 2, 3], 4, seed)
        assert pool.statistics().blocks == 0, "only rank 0 writes"
        assert one.ask("run", store, layout, [0], 4, seed) == [[True] * 5]
        assert pool.statistics().blocks == 5
        assert two.ask("run", load, layout, [0, 1, 2], 3, seed) == [(5, 5, True)] * 3


def test_a_page_is_there_once_all_heads_of_the_reader_are() -> None:
    layout, seed = layout_of(8), time.time_ns()
    with StorePool(2, segment_bytes=4 << 20) as pool:
        one, two = pool.workers
        one.ask("run", store, layout, [0], 2, seed)
        assert two.ask("run", load, layout, [0, 1, 2, 3], 4, seed) == [
            (5, 5, True), (5, 5, True), (0, 0, True), (0, 0, True),
        ]  # fmt: skip
        assert two.ask("run", load, layout, [0], 1, seed) == [(0, 0, True)]
        one.ask("run", store, layout, [1], 2, seed)
        assert two.ask("run", load, layout, [0], 1, seed) == [(5, 5, True)]
        # What another group stored again is the same block, not a conflict.
        assert two.ask("run", store, layout, [0, 1, 2, 3], 4, seed) == [[True] * 5] * 4
        assert pool.statistics().blocks == 5 * 8


def test_a_damaged_head_ends_the_run_of_those_who_need_it() -> None:
    layout, seed = layout_of(2), time.time_ns()
    with StorePool(2, segment_bytes=4 << 20) as pool:
        one, two = pool.workers
        one.ask("run", store, layout, [0, 1], 2, seed)
        two.ask("flip")
        found = one.ask("run", load, layout, [0], 1, seed)
        assert found[0][0] == 5
        assert found[0][1] < 5
        assert found[0][2]
