"""Garbage in the memory that a client shares with its master: nothing crashes or spoils others."""

from __future__ import annotations

import struct

import pytest

from kvstore.master.posts import RING_BYTES, STORE
from tests.support.posted import (
    CLOSED,
    COUNT,
    MASK,
    NUMBER,
    POST,
    POSTS,
    POSTS_MAX,
    STATE,
    TAKEN,
    PostScene,
    fresh,
    needs_both_ends,
)

pytestmark = needs_both_ends


@pytest.fixture
def scene(stack):
    return PostScene.leading(stack)


@pytest.mark.parametrize(
    ("taken", "state"),
    [(0, POSTS_MAX + 1), (5, 4), (MASK, 0), (0, COUNT), (MASK, MASK), (1 << 40, 3), (COUNT, 7)],
)
def test_counts_that_nobody_can_have_reached(scene, taken, state):
    box, ring = scene.box(1), scene.ring_words(1)
    ring[TAKEN], ring[STATE] = taken, state
    posted = scene.take()
    assert len(posted) <= POSTS_MAX
    assert scene.office.take() is None, "once"
    assert scene.put(box, fresh(), 1) is not bool(ring[STATE] & CLOSED)
    assert len(scene.take()) == (0 if ring[STATE] & CLOSED else 1)
    assert box.waiting() == 0


def test_a_ring_full_of_noise(scene, rng):
    """Whatever stands there, what comes out are numbers and keys, of this client only."""
    box, other = scene.box(1), scene.box(2)
    ring = scene.ring_words(1)
    for _ in range(200):
        if rng.random() < 0.5:
            ring.memory[:] = rng.randbytes(RING_BYTES)
        else:
            at = rng.randrange(RING_BYTES // 8) * 8
            ring[at] = rng.choice([0, 1, MASK, rng.getrandbits(64), 1 << rng.randrange(64)])
        if rng.random() < 0.5:
            ring[STATE] = (ring[TAKEN] + rng.randrange(70)) & COUNT
        before = scene.table.words()
        scene.put(box, fresh(), 1)
        box.order(2, 1, 4096)
        box.granted(rng.getrandbits(63), rng.getrandbits(63))
        box.generation()
        box.waiting()
        key = fresh()
        assert scene.put(other, key, 9), "another client is not concerned"
        posted = scene.office.take() or []
        scene.office.release()
        assert len(posted) <= POSTS_MAX + 1
        assert [entry[:4] for entry in posted if entry[0] == 2] == [(2, STORE, key, 9)]
        for number, kind, name, *numbers in posted:
            assert number in {1, 2}
            assert len(name) == 16
            assert all(0 <= value <= MASK for value in (kind, *numbers))
        scene.office.stop(1)
        scene.office.revoke()
        assert len(scene.table.words()) <= len(before) + 1
    ring[NUMBER] = 1
    scene.office.drop(1)
    scene.take()
    assert scene.office.num_clients == 1


def test_kinds_that_are_unknown_come_as_they_are(scene, rng):
    hand, key = scene.hand(1), fresh()
    for kind in (0, 4, MASK, rng.getrandbits(64)):
        assert hand.claim(key)
        assert hand.post(key, 5, kind=kind)
        assert scene.take() == [(1, kind, key, 5)]
        assert scene.table.owners(key) == [1], "only what is stored is taken back"
        scene.office.stop(1)
        scene.office.clear([key], {1})


def test_a_post_has_the_shape_that_these_tests_write(scene):
    box, ring, key = scene.box(1), scene.ring_words(1), fresh()
    assert scene.put(box, key, 77)
    found = POST.unpack_from(ring.memory, POSTS)
    assert (found[:3], found[3]) == ((STORE, key, 77), 300)
    assert struct.unpack_from("<Q", ring.memory, NUMBER) == (1,)


@pytest.mark.parametrize("wrong", [(), (1,), (1, 2), (-1, 1, 1), (1, 1 << 64, 1), ("a", 1, 1)])
def test_arguments_that_are_no_order_are_refused(scene, wrong):
    box = scene.box(1)
    with pytest.raises((TypeError, OverflowError, ValueError)):
        box.order(*wrong)
    assert scene.take() == []
