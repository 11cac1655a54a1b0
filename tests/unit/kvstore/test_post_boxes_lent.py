"""A client's search for a box: now and then, whatever the master says, and never in a put's way."""

from __future__ import annotations

import os
import secrets
import threading

import pytest

from kvstore import MasterServer, MasterUnavailable
from kvstore.client import post_box, reserved_places
from kvstore.client.post_box import NEVER, PostBoxes
from kvstore.values import place_supply
from tests.support.posted import PostScene, needs_both_ends
from tests.support.short_puts import STORED, value
from tests.support.store_pool import WAIT_S, Pool
from tests.support.waits import eventually
from transfer import ControlError, RpcTimeout
from transfer.local_rpc import LineBroken

pytestmark = needs_both_ends


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(post_box, "AGAIN_S", 0.0)
    monkeypatch.setattr(reserved_places, "IDLE_S", 60.0)
    monkeypatch.setattr(place_supply, "AHEAD_MAX", 8)


@pytest.fixture
def scene(stack):
    return PostScene.leading(stack)


def descriptors():
    return len(os.listdir("/proc/self/fd"))


class Lends:
    """What a master lends, in turn, and how often it was asked."""

    def __init__(self, *answers):
        self.answers, self.asked = list(answers), 0

    def __call__(self, timeout_s):
        assert 0 < timeout_s <= 1.0
        self.asked += 1
        answer = self.answers.pop(0) if self.answers else []
        if isinstance(answer, Exception):
            raise answer
        return answer


def good(scene, number=1):
    lent = (scene.keys, scene.ring(number), scene.wakeup, scene.process)
    return [os.dup(descriptor) for descriptor in lent]


def test_it_is_asked_for_when_places_are(scene):
    lent = good(scene)
    lends, before = Lends(lent), descriptors() - len(lent)
    boxes = PostBoxes(lends)
    assert (boxes.known_generation(), boxes.box, lends.asked) == (NEVER, None, 0)
    generation = boxes.generation()
    assert generation == boxes.known_generation() == boxes.box.generation() != NEVER
    assert boxes.generation() == generation
    assert lends.asked == 1
    assert scene.put(boxes.box, secrets.token_bytes(16), 1, generation)
    boxes.close()
    assert (boxes.known_generation(), boxes.generation(), boxes.box) == (NEVER, NEVER, None)
    boxes.close()
    assert lends.asked == 1
    assert len(scene.take()) == 1, "what was posted counts"
    assert descriptors() == before


@pytest.mark.parametrize(
    "answer",
    [[], RpcTimeout("x", 0.5), ControlError("gone"), LineBroken("gone"), "three", "wrong", "five"],
    ids=str,
)
def test_a_master_that_lends_nothing_of_use(scene, answer):
    before = descriptors()
    if answer == "three":
        answer = good(scene)[:3]
        before += 1  # the fourth
    elif answer == "five":
        answer = [*good(scene), os.dup(scene.wakeup)]
    elif answer == "wrong":
        answer = list(reversed(good(scene)))
    before += scene.office.num_clients  # the test's own end of a ring
    lends = Lends(answer)
    boxes = PostBoxes(lends)
    assert boxes.generation() == NEVER
    assert boxes.box is None
    assert descriptors() == before, "they are closed"
    lends.answers = [good(scene, 9)]
    assert boxes.generation() != NEVER, "it is asked again"
    assert lends.asked == 2


def test_a_box_that_is_over_is_replaced_but_not_at_once(scene, monkeypatch):
    lends = Lends(good(scene), [], good(scene, 2))
    boxes = PostBoxes(lends)
    first, box = boxes.generation(), boxes.box
    scene.office.drop(1)
    scene.take()
    assert boxes.known_generation() == NEVER
    monkeypatch.setattr(post_box, "AGAIN_S", 3600.0)
    assert boxes.generation() == NEVER
    assert (lends.asked, boxes.box) == (2, None)
    assert boxes.generation() == NEVER
    assert lends.asked == 2, "not for a while"
    boxes._next_try_s = 0.0
    assert boxes.generation() not in {NEVER, first}, "its places are others"
    assert boxes.box is not box


def test_who_puts_does_not_wait_for_another_s_search(scene):
    asked, go = threading.Event(), threading.Event()

    def borrow(timeout_s):
        asked.set()
        assert go.wait(WAIT_S)
        return good(scene)

    boxes = PostBoxes(borrow)
    found = []
    thread = threading.Thread(target=lambda: found.append(boxes.generation()))
    thread.start()
    assert asked.wait(WAIT_S)
    assert boxes.generation() == NEVER
    go.set()
    thread.join(WAIT_S)
    assert found == [boxes.known_generation()]
    assert found[0] != NEVER


def test_a_loan_that_comes_after_the_end_is_not_used(scene):
    asked, go = threading.Event(), threading.Event()

    def borrow(timeout_s):
        asked.set()
        assert go.wait(WAIT_S)
        return good(scene)

    boxes = PostBoxes(borrow)
    thread = threading.Thread(target=boxes.generation)
    thread.start()
    assert asked.wait(WAIT_S)
    closer = threading.Thread(target=boxes.close)
    closer.start()
    go.set()
    thread.join(WAIT_S)
    closer.join(WAIT_S)
    assert boxes.box is None
    assert boxes.generation() == NEVER


# -- through a pool ---------------------------------------------------------------------------


def put(store, **options):
    return store.put(secrets.token_bytes(16), value(), **options)


@pytest.mark.parametrize("error", [RpcTimeout("x", 0.5), ControlError("gone")], ids=str)
def test_puts_go_on_where_nothing_is_lent(stack, error):
    pool = Pool(stack)
    lends = pool.store.client.posts._borrow = Lends(*[error] * 3)
    assert all(put(pool.store) is STORED for _ in range(30))
    assert lends.asked >= 3
    pool.store.close()


def test_a_master_that_is_gone_is_no_error_of_another_kind(stack, monkeypatch):
    """The search goes by a line that broke, or waits for a proof that does not come."""
    pool = Pool(stack)
    while pool.store.client.posts.box is None:
        assert put(pool.store) is STORED
    port = int(pool.master.address.rpartition(":")[2])
    pool.master.close()
    for _ in range(12):  # more than places are held
        with pytest.raises(MasterUnavailable):
            put(pool.store, timeout_s=0.05)
    master = stack.enter_context(MasterServer(pool.config, secret=pool.secret, port=port))
    eventually(lambda: master.statistics().nodes == 1, "the node registers again")
    assert all(put(pool.store) is STORED for _ in range(30))
    eventually(lambda: put(pool.store) is STORED and pool.store.client.posts.box is not None)
    pool.store.close()


def test_a_master_that_hangs_is_no_error_of_another_kind(stack, monkeypatch):
    pool = Pool(stack)
    store = pool.connect()
    assert put(store) is STORED
    monkeypatch.setattr(post_box, "BORROW_S", 0.1)
    with pool.master._lock:
        store.client.posts._next_try_s = 0.0
        assert store.client.posts.generation() == NEVER
        store.client._link._link._rpc._line = None  # nor does it prove itself
        store.client.posts._next_try_s = 0.0
        assert store.client.posts.generation() == NEVER
    assert all(put(store) is STORED for _ in range(30))
    assert store.client.posts.box is not None
    store.close()
