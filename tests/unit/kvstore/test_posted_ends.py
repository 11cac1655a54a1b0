"""Puts of many blocks whose end is posted: one request each, and exactly what `Finish` would do."""

from __future__ import annotations

import random
import secrets
import struct

import pytest

from kvstore import PutOutcome
from kvstore.errors import Fenced
from kvstore.master.posts import FINISH
from tests.support.posted import POSTS_MAX, SUMS_MAX, PostScene, needs_both_ends
from tests.support.short_puts import Requests
from tests.support.store_pool import Pool
from tests.support.waits import eventually

pytestmark = needs_both_ends

STORED, EXISTS, CONFLICT = PutOutcome.STORED, PutOutcome.EXISTS, PutOutcome.CONFLICT


@pytest.fixture
def pool(stack):
    pool = Pool(stack)
    eventually(lambda: pool.store.client.posts.generation() > 0, "it has a box")
    return pool


def values(count: int) -> dict[bytes, bytes]:
    sizes = random.choices(range(1, 9000), k=count)
    return {secrets.token_bytes(16): secrets.token_bytes(size) for size in sizes}


def put_all(store, contents):
    return set(store.put_batch(list(contents), list(contents.values())))


def test_batches_take_one_request_and_are_found_by_whoever_looks(pool, monkeypatch):
    other = pool.connect()
    requests = Requests(pool.store, monkeypatch)
    for _ in range(30):
        contents = values(random.randint(1, 40))
        assert put_all(pool.store, contents) == {STORED}
        assert [found.value for found in other.get_batch(list(contents))] == [*contents.values()]
        pool.store.remove_batch(list(contents))
    asked = requests.take()
    assert asked.count("Allocate") == 30
    assert asked.count("Finish") <= 3, "of the first, perhaps"
    assert pool.master.statistics().open_puts == 0
    pool.master.check_invariants()


def test_what_is_taken_is_said_of_each_value(pool):
    there, fresh = values(5), values(5)
    assert put_all(pool.store, there) == {STORED}
    for old, new in zip(there, fresh, strict=True):
        other = secrets.token_bytes(len(there[old]) + 1)
        contents = [there[old], fresh[new], other, other]
        outcomes = pool.store.put_batch([old, new, old, new], contents)
        assert outcomes == (EXISTS, STORED, CONFLICT, PutOutcome.IN_PROGRESS)
        assert (pool.store.get(old), pool.store.get(new)) == (there[old], fresh[new])
    pool.master.check_invariants()


def test_a_fence_before_the_end_leaves_nothing_of_it(pool, monkeypatch):
    client = pool.store.client
    box, said = client.posts.box, []

    class Late:
        """The box of a client that is fenced as it is about to post."""

        def __getattr__(self, name):
            return getattr(box, name)

        def finish(self, *args):
            pool.master.fence([client.core.record.name])
            said.append(box.finish(*args))
            return said[-1]

    monkeypatch.setattr(client.posts, "box", Late())
    contents = values(4)
    with pytest.raises(Fenced):
        put_all(pool.store, contents)
    assert said == [False]
    assert not any(pool.connect().exists_batch(list(contents)))


def test_ends_that_are_nobodys_store_nothing(pool, caplog):
    client = pool.store.client
    box = client.posts.box
    for number in (0, 1 << 40, client.core.record.next_batch()):
        # A node that tells something in between raises the generation.
        eventually(
            lambda number=number: box.finish(number, bytes(8 * 3), box.generation()), "it is posted"
        )
        assert pool.master.statistics().blocks == 0
    assert caplog.text.count("not its own") == 3
    assert put_all(pool.store, values(3)) == {STORED}


class TestBoxes:
    """As `test_post_boxes`, of ends."""

    def test_checksums_come_as_they_were_posted_one_batch_at_a_time(self, stack):
        scene = PostScene.leading(stack)
        box = scene.box(1)
        for batch in range(100):
            sums = secrets.token_bytes(8 * random.choice((1, 2, 3, 500, SUMS_MAX)))
            assert box.finish(batch, sums, box.generation())
            assert not box.finish(batch, sums, box.generation()), "the first is not taken yet"
            assert scene.woken() >= 1, "it is taken at once"
            assert scene.take() == [(1, FINISH, sums, batch)]

    def test_whatever_takes_places_back_has_it_asked_for(self, stack):
        scene = PostScene.leading(stack)
        box, sums = scene.box(1), struct.pack("<2Q", 1, 2)
        before = box.generation()
        scene.office.revoke()
        assert not box.finish(1, sums, before)
        assert not box.finish(1, sums, 0)
        assert box.finish(1, sums, box.generation())
        scene.office.stop(1)
        assert scene.take() == [(1, FINISH, sums, 1)], "what was posted before counts"
        for _ in range(POSTS_MAX):
            assert box.order(1, 1, 64)
        assert not box.finish(2, sums, box.generation()), "the ring is full"
        scene.take()
        for wrong in (b"", b"1234567", bytes(8 * SUMS_MAX + 8)):
            assert not box.finish(2, wrong, box.generation())
        scene.office.close()
        assert not box.finish(2, sums, box.generation())
        assert scene.take() == []
