"""What is posted in memory that a client shares with its master: in order, once, or not at all."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import threading
import time
from itertools import chain

import numpy as np
import pytest

from kvstore import copying, mailbox
from kvstore.client.post_box import NEVER
from kvstore.master.posts import LEADS_NS_MAX, ORDER, RING_BYTES, STORE
from tests.support.posted import (
    CLAIM,
    COUNT,
    MASK,
    POSTS_MAX,
    STATE,
    TAKEN,
    PostScene,
    fresh,
    needs_both_ends,
)

GRANTS, GRANT_BYTES_MAX = 8192, 1024 - 64
pytestmark = needs_both_ends


@pytest.fixture
def scene(stack):
    return PostScene.leading(stack)


def test_what_is_posted_is_taken_in_order_and_once(scene, rng):
    boxes = {number: scene.box(number) for number in rng.sample(range(1, 1 << 16), 5)}
    posted, batch = {number: [] for number in boxes}, 0
    for _ in range(40):
        for _ in range(rng.randrange(20)):
            number, box = rng.choice(list(boxes.items()))
            batch += 1
            if rng.random() < 0.2:
                assert box.order(batch, 7, 4096)
                posted[number].append((number, ORDER, bytes(16), batch))
            else:
                key = fresh()
                assert scene.put(box, key, batch)
                posted[number].append((number, STORE, key, batch))
            assert box.waiting() == len(posted[number])
        assert sorted(scene.take()) == sorted(chain.from_iterable(posted.values()))
        assert scene.office.take() is None
        for number, box in boxes.items():
            posted[number].clear()
            assert box.waiting() == 0
    assert scene.table.words() == []


def test_a_post_says_all_that_a_store_would(scene, rng):
    box, key = scene.box(3), fresh()
    source = np.frombuffer(rng.randbytes(5000), dtype=np.uint8)
    note = np.zeros(mailbox.MAILBOX_BYTES + 64, dtype=np.uint8)
    at = note.ctypes.data + -note.ctypes.data % 64
    batch = rng.getrandbits(63)
    target = np.zeros(5000, dtype=np.uint8)
    done = copying.compiled.put_block(
        target, 0, source, 0, 5000, 1 << 40, at, mailbox.MAILBOX_BYTES, 1, key, batch, 1, b"",
        b"", box, box.generation(),
    )  # fmt: skip
    assert done is None
    checksum = copying.compiled.copy_one_summed(target, 0, source, 0, 5000, 1 << 40)
    assert scene.office.take() == [(3, STORE, key, batch, 5000, checksum, 0)]
    assert box.order(5, 6, 7)
    scene.office.release()
    assert scene.office.take() == [(3, ORDER, bytes(16), 5, 7, 0, 6)]


def test_a_ring_that_is_full_is_asked_about_until_it_is_taken(scene):
    box, other = scene.box(1), scene.box(2)
    keys = [fresh() for _ in range(POSTS_MAX)]
    assert all(scene.put(box, key, i) for i, key in enumerate(keys))
    late = fresh()
    assert not scene.put(box, late, 100)
    assert not box.order(101, 1, 4096)
    assert scene.table.owners(late) == [], "nor is its key kept"
    assert scene.put(other, late, 5), "another's has room"
    taken = scene.take()
    assert [entry[2] for entry in taken if entry[0] == 1] == keys
    assert scene.put(box, fresh(), 102)
    assert len(scene.take()) == 1


def test_the_count_of_posts_goes_round(scene, rng):
    number = 4
    box, ring = scene.box(number), scene.ring_words(number)
    ring[STATE] = ring[STATE] & ~COUNT | COUNT - 3
    ring[TAKEN] = COUNT - 3
    for _ in range(5):
        keys = [fresh() for _ in range(rng.randrange(1, 9))]
        generation = box.generation()
        assert all(scene.put(box, key, 1) for key in keys)
        assert box.generation() == generation, "it does not carry"
        assert [entry[2] for entry in scene.take()] == keys


def test_places_of_before_a_revocation_are_asked_for(scene):
    box, other = scene.box(1), scene.box(2)
    old, old_other = box.generation(), other.generation()
    first = fresh()
    assert scene.put(box, first, 1, old)
    scene.office.revoke()
    assert scene.take() == [(1, STORE, first, 1)], "posted before: it counts"
    assert not scene.put(box, fresh(), 2, old)
    assert not scene.put(other, fresh(), 2, old_other)
    assert box.generation() > old
    key = fresh()
    assert scene.put(box, key, 3, box.generation())
    assert scene.take() == [(1, STORE, key, 3)]
    assert scene.table.words() == []


def test_a_stop_fails_only_what_is_under_way(scene):
    box, hand = scene.box(1), scene.hand(2)
    old, key = box.generation(), fresh()
    assert hand.claim(key)
    scene.office.stop(1)
    scene.office.stop(2)
    assert not hand.post(key, 1)
    assert scene.put(box, key, 2, old), "its places are its own still"
    assert scene.take() == [(1, STORE, key, 2)]
    assert scene.table.words() == []
    scene.office.stop(77)


@pytest.mark.parametrize("way", ["close", "drop"])
def test_who_is_closed_posts_nothing_more(scene, way):
    box, hand, key, claimed = scene.box(1), scene.hand(1), fresh(), fresh()
    generation = box.generation()
    assert scene.put(box, key, 1)
    assert hand.claim(claimed)
    if way == "close":
        scene.office.close()
    else:
        scene.office.drop(1)
        scene.office.drop(1)
        scene.office.drop(99)
    assert not hand.post(claimed, 2)
    assert not scene.put(box, fresh(), 3, generation)
    assert not box.order(4, 1, 4096)
    assert box.generation() == NEVER
    assert scene.take() == [(1, STORE, key, 1)]
    assert scene.take() == []
    assert scene.office.num_clients == (1 if way == "close" else 0)
    assert scene.table.words() == []


def test_a_number_is_free_for_another_once_its_client_s_posts_are_taken(scene):
    key = fresh()
    assert scene.put(scene.box(1), key, 1)
    scene.office.drop(1)
    with pytest.raises(ValueError, match="a client of number 1"):
        scene.box(1)
    assert scene.take() == [(1, STORE, key, 1)]
    again = scene.box(1)
    assert scene.put(again, key, 2)
    assert scene.take() == [(1, STORE, key, 2)]


def test_while_not_all_is_known_nothing_is_posted(stack):
    scene = PostScene(stack)
    box = scene.box(1)
    assert not scene.put(box, fresh(), 1), "nobody has said so yet"
    scene.lead()
    generation, hand, key = box.generation(), scene.hand(1), fresh()
    assert hand.claim(key)
    scene.office.say(False, LEADS_NS_MAX)
    assert not hand.post(key, 1), "what is under way is asked for"
    assert not scene.put(box, key, 2)
    assert not box.order(2, 1, 4096)
    assert box.generation() != NEVER
    scene.lead()
    assert scene.put(box, key, 3, generation), "no place was taken from it"
    assert scene.take() == [(1, STORE, key, 3)]


def test_whose_time_is_over_takes_nothing(scene):
    box = scene.box(1)
    for until_ns in (0, 1, time.monotonic_ns(), -5):
        scene.office.say(True, until_ns)
        assert box.generation() == NEVER or not until_ns, (
            "who leads next lends another; 0: not said"
        )
        assert not scene.put(box, fresh(), 1)
        assert not box.order(2, 1, 4096)
        assert scene.take() == []
    scene.office.say(True, time.monotonic_ns() + 10**12)
    assert scene.put(box, fresh(), 1)
    assert len(scene.take()) == 1


def ended_process():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    descriptor = os.pidfd_open(process.pid)
    return process, descriptor


def test_a_master_whose_process_has_exited_is_asked(scene):
    process, descriptor = ended_process()
    box = scene.open_box(scene.ring(1), master=descriptor)
    os.close(descriptor)
    first, last = fresh(), fresh()
    assert scene.put(box, first, 1)
    assert box.order(2, 1, 4096)
    process.communicate(b"\n")
    assert not scene.put(box, last, 3), "it is in memory that nobody reads"
    assert box.generation() == NEVER
    assert not scene.put(box, fresh(), 4, 1 << 40)
    assert not box.order(5, 1, 4096)
    assert [entry[3] for entry in scene.take()] == [1, 2, 3], "the last one may count, too"


def test_an_order_to_a_process_that_has_exited(scene):
    process, descriptor = ended_process()
    box = scene.open_box(scene.ring(1), master=descriptor)
    os.close(descriptor)
    process.communicate(b"\n")
    assert not box.order(2, 1, 4096)
    assert box.generation() == NEVER


def test_places_of_an_earlier_box_are_not_posted_to_a_later_one(scene):
    first = scene.box(1)
    old = first.generation()
    second = scene.box(2)
    assert second.generation() != old
    assert not scene.put(second, fresh(), 1, old)
    assert scene.put(first, fresh(), 1, old)
    assert scene.put(second, fresh(), 1)


def test_a_box_of_another_clock_is_refused(scene):
    ring = scene.ring(1)
    for clock in (b"", b"time:[1]", scene.clock + b"1", scene.clock[:-1], secrets.token_bytes(200)):
        with pytest.raises(ValueError, match="another clock"):
            scene.open_box(ring, clock=clock)
    assert scene.put(scene.open_box(ring), fresh(), 1)


def test_descriptors_that_are_none_are_refused(scene):
    ring = scene.ring(1)
    before = len(os.listdir("/proc/self/fd"))
    for wrong in ({"keys": -1}, {"ring": -1}, {"wake": -1}, {"master": -1}, {"keys": scene.wakeup},
                  {"ring": scene.process}):  # fmt: skip
        with pytest.raises((OSError, ValueError)):
            scene.open_box(ring, **wrong)
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_master_is_woken_unless_it_looks_by_itself(scene):
    box = scene.box(1)
    assert scene.put(box, fresh(), 1)
    assert scene.woken() == 1
    scene.office.look_at(time.monotonic_ns() + 10**12)
    assert scene.put(box, fresh(), 2)
    assert scene.woken() == 0
    assert box.order(3, 1, 4096)
    assert scene.woken() == 1, "somebody waits for places"
    for i in range(POSTS_MAX - 3):
        assert scene.put(box, fresh(), 4 + i)
    assert scene.woken() >= 1, "before the ring is full"
    scene.take()
    scene.office.look_at(0)
    assert scene.put(box, fresh(), 100)
    assert scene.woken() == 1


def test_one_put_at_a_time_is_posted_and_others_are_asked_for(scene):
    """Where the copy lets other threads run."""
    box, nbytes, outcomes = scene.box(1), 8 << 20, []
    lock = threading.Lock()
    boxes = [np.zeros(mailbox.MAILBOX_BYTES + 64, dtype=np.uint8) for _ in range(4)]
    start = threading.Barrier(4)

    def put(i):
        source = np.frombuffer(secrets.token_bytes(nbytes), dtype=np.uint8)
        target = np.zeros(nbytes, dtype=np.uint8)
        at = boxes[i].ctypes.data + -boxes[i].ctypes.data % 64
        start.wait()
        for turn in range(6):
            key = bytes([i, turn]) * 8
            done = copying.compiled.put_block(
                target, 0, source, 0, nbytes, 1 << 40, at, mailbox.MAILBOX_BYTES, 1, key,
                10 * i + turn, 1, b"h", b"t", box, box.generation(),
            )  # fmt: skip
            with lock:
                outcomes.append((key, done is None))

    threads = [threading.Thread(target=put, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    posted = sorted(key for key, is_posted in outcomes if is_posted)
    assert len(outcomes) == 24
    assert posted
    assert sorted(entry[2] for entry in scene.take()) == posted
    assert scene.table.words() == []


def test_a_put_that_held_nothing_ends_no_claim_of_another_thread(scene):
    """Of two puts of one key the first was asked for, as a third had the box: it ends meanwhile."""
    box, ring, key = scene.box(1), scene.ring_words(1), fresh()
    memory = np.zeros(mailbox.MAILBOX_BYTES + 64, dtype=np.uint8)
    at = memory.ctypes.data + -memory.ctypes.data % 64
    nbytes, done = 64 << 20, []
    source, target = np.ones(nbytes, dtype=np.uint8), np.zeros(nbytes, dtype=np.uint8)

    def put():
        done.append(
            copying.compiled.put_block(
                target, 0, source, 0, nbytes, 1 << 40, at, mailbox.MAILBOX_BYTES, 1, key, 7, 1,
                b"h", b"t", box, box.generation(),
            )
        )  # fmt: skip

    for _ in range(100):  # until it is found in the middle of its copy
        thread = threading.Thread(target=put)
        thread.start()
        while not ring[CLAIM + 8] and thread.is_alive():
            time.sleep(0)
        box.let_go(key)
        was_writing = thread.is_alive() and bool(ring[CLAIM + 8])
        if was_writing:
            assert scene.table.owners(key) == [1], "it is the other's still"
            assert not scene.put(box, fresh(), 8), "who has the box still"
        thread.join()
        assert done.pop() is None
        assert [entry[2] for entry in scene.take()] == [key]
        if was_writing:
            return
    pytest.fail("it was never found there")


@pytest.mark.parametrize("posted", [True, False])
def test_a_held_key_is_nobody_s_until_it_is_let_go(scene, posted):
    box, other, key = scene.box(1), scene.box(2), fresh()
    assert box.hold(key)
    assert not box.hold(key), "another thread's put of it"
    assert box.hold(fresh()), "of another key nothing is known"
    assert scene.table.owners(key) == [1]
    assert not scene.put(other, key, 1)
    if posted:
        box.let_go(fresh())
        assert scene.table.owners(key) == [1]
    box.let_go(key)
    box.let_go(key)
    assert scene.table.words() == []
    assert scene.put(other, key, 2)
    assert not box.hold(key)
    assert len(scene.take()) == 1
    assert scene.table.words() == []


def test_a_key_that_was_held_is_decided_about_by_the_master(scene):
    box, key = scene.box(1), fresh()
    assert box.hold(key)
    assert scene.office.announce([key]) == {1}, "it may be about this very put"
    scene.office.stop(1)
    scene.take()
    scene.office.clear([key], {1})
    box.let_go(key)
    assert scene.table.owners(key) == [0]
    scene.office.retract()
    assert scene.table.words() == []


# -- grants -----------------------------------------------------------------------------------


def test_a_grant_is_read_by_its_first_number_and_its_size(scene, rng):
    box, other = scene.box(1), scene.box(2)
    assert box.granted(0, 4096) is None
    for _ in range(50):
        first, payload = (
            rng.getrandbits(63),
            rng.randbytes(rng.choice([0, 1, 100, GRANT_BYTES_MAX])),
        )
        length = rng.choice([1, 300, 4096, 1 << 20, rng.getrandbits(63)])
        assert scene.office.grant(1, first, length, payload)
        assert box.granted(first, length) == payload
        assert box.granted(first + 1, length) is None
        assert other.granted(first, length) is None
    too_long = bytes(GRANT_BYTES_MAX + 1)
    assert not scene.office.grant(1, 5, length, too_long), "it is asked for"
    assert not scene.office.grant(9, 5, length, b"x")
    assert box.granted(first, length) == payload, "nothing was overwritten"


def test_grants_of_several_sizes_lie_beside_one_another(scene):
    box = scene.box(1)
    sizes = [64 * i for i in range(1, 65)]
    for first, length in enumerate(sizes):
        assert scene.office.grant(1, first, length, b"%d" % length)
    found = [box.granted(first, length) for first, length in enumerate(sizes)]
    assert all(
        payload in {None, b"%d" % length} for payload, length in zip(found, sizes, strict=True)
    )
    assert sum(payload is not None for payload in found) == 8
    assert box.granted(63, sizes[-1] - 63) == found[-1], "the same space"


def test_a_grant_that_is_being_written_is_not_read(scene):
    box, ring = scene.box(1), scene.ring_words(1)
    before = bytes(ring.memory)
    assert scene.office.grant(1, 7, 4096, b"places")
    at = next(i for i in range(GRANTS, RING_BYTES, 8) if ring.memory[i] != before[i])
    assert (ring[at], ring[at + 8], ring[at + 16]) == (2, 7, 6)
    ring[at] += 1
    assert box.granted(7, 4096) is None
    assert scene.office.grant(1, 8, 4096, b"others")
    assert box.granted(8, 4096) == b"others"
    for nbytes in (GRANT_BYTES_MAX + 1, MASK):
        ring[at + 16] = nbytes
        assert box.granted(8, 4096) is None, "longer than there is room"


@pytest.mark.parametrize("wrong", [(), (1,), (1, -1), (-1, 1), (1, 1 << 64), ("a", 1)])
def test_arguments_that_name_no_grant_are_refused(scene, wrong):
    box = scene.box(1)
    with pytest.raises((TypeError, OverflowError)):
        box.granted(*wrong)
    with pytest.raises((TypeError, OverflowError)):
        scene.office.grant(1, *wrong, b"")
