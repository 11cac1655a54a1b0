"""The page pool: states of a page, sharing of prefixes, order of eviction."""

from __future__ import annotations

import random

import pytest

from moe_runtime.pages import PagePool


def test_allocate_is_all_or_nothing() -> None:
    pool = PagePool(4)
    assert len(pool.allocate(3) or []) == 3
    assert pool.allocate(2) is None
    assert pool.usage().held == 3
    pool.check_conservation()


def test_published_page_is_shared_and_survives_its_first_holder() -> None:
    pool = PagePool(4)
    pages = pool.allocate(2)
    assert pages is not None
    assert pool.publish(pages[0], b"root")
    assert pool.publish(pages[1], b"leaf")
    assert pool.share_prefix([b"root", b"other"]) == pages[:1]
    pool.release(pages)
    assert pool.usage().cached == 1  # the root has a second holder
    pool.release(pages[:1])
    assert pool.usage().cached == 2
    assert pool.share_prefix([b"root", b"leaf"]) == pages
    pool.check_conservation()


def test_second_page_with_the_same_key_is_not_published() -> None:
    pool = PagePool(2)
    pages = pool.allocate(2)
    assert pages is not None
    assert pool.publish(pages[0], b"key")
    assert not pool.publish(pages[1], b"key")
    pool.release(pages)
    assert (pool.usage().free, pool.usage().cached) == (1, 1)
    pool.check_conservation()


def test_leaves_are_evicted_before_roots() -> None:
    pool = PagePool(3)
    pages = pool.allocate(3)
    assert pages is not None
    for page, key in zip(pages, (b"0", b"1", b"2"), strict=True):
        pool.publish(page, key)
    pool.release(pages)
    assert pool.allocate(1) == [pages[2]]
    assert pool.share_prefix([b"0", b"1", b"2"]) == pages[:2]
    pool.check_conservation()


def test_forget_prefixes_leaves_held_pages_held() -> None:
    pool = PagePool(3)
    pages = pool.allocate(2)
    assert pages is not None
    pool.publish(pages[0], b"a")
    pool.publish(pages[1], b"b")
    pool.release(pages[1:])
    pool.forget_prefixes()
    assert pool.share_prefix([b"a"]) == []
    assert (pool.usage().held, pool.usage().free) == (1, 2)
    pool.release(pages[:1])
    assert pool.usage().free == 3
    pool.check_conservation()


def test_release_without_holder_is_a_programming_error() -> None:
    with pytest.raises(AssertionError, match="without a holder"):
        PagePool(1).release([0])


@pytest.mark.parametrize("seed", random.sample(range(1 << 30), 3))
def test_random_walk_conserves_pages(seed: int) -> None:
    rng = random.Random(seed)
    pool = PagePool(8)
    held: list[int] = []
    for _ in range(2000):
        action = rng.randrange(5)
        if action == 0 and (pages := pool.allocate(rng.randrange(4))):
            held.extend(pages)
        elif action == 1 and held:
            page = held.pop(rng.randrange(len(held)))
            pool.release([page])
        elif action == 2 and held:
            page = rng.choice(held)
            if page not in pool._key_of:
                pool.publish(page, bytes([rng.randrange(32)]))
        elif action == 3:
            held.extend(pool.share_prefix([bytes([rng.randrange(32)])]))
        elif action == 4 and rng.random() < 0.02:
            pool.forget_prefixes()
        pool.check_conservation()
    pool.release(held)
    assert pool.usage().held == 0
