"""Clients that post what no client of ours would: nothing of others changes, nothing is lost."""

from __future__ import annotations

import pytest

from kvstore.wire import messages as m
from tests.support.posted import NBYTES, fresh, needs_both_ends
from tests.support.posted_master import CAPACITY, PostedMaster

pytestmark = needs_both_ends


@pytest.fixture
def scene(stack):
    return PostedMaster(stack, "n")


def allocate(scene, key, batch):
    return scene.ask(m.Allocate("d", batch, [key], [NBYTES], [7]))


def garbage(rng, key, batch):
    """Something that no client of ours posts."""
    return rng.choice(
        [{"length": 0}, {"length": (1 << 64) - 1}, {"length": 1 << 63}, {"length": NBYTES * 9},
         {"kind": 0}, {"kind": 7}, {"kind": 2, "length": 0}, {"kind": 2, "length": (1 << 64) - 1},
         {"batch": batch + 10_000}, {"batch": (1 << 64) - 1}, {"batch": 0}]
    )  # fmt: skip


def test_posts_that_are_no_puts_change_nothing_of_others(scene, rng):
    c, d = scene.client("c"), scene.client("d")
    stored = []
    for _ in range(60):
        place, key = c.reserve(), fresh()
        use = {"key": key, "batch": place.number, **garbage(rng, key, place.number)}
        assert c.hand.claim(key)
        assert c.hand.post(use.pop("key"), use.pop("batch"), **use)
        good = d.reserve()
        stored.append(fresh())
        assert d.post(stored[-1], good)
        scene.ask(m.Observe())
        scene.idle()
        scene.ask(m.Reserve("c", key, abandoned=[place.number]))
        scene.posts._office.stop(c.number)
        scene.posts._office.clear([key], {c.number})
    assert all(scene.there(*stored))
    assert scene.figures.blocks == len(stored)


def test_posts_of_one_place_or_of_one_key_make_one_block(scene, rng):
    c = scene.client("c")
    for way in ("place", "key", "both", "taken"):
        places, keys = [c.reserve() for _ in range(3)], [fresh() for _ in range(3)]
        if way in {"place", "both"}:
            places = places[:1] * 3
        if way in {"key", "both"}:
            keys = keys[:1] * 3
        if way == "taken":
            allocate(scene, keys[0], rng.getrandbits(40))
        before = scene.figures.blocks
        for key, place in zip(keys, places, strict=True):
            c.hand.state = c.hand.ring[0]
            assert c.hand.post(key, place.number)
        scene.ask(m.Observe())
        assert scene.figures.blocks - before == (2 if way == "taken" else 1)
    c.hand.withdraw()


def test_a_place_of_another_size_is_given_back(scene):
    c, key = scene.client("c"), fresh()
    place = c.reserve()
    assert c.hand.claim(key)
    assert c.hand.post(key, place.number, length=NBYTES * 20)
    scene.ask(m.Observe())
    figures = scene.figures
    assert (figures.blocks, figures.open_bytes, figures.free_bytes) == (0, 0, CAPACITY)


@pytest.mark.parametrize("count", [0, 65, 1 << 40, (1 << 64) - 1])
def test_an_order_of_more_places_than_may_be_is_none(scene, count):
    c = scene.client("c")
    assert c.box.order(5, count, NBYTES)
    scene.idle()
    assert scene.figures.open_bytes == 0
    assert c.granted(5, 0) is None
