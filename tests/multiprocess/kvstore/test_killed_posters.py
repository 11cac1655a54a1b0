"""Clients that are killed or stopped while they post: what they were told is stored is stored."""

from __future__ import annotations

import secrets
import signal
import time

import pytest

from kvstore import PutOutcome
from tests.support.posted import Table, needs_both_ends
from tests.support.posting_process import BATCH, SIZE, PostingProcess, content_of, name_of
from tests.support.store_pool import Pool
from tests.support.waits import eventually

pytestmark = needs_both_ends

STORED, EXISTS = PutOutcome.STORED, PutOutcome.EXISTS


@pytest.fixture
def pool(stack):
    return Pool(stack, segment_bytes=256 << 20)


def start(pool, directory, **how):
    return PostingProcess(directory, pool.addresses[0], pool.secret, pool.config, **how)


def posts_of(pool):
    posts = pool.master._posts
    assert posts is not None
    return posts


def check(pool, process):
    """All that it has put is there; of what it was at, a whole value or nothing. Removes them."""
    assert pool.master.statistics().evicted_blocks == 0, "the test has room for all"
    put, others, posted = process.counted()
    assert others == 0
    assert posted > 0
    names = [name_of(process.seed, number) for number in range(put + BATCH)]
    assert all(pool.store.exists_batch(names[:put]))
    for number in range(max(0, put - 200), put):
        assert pool.store.get(names[number]) == content_of(process.seed, number), number
    last, content = name_of(process.seed, put), content_of(process.seed, put)
    # Its node frees the places of a batch that it had not ended.
    eventually(lambda: pool.store.put(last, content) in {STORED, EXISTS})
    assert pool.store.get(last) == content
    assert pool.store.remove_batch(names) in {put + 1, put + BATCH}, "a batch is there, or is not"


def test_clients_that_are_killed_leave_what_they_put_and_nothing_else(pool, tmp_path, rng):
    for _ in range(3):
        with (
            start(pool, tmp_path, batches=True) as one,
            start(pool, tmp_path, batches=True) as other,
        ):
            eventually(lambda: one.counted()[2] > 20 and other.counted()[2] > 20, "both post")
            time.sleep(rng.random() * 0.05)
            one.kill()
            time.sleep(rng.random() * 0.02)
            other.kill()
            check(pool, one)
            check(pool, other)
    posts = posts_of(pool)
    eventually(lambda: posts._office.num_clients <= 1, "they are forgotten")
    figures = pool.master.statistics()
    pool.master.check_invariants()
    table = Table(posts._keys)
    assert len(table.words()) == figures.blocks == 0, "no word of a put that was under way"
    table.memory.close()


def test_a_client_that_is_stopped_holds_nobody_up(pool, tmp_path, rng):
    """Wherever it stops; when it goes on it finds out, and goes on putting."""
    with start(pool, tmp_path) as process:
        eventually(lambda: process.counted()[2] > 20, "it posts")
        for _ in range(15):
            time.sleep(rng.random() * 0.02)
            process.send(signal.SIGSTOP)
            try:
                put = process.counted()[0]
                for number in range(put, put + 3):  # what it is at, and what it comes to
                    key, content = name_of(process.seed, number), content_of(process.seed, number)
                    assert pool.store.put(key, content) in {STORED, EXISTS}
                    assert pool.store.get(key) == content
                key = secrets.token_bytes(16)
                assert pool.store.put(key, secrets.token_bytes(SIZE)) is STORED
            finally:
                process.send(signal.SIGCONT)
        before = process.counted()[0]
        eventually(lambda: process.counted()[0] > before + 100, "it goes on")
        process.kill()
        put, others, posted = process.counted()
        assert 0 < others <= 3 * 15, "it was told that these are another's, or its own"
        assert posted > 0
        for number in range(max(0, put - 500), put):
            assert pool.store.get(name_of(process.seed, number)) == content_of(process.seed, number)
    pool.master.check_invariants()


def test_a_client_that_is_fenced_while_it_posts(pool, tmp_path):
    """From the fence on nothing of it is stored; what it was told is stored before is there."""
    with start(pool, tmp_path) as process:
        eventually(lambda: process.counted()[2] > 50, "it posts")
        names = set(posts_of(pool)._clients.values()) - {pool.store.client.core.record.name}
        (name,) = names
        pool.master.fence([name])
        blocks = pool.master.statistics().stored_blocks
        eventually(lambda: not process._process.is_alive(), "it hears of it, and ends")
        assert pool.master.statistics().stored_blocks == blocks
        assert process.counted()[0] in {blocks, blocks - 1}
        put = process.counted()[0]
        for number in range(max(0, put - 500), put):
            assert pool.store.get(name_of(process.seed, number)) == content_of(process.seed, number)
    pool.master.confirm_dead([name])
    figures = pool.master.statistics()
    assert (figures.open_bytes, figures.quarantined_bytes) == (0, 0)
    pool.master.check_invariants()
