"""What a master may do to a client that posts: what was posted before counts, the rest does not."""

from __future__ import annotations

import os

import pytest

from kvstore import PutOutcome
from kvstore.client.post_box import NEVER
from kvstore.master import posts as posts_module
from kvstore.master.posts import LEADS_NS_MAX
from kvstore.wire import messages as m
from tests.support.posted import NBYTES, fresh, needs_both_ends
from tests.support.posted_master import CAPACITY, Place, PostedMaster

pytestmark = needs_both_ends

STORED, FAILED, EXISTS = PutOutcome.STORED, PutOutcome.FAILED, PutOutcome.EXISTS
CONFLICT, IN_PROGRESS = PutOutcome.CONFLICT, PutOutcome.IN_PROGRESS


@pytest.fixture
def scene(stack):
    return PostedMaster(stack, "n")


def fence(scene):
    scene.ask(m.Fence(["c"], dead=False))


def confirm_dead(scene):
    scene.ask(m.Fence(["c"], dead=True))


def leave(scene):
    scene.ask(m.Leave("n"))


def fence_the_node(scene):
    scene.ask(m.Fence(["n"], dead=False))


def be_silent(scene):
    scene.pass_time(10.0)


def be_slow(scene):
    scene.pass_time(31.0, "n")


def drain_and_leave(scene):
    scene.ask(m.Drain("n"))
    scene.ask(m.Leave("n"))


TAKERS = [fence, confirm_dead, leave, fence_the_node, be_silent, be_slow, drain_and_leave]
OF_THE_CLIENT = {fence, confirm_dead}
KEEP_BLOCKS = {fence, confirm_dead, be_slow}


@pytest.fixture(params=TAKERS, ids=lambda taker: taker.__name__)
def take_place(request):
    """What takes a place of client "c" on node "n"."""
    return request.param


def test_what_was_posted_just_before_counts(scene, take_place):
    c, key = scene.client("c"), fresh()
    place = c.reserve()
    assert c.post(key, place)
    assert scene.figures.stored_blocks == 0, "nobody has looked yet"
    take_place(scene)
    assert scene.figures.stored_blocks == 1
    assert scene.there(key) == [take_place in KEEP_BLOCKS]
    assert scene.figures.open_bytes == 0


def test_what_comes_just_after_is_asked_for_and_refused(scene, take_place):
    c, key = scene.client("c"), fresh()
    place = c.reserve()
    take_place(scene)
    assert not c.post(key, place)
    reply = c.store(key, place)
    if take_place in OF_THE_CLIENT:
        assert reply.reason is m.RefusalReason.FENCED
    else:
        assert reply.outcome is FAILED
    assert scene.there(key) == [False]
    assert scene.figures.stored_blocks == 0
    assert scene.table.owners(key) == []


def test_what_is_under_way_meanwhile_is_asked_for(scene, take_place):
    c, key = scene.client("c"), fresh()
    place = c.reserve()
    assert c.hand.claim(key)
    take_place(scene)
    assert not c.hand.post(key, place.number)
    assert scene.there(key) == [False]
    assert scene.table.owners(key) == []


def test_what_is_posted_while_it_is_handled_is_asked_for(scene, take_place, monkeypatch):
    """Behind the look at what is posted, and before the places are another's."""
    c, key, posted = scene.client("c"), fresh(), []
    place, step = c.reserve(), scene.master.step

    def step_later(request, now):
        gone = scene.figures.open_bytes == 0
        posted.append(c.post(key, place))
        reply = step(request, now)
        assert not (posted[-1] and not gone and scene.figures.open_bytes == 0), "posted in vain"
        return reply

    monkeypatch.setattr(scene.master, "step", step_later)
    if take_place in {be_silent, be_slow}:
        scene.now += 31.0  # all of it at once: nobody was heard, which is pardoned
        monkeypatch.setattr(scene.master, "takes_places", lambda now: True)
        scene.ask(m.Observe())
    else:
        take_place(scene)
    assert not any(posted)
    assert posted


def test_what_is_ordered_just_before_is_not_posted_to_after_it(scene, take_place):
    c, key = scene.client("c"), fresh()
    generation = c.box.generation()
    first = c.order()
    assert first
    take_place(scene)
    for place in c.granted(first, generation) or []:
        assert not c.post(key, place)
    assert scene.there(key) == [False]


class OrdersInBetween:
    """An office that a client posts an order to as soon as places have been taken."""

    def __init__(self, office, order):
        self._office, self._order, self.first = office, order, 0

    def __getattr__(self, name):
        return getattr(self._office, name)

    def revoke(self):
        self._office.revoke()
        if not self.first:
            self.first = self._order()


def test_what_is_ordered_while_places_are_taken_is_not_posted_to(scene, take_place):
    """Between the revocation and the look at what is posted: it is opened, and taken away again."""
    c = scene.client("c")
    generations = []

    def order():
        generations.append(c.box.generation())
        return c.order()

    scene.posts._office = OrdersInBetween(scene.posts._office, order)
    take_place(scene)
    first = scene.posts._office.first
    assert first, "it was posted"
    places = c.granted(first, generations[0]) or []
    before = scene.figures.stored_blocks
    posted = [c.post(fresh(), place) for place in places]
    scene.ask(m.Observe())
    assert scene.figures.stored_blocks - before == sum(posted), "what is posted is stored"
    if take_place in OF_THE_CLIENT:
        assert not any(posted)


def test_the_fenced_order_nothing(scene):
    c, key = scene.client("c"), fresh()
    place = c.reserve()
    fence(scene)
    generation = c.box.generation()
    first = c.order()
    scene.idle()
    scene.ask(m.Observe())
    assert scene.figures.open_bytes == 0, "nothing is opened for it"
    assert not c.granted(first, generation)
    assert not c.post(key, place)
    confirm_dead(scene)
    assert scene.figures.quarantined_bytes == 0


def test_a_node_that_comes_has_all_ask_once(scene):
    """It may bring blocks of any key."""
    c, key, known = scene.client("c"), fresh(), fresh()
    place = c.reserve()
    assert c.hand.claim(known)
    held = m.HeldBlocks([known], [0], [NBYTES], [5], [])
    reply = scene.ask(scene.registration("other", untouched=False, held=held))
    assert isinstance(reply, m.Registered)
    assert not c.hand.post(known, place.number)
    assert not c.post(key, place)
    assert c.store(known, place).outcome is CONFLICT
    assert scene.there(known, key) == [True, False]
    assert c.post(key, c.reserve())
    assert not c.post(known, c.reserve())


def test_other_clients_go_on_with_new_places(scene, take_place):
    scene.ask(scene.registration("other"))
    c, d, keys = scene.client("c"), scene.client("d"), [fresh(), fresh()]
    old = d.reserve()
    c.reserve()
    if take_place in {be_silent, be_slow}:
        scene.pass_time(10.0 if take_place is be_silent else 31.0, "other")
    else:
        take_place(scene)
    assert not d.post(keys[0], old), "all are asked for, once"
    place = d.reserve()
    assert isinstance(place, Place)
    assert d.post(keys[1], place)
    assert scene.there(*keys) == [False, True]


def test_requests_that_take_no_place_disturb_no_post(scene, rng):
    c, keys = scene.client("c"), [fresh() for _ in range(40)]
    generation, stored = c.box.generation(), []
    other = [fresh() for _ in range(3)]
    batch = 1000
    for key in keys:
        place = c.reserve()
        batch += 1
        scene.ask(
            rng.choice(
                [m.Lookup("d", stored[-3:]), m.Exists(keys), m.Heartbeat("n"), m.Observe(),
                 m.Remove([fresh()]), m.SetPin("d", stored[-1:], m.Pin.SOFT),
                 m.Allocate("d", batch, other, [NBYTES] * 3, [1] * 3), m.Finish("d", batch, []),
                 m.Store("d", 9, other[0], NBYTES, 1, 10), m.Reserve("d", key, batch, NBYTES)]
            )
        )  # fmt: skip
        assert c.post(key, place)
        stored.append(key)
    assert c.box.generation() == generation
    assert scene.there(*keys) == [True] * 40


# -- keys that are decided about --------------------------------------------------------------


def allocate(scene, *keys, client="d", batch=500, checksum=7):
    n = len(keys)
    return scene.ask(m.Allocate(client, batch, list(keys), [NBYTES] * n, [checksum] * n))


def test_a_posted_key_is_another_s_no_more(scene):
    c, d, key = scene.client("c"), scene.client("d"), fresh()
    place, other = c.reserve(), d.reserve()
    assert c.post(key, place)
    assert not d.post(key, other)
    assert d.store(key, other, checksum=2).outcome is CONFLICT
    assert list(allocate(scene, key).outcomes) == [CONFLICT]
    assert scene.there(key) == [True]


@pytest.mark.parametrize("way", ["store", "allocate"])
def test_a_claimed_key_is_whoever_s_the_master_says(scene, way):
    c, d, key = scene.client("c"), scene.client("d"), fresh()
    place, other = c.reserve(), d.reserve()
    assert c.hand.claim(key)
    assert not d.post(key, other), "it may be the other's"
    if way == "store":
        assert d.store(key, other).outcome is STORED
    else:
        assert list(allocate(scene, key, fresh()).outcomes) == [PutOutcome.GRANTED] * 2
    assert not c.hand.post(key, place.number), "the master has decided"
    outcome = c.store(key, place, checksum=9).outcome
    assert outcome is (CONFLICT if way == "store" else IN_PROGRESS)
    assert scene.table.owners(key) == [0]
    if way == "allocate":
        scene.ask(m.Finish("d", 500, [0, 1]))
    assert scene.there(key) == [True]
    assert not c.post(key, c.reserve()), "it is a block"


def test_a_key_of_a_put_under_way_is_claimed_by_nobody(scene):
    c, key = scene.client("c"), fresh()
    allocate(scene, key)
    place = c.reserve()
    assert not c.post(key, place)
    assert c.store(key, place).outcome is IN_PROGRESS
    scene.ask(m.Finish("d", 500, [], aborted=[0]))
    assert c.post(key, c.reserve()), "it has ended"
    assert scene.there(key) == [True]


def test_finish_of_another_beside_a_claim(scene):
    """A key that a put lets go of, and one that it makes a block of."""
    c, keys = scene.client("c"), [fresh() for _ in range(3)]
    allocate(scene, *keys[:2])
    place = c.reserve()
    assert c.hand.claim(keys[2])
    scene.ask(m.Finish("d", 500, [0], aborted=[1]))
    assert c.hand.post(keys[2], place.number)
    assert scene.there(*keys) == [True, False, True]


def test_a_removed_key_is_free_for_posts(scene, rng):
    c, key = scene.client("c"), fresh()
    for _ in range(5):
        place = c.reserve()
        assert c.post(key, place)
        if rng.random() < 0.5:
            assert scene.there(key) == [True]
        assert isinstance(scene.ask(m.Remove([key])), m.Done)
        assert scene.there(key) == [False]
        assert scene.table.owners(key) == []
    assert scene.figures.stored_blocks == 5


# -- clients that come and go -----------------------------------------------------------------


def test_who_goes_leaves_its_posts_and_no_word(scene):
    c, key, claimed = scene.client("c"), fresh(), fresh()
    place, other = c.reserve(), c.reserve()
    assert c.post(key, place)
    assert c.hand.claim(claimed)
    scene.posts.end(c.number)
    scene.posts.end(c.number)
    scene.posts.end(77)
    assert scene.figures.stored_blocks == 1
    assert scene.table.owners(claimed) == []
    assert c.box.generation() == NEVER
    assert not c.post(fresh(), other)
    assert scene.there(key, claimed) == [True, False]


def test_the_end_counts_what_was_posted(scene):
    clients, keys = [scene.client(f"c{i}") for i in range(5)], []
    for c in clients:
        keys.append(fresh())
        assert c.post(keys[-1], c.reserve())
    before = set(os.listdir("/proc/self/fd"))
    others = [scene.posts.lend(f"x{i}.client", 100 + i) for i in range(3)]
    assert all(len(lent) == 4 for lent in others)
    scene.posts.close()
    assert scene.figures.stored_blocks == 5
    assert not set(os.listdir("/proc/self/fd")) - before
    assert all(c.box.generation() == NEVER for c in clients)
    assert not clients[0].post(fresh(), Place(1, 1 << 40, None, 0))
    assert all(scene.master.step(m.Exists(keys), scene.now).flags)
    scene.open_again()


@pytest.mark.parametrize("identity", ["c", "c.node", "", "client", "c.client2"])
def test_who_is_no_client_posts_nothing(scene, identity):
    before = len(os.listdir("/proc/self/fd"))
    assert scene.posts.lend(identity, 5) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_numbers_that_cannot_be_had(scene):
    before = len(os.listdir("/proc/self/fd"))
    assert scene.posts.lend("c.client", 0) == []
    assert scene.posts.lend("c.client", 1 << 16) == [], "the count has gone round"
    assert len(scene.posts.lend("c.client", (1 << 16) + 5)) == 4
    assert scene.posts.lend("d.client", 5) == [], "who has it is there still"
    scene.posts.end(5)
    assert len(scene.posts.lend("d.client", 5)) == 4
    scene.posts.end((2 << 16) + 5)
    assert len(os.listdir("/proc/self/fd")) == before


def test_beyond_the_most_clients_nothing_is_lent(scene):
    lent = [scene.posts.lend(f"c{i}.client", 1 + i) for i in range(70)]
    assert [len(one) for one in lent] == [4] * 64 + [0] * 6
    scene.posts.end(3)
    assert len(scene.posts.lend("late.client", 200)) == 4


# -- orders -----------------------------------------------------------------------------------


def test_ordered_places_are_told_and_posted_to(scene, rng):
    c, stored = scene.client("c"), []
    for _ in range(10):
        generation, count = c.box.generation(), rng.randrange(1, 12)
        first = c.order(count)
        assert c.granted(first, generation) is None, "nobody has looked"
        if rng.random() < 0.5:
            scene.idle()
        else:
            scene.ask(m.Observe())
        places = c.granted(first, generation)
        assert [place.number for place in places] == list(range(first, first + count))
        for place in places:
            stored.append(fresh())
            assert c.post(stored[-1], place)
    assert all(scene.there(*stored))
    assert scene.figures.open_bytes == 0


def test_an_order_that_cannot_be_filled_is_told_as_far_as_it_is(scene):
    c = scene.client("c")
    generation = c.box.generation()
    granted = []
    for _ in range(5):
        first = c.order(64)
        scene.idle()
        granted.append(len(c.granted(first, generation)))
    assert 0 < scene.figures.open_bytes <= CAPACITY // 32
    assert granted[-1] == 0


# -- crowds -----------------------------------------------------------------------------------


def test_more_keys_than_words_are_crowded(stack, monkeypatch):
    monkeypatch.setattr(posts_module, "BUCKETS_MIN", 4)
    scene = PostedMaster(stack, "n")
    c, keys = scene.client("c"), []
    while not scene.posts.is_crowded:
        place, key = c.reserve(), fresh()
        if not c.post(key, place):
            assert c.store(key, place).outcome is STORED
        keys.append(key)
        scene.ask(m.Observe())
        assert len(keys) < 30, "28 words"
    assert len(keys) == 17, "of 28 words more than four in seven"
    assert all(scene.there(*keys))
    again = posts_module.Posts(scene.master, scene.wakeup)
    assert again._office.room >= 2 * len(keys)
    assert again._office.used == len(keys)
    assert not again.is_crowded
    again.close()


def test_what_is_said_is_said_once(scene):
    said = []

    class Listens(OrdersInBetween):
        def say(self, *what):
            said.append(what)
            self._office.say(*what)

    scene.posts._office = Listens(scene.posts._office, None)
    scene.posts.say(may_post=True, leads_until_s=float("inf"))
    scene.posts.say(may_post=True, leads_until_s=5.0)
    scene.posts.say(may_post=True, leads_until_s=5.0)
    scene.posts.say(may_post=False, leads_until_s=5.0)
    scene.posts.say(may_post=True, leads_until_s=float("inf"))
    assert said == [(True, 5 * 10**9), (False, 5 * 10**9), (True, LEADS_NS_MAX)]


def test_it_dozes_while_puts_are_posted_and_is_woken_then(scene):
    c = scene.client("c")
    assert scene.posts.doze(0.0) is None, "who posts next wakes it"
    assert c.post(fresh(), c.reserve())
    assert os.eventfd_read(scene.wakeup) == 1
    assert scene.posts.doze(50.0) == posts_module.DOZE_S
    assert scene.figures.stored_blocks == 1
    assert scene.posts.doze(50.1) == posts_module.DOZE_S
    assert scene.posts.doze(50.3) is None
    generation, first = c.box.generation(), c.order(40)
    scene.idle()
    os.eventfd_read(scene.wakeup)
    places = c.granted(first, generation)
    assert c.post(fresh(), places[0])
    assert os.eventfd_read(scene.wakeup) == 1, "it said that it looks no more"
    assert scene.posts.doze(60.0) == posts_module.DOZE_S
