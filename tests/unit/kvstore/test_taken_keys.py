"""Which keys are taken, in memory that a master shares: claims, announcements, crowds, garbage."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from kvstore import row_loops
from kvstore.key_index import make_key_index
from kvstore.master.posts import BUCKET_BYTES, HEAD_BYTES, LEADS_NS_MAX, RING_BYTES, STORE
from tests.support.posted import CLAIM, NUMBER, PostScene, fresh, needs_both_ends, print_of

pytestmark = needs_both_ends


@pytest.fixture
def scene(stack):
    return PostScene.leading(stack, buckets=64)


def colliding(scene, count):
    """Keys of one bucket, of which no two have one print."""
    found = {}
    wanted = scene.table.bucket(fresh())
    while len(found) < count:
        key = fresh()
        if scene.table.bucket(key) == wanted:
            found[print_of(key)] = key
    return list(found.values())


def indexed(scene, keys):
    """An index of these that is mirrored, and the rows' keys."""
    rows = list(keys) + [b""] * 100
    index = make_key_index(rows)
    assert index.claim(list(keys), list(range(len(keys)))) == []
    index.mirror(scene.office)
    return index, rows


def test_a_key_of_a_block_is_not_posted_until_the_block_is_gone(scene):
    box, keys = scene.box(1), [fresh() for _ in range(30)]
    index, _ = indexed(scene, keys[:20])
    assert [scene.put(box, key, i) for i, key in enumerate(keys)] == [False] * 20 + [True] * 10
    assert [entry[2] for entry in scene.take()] == keys[20:]
    del index[keys[3]]
    index.drop(keys[5:8])
    gone = {keys[3], *keys[5:8]}
    assert [scene.put(box, key, 7) for key in keys[:20]] == [key in gone for key in keys[:20]]
    scene.take()
    index.mirror(None)
    del index[keys[0]]
    assert not scene.put(box, keys[0], 7), "nobody tells the table any more"


def test_the_mirror_of_an_index_is_its_keys(scene, rng):
    """Against a set; the table is far too small for them, so most are only counted."""
    known = [fresh() for _ in range(600)]
    index, rows = indexed(scene, [])
    rows += [b""] * 1000
    model = {}
    for _ in range(3000):
        key = rng.choice(known)
        if key in model:
            row = model.pop(key)
            if rng.random() < 0.5:
                del index[key]
            else:
                index.drop([key])
            rows[row] = b""
        else:
            row = rng.choice([r for r in rng.sample(range(len(rows)), 200) if rows[r] == b""])
            rows[row], model[key] = key, row
            if rng.random() < 0.5:
                index[key] = row
            else:
                assert index.claim([key], [row]) == []
        assert scene.office.used == len(model)
    table = scene.table
    buckets = {}
    for key in known:
        buckets.setdefault(table.bucket(key), []).append(key)
    for keys in buckets.values():
        words = sum(len(table.owners(key)) for key in {print_of(key): key for key in keys}.values())
        there = sum(key in model for key in keys)
        assert words + table.uncounted(keys[0]) == there
    for key in list(model):
        del index[key]
    assert (table.words(), scene.office.used) == ([], 0)
    assert scene.office.room == 64 * 7


def test_a_key_that_another_has_claimed_is_asked_for(scene):
    one, other, key = scene.hand(1), scene.box(2), fresh()
    assert one.claim(key)
    assert scene.table.owners(key) == [1]
    assert not scene.put(other, key, 5)
    assert scene.table.owners(key) == [1], "it took nothing of the first's"
    assert one.post(key, 9)
    assert not scene.put(other, key, 5), "posted, and not taken yet"
    assert scene.table.owners(key) == [1]
    assert scene.take() == [(1, STORE, key, 9)]
    assert scene.table.owners(key) == []
    assert scene.put(other, key, 6), "which no index says"


def test_of_two_that_claim_at_once_none_has_it(scene):
    """Both enter their words, and see each other's."""
    one, other, key = scene.hand(1), scene.hand(2), fresh()
    assert one.claim(key)
    other.at = next(at for at in scene.table.slots(key) if not scene.table[at])
    scene.table[other.at] = print_of(key) | 2 << 8 | 1
    box = scene.box(3)
    assert not scene.put(box, key, 1)
    assert scene.table.owners(key) == [1, 2]
    assert scene.office.announce([key]) == {1, 2}


def test_a_key_that_is_announced_is_not_claimed_until_it_is_retracted(scene):
    box, keys = scene.box(1), [fresh() for _ in range(5)]
    assert scene.office.announce(keys) is None
    assert scene.office.used == 5
    assert [scene.put(box, key, 1) for key in keys] == [False] * 5
    scene.office.retract()
    assert (scene.table.words(), scene.office.used) == ([], 0)
    assert [scene.put(box, key, 1) for key in keys] == [True] * 5


def test_a_key_that_goes_while_a_request_is_handled_is_taken_until_its_end(scene):
    box, keys = scene.box(1), [fresh() for _ in range(20)]
    index, rows = indexed(scene, keys[:10])
    other = make_key_index(rows)
    other.mirror(scene.office)
    rows[10:20] = keys[10:]
    assert other.claim(keys[10:], list(range(10, 20))) == []
    assert scene.office.announce([]) is None
    index.drop(keys[:3])
    other.drop(keys[10:])  # of puts that end
    assert not any(scene.put(box, key, 1) for key in keys)
    assert index.claim(keys[12:], list(range(12, 20))) == [], "and are blocks"
    assert not any(scene.put(box, key, 1) for key in keys)
    scene.office.retract()
    free = {*keys[:3], *keys[10:12]}
    assert scene.office.used == 15
    assert [scene.put(box, key, 1) for key in keys] == [key in free for key in keys]
    scene.take()
    index.drop([*keys[3:10], *keys[12:]])
    assert (scene.table.words(), scene.office.used) == ([], 0)


def test_announced_keys_of_which_some_become_blocks(scene, rng):
    """In the order of the announcement or another; each has a word for each book it is in."""
    for _ in range(20):
        keys = [fresh() for _ in range(rng.choice([1, 5, 300]))]
        index, rows = indexed(scene, [])
        rows[:] = keys
        assert scene.office.announce([*keys, *rng.choices(keys, k=3)]) is None
        stored = [row for row in range(len(keys)) if rng.random() < 0.6]
        if rng.random() < 0.5:
            rng.shuffle(stored)
        assert index.claim([keys[row] for row in stored], stored) == []
        scene.office.retract()
        assert scene.office.used == len(stored)
        for row, key in enumerate(keys):
            assert scene.table.owners(key) or scene.table.uncounted(key) or row not in stored
            assert row in stored or not scene.table.owners(key)
        index.drop([keys[row] for row in stored])
        assert (scene.table.words(), scene.office.used) == ([], 0)


def test_who_has_claimed_is_told_stopped_and_cleared(scene):
    """A client that is between its claim and its post does not get through."""
    key, others = fresh(), [fresh() for _ in range(3)]
    one, box = scene.hand(7), scene.box(8)
    assert one.claim(key)
    assert scene.put(box, others[0], 3)
    rivals = scene.office.announce([*others, key])
    assert rivals == {7, 8}
    for number in rivals:
        scene.office.stop(number)
    assert scene.take() == [(8, STORE, others[0], 3)], "what was posted before counts"
    scene.office.clear([*others, key], rivals)
    assert scene.table.owners(key) == [0]
    assert not one.post(key, 9), "it was stopped"
    scene.office.retract()
    assert scene.take() == []
    assert scene.table.words() == []
    assert one.claim(key), "the next of it is as good as any"
    assert one.post(key, 10)
    assert scene.take() == [(7, STORE, key, 10)]


def test_who_was_cleared_and_wakes_up_late_takes_nobody_s_word(scene):
    one, box, key = scene.hand(1), scene.box(2), fresh()
    assert one.claim(key)
    scene.office.announce([key])
    scene.office.stop(1)
    scene.take()
    scene.office.clear([key], {1})
    scene.office.retract()
    assert scene.put(box, key, 4)
    one.withdraw()
    assert scene.table.owners(key) == [2]
    assert scene.take() == [(2, STORE, key, 4)]


def test_a_bucket_that_overflows_has_all_keys_taken_until_it_does_not(scene, rng):
    keys = colliding(scene, 12)
    box = scene.box(1)
    index, _ = indexed(scene, keys[:9])
    assert scene.table.uncounted(keys[0]) == 2
    assert not any(scene.put(box, key, 1) for key in keys), "none is known to be free"
    assert scene.put(box, next(k for k in iter(fresh, 0) if scene.table.bucket(k)
                               != scene.table.bucket(keys[0])), 1)  # fmt: skip
    scene.take()
    for key in rng.sample(keys[:9], 9):
        del index[key]
        # A key that was only counted may go before one that has a word: then a word is free.
        empty = sum(not scene.table[at] for at in scene.table.slots(key))
        room = 0 if scene.table.uncounted(key) else min(3, empty)
        assert sum(scene.put(box, each, 1) for each in keys[9:]) == room
        scene.take()
    assert room == 3
    assert scene.table.words() == []


def test_a_full_bucket_has_no_room_for_a_claim_and_says_so(scene):
    keys = colliding(scene, 8)
    indexed(scene, keys[:7])
    box = scene.box(1)
    assert scene.table.uncounted(keys[0]) == 0
    assert not scene.put(box, keys[7], 1)
    assert len(scene.table.words()) == 7


def test_claims_fill_a_bucket_and_the_master_s_key_is_counted(scene):
    keys = colliding(scene, 9)
    hands = [scene.hand(number) for number in range(1, 8)]
    assert all(hand.claim(key) for hand, key in zip(hands, keys, strict=False))
    assert scene.office.announce([keys[7]]) is None
    assert scene.table.uncounted(keys[7]) == 1
    assert not scene.put(scene.box(20), keys[8], 1)
    assert scene.office.announce([keys[2]]) == {3}, "its word is found beside the count"
    scene.office.stop(3)
    scene.take()
    scene.office.clear([keys[2]], {3})
    assert not hands[2].post(keys[2], 1)
    scene.office.retract()
    assert scene.table.uncounted(keys[7]) == 0
    for number, (hand, key) in enumerate(zip(hands, keys, strict=False), 1):
        assert number == 3 or hand.post(key, number)
    assert sorted(entry[3] for entry in scene.take()) == [1, 2, 4, 5, 6, 7]
    assert scene.table.words() == []


def test_keys_of_other_sizes_are_nobody_s(scene):
    odd = [b"", b"x", bytes(15), bytes(17)]
    assert scene.office.announce(odd) is None
    assert scene.office.used == 0
    scene.office.clear(odd, {1})
    scene.office.retract()
    assert scene.table.words() == []


def test_words_that_nobody_can_have_entered_harm_nobody(scene, rng):
    box, keys = scene.box(1), [fresh() for _ in range(50)]
    for at in range(HEAD_BYTES, HEAD_BYTES + 64 * BUCKET_BYTES, 8):
        scene.table[at] = rng.choice([0, rng.getrandbits(64), (1 << 64) - 1, 1, print_of(keys[0])])
    before = bytes(scene.table.memory[:HEAD_BYTES])
    for key in keys:
        scene.put(box, key, 1)
        rivals = scene.office.announce([key]) or set()
        for number in rivals:
            scene.office.stop(number)
        scene.take()
        scene.office.clear([key], rivals)
        assert scene.office.announce([key]) is None, "who is cleared is a rival no more"
        scene.office.retract()
    assert scene.table.memory[:HEAD_BYTES] == before
    assert scene.office.used == 0


END = HEAD_BYTES + 64 * BUCKET_BYTES


@pytest.mark.parametrize(
    "at", [0, 8, HEAD_BYTES - 8, HEAD_BYTES + 4, 1 << 40, (1 << 64) - 8, END, END - 4]
)
def test_a_claim_s_place_that_is_out_of_bounds_is_passed_over(stack, at):
    scene = PostScene(stack, buckets=64)
    ring = scene.ring(5)
    words = scene.hand(5).ring
    words[CLAIM], words[CLAIM + 8] = at, 5 << 8 | 1
    before = bytes(scene.table.memory)
    scene.office.drop(5)
    assert scene.take() == []
    assert scene.office.num_clients == 0
    assert bytes(scene.table.memory) == before
    assert os.fstat(ring).st_size == RING_BYTES


def test_another_s_word_is_not_cleared_by_a_false_claim(scene):
    one, key = scene.hand(1), fresh()
    assert one.claim(key)
    false = scene.hand(2).ring
    false[CLAIM], false[CLAIM + 8] = one.at, one.word
    scene.office.drop(2)
    scene.take()
    assert scene.table.owners(key) == [1]
    assert one.post(key, 1)
    assert scene.take() == [(1, STORE, key, 1)]


def test_who_goes_with_a_claim_leaves_no_word(scene):
    hand, key = scene.hand(3), fresh()
    assert hand.claim(key)
    scene.office.drop(3)
    assert scene.table.owners(key) == [3], "it may be copying"
    assert not hand.post(key, 1)
    assert scene.take() == []
    assert scene.table.words() == []


KILLED = """
    import mmap, os, sys
    import numpy as np
    from kvstore import copying, mailbox
    keys, ring, wake, master, clock, key = *map(int, sys.argv[1:5]), sys.argv[5], sys.argv[6]
    box = copying.compiled.PostBox(keys, ring, wake, master, clock.encode(), 1)
    hole = os.memfd_create("hole")
    os.ftruncate(hole, 2 * mmap.PAGESIZE)
    source = np.frombuffer(mmap.mmap(hole, 2 * mmap.PAGESIZE), dtype=np.uint8)
    os.ftruncate(hole, 0)  # who reads there is killed
    note = np.zeros(mailbox.MAILBOX_BYTES + 64, dtype=np.uint8)
    at = note.ctypes.data + -note.ctypes.data % 64
    copying.compiled.put_block(
        np.zeros(4096, np.uint8), 0, source, 0, 4096, 1 << 40, at, mailbox.MAILBOX_BYTES, 1,
        bytes.fromhex(key), 1, 2, b"", b"", box, box.generation(),
    )
"""


def test_a_process_that_is_killed_in_the_middle_of_its_put(scene):
    key, ring = fresh(), scene.ring(9)
    lent = (scene.keys, ring, scene.wakeup, scene.process)
    script = textwrap.dedent(KILLED)
    arguments = [*map(str, lent), scene.clock.decode(), key.hex()]
    ended = subprocess.run(
        [sys.executable, "-c", script, *arguments], pass_fds=lent, check=False, timeout=60,
        capture_output=True, env={**os.environ, "PYTHONFAULTHANDLER": ""},
    )  # fmt: skip
    assert ended.returncode == -signal.SIGBUS, ended.stderr.decode()
    assert scene.table.owners(key) == [9], "it had claimed the key"
    scene.office.drop(9)
    assert scene.take() == []
    assert scene.table.words() == []
    assert scene.put(scene.box(10), key, 1)


@pytest.mark.parametrize("nbytes", [0, 1, HEAD_BYTES, HEAD_BYTES + 1, HEAD_BYTES + 63,
                                    HEAD_BYTES + 3 * BUCKET_BYTES])  # fmt: skip
def test_memory_of_another_size_is_refused(stack, nbytes):
    scene = PostScene(stack, buckets=64)
    keys = scene.memory(nbytes)
    with pytest.raises((ValueError, OSError)):
        row_loops.compiled.PostOffice(keys, b"clock")
    with pytest.raises((ValueError, OSError)):
        scene.open_box(scene.ring(1), keys=keys)
    ring = scene.memory(nbytes)
    with pytest.raises((ValueError, OSError)):
        scene.open_box(ring)
    with pytest.raises((ValueError, OSError)):
        scene.office.add(ring, 2)
    assert scene.office.num_clients == 1


def test_a_clock_s_name_that_is_too_long_is_refused(stack):
    scene = PostScene(stack, buckets=64)
    with pytest.raises(ValueError, match="65 bytes"):
        row_loops.compiled.PostOffice(scene.keys, b"x" * 65)


@pytest.mark.parametrize("number", [0, -1, 1 << 16, 3])
def test_a_number_that_is_none_is_refused(stack, number):
    scene = PostScene(stack, buckets=64)
    scene.ring(3)
    with pytest.raises(ValueError, match="a client of number"):
        scene.office.add(scene.memory(RING_BYTES), number)
    assert scene.office.num_clients == 1


def test_clients_beyond_the_most_are_told_so(stack):
    scene = PostScene(stack, buckets=64)
    for number in range(1, 65):
        scene.ring(number)
    assert not scene.office.add(scene.memory(RING_BYTES), 65)
    scene.office.drop(40)
    scene.take()
    scene.ring(66)
    assert scene.hand(66).ring[NUMBER] == 66
    assert scene.office.num_clients == 64


def test_the_largest_number_and_time_are_told(stack):
    scene = PostScene(stack, buckets=64)
    box = scene.box((1 << 16) - 1)
    scene.office.say(True, LEADS_NS_MAX)
    key = fresh()
    assert scene.put(box, key, 1)
    assert scene.take() == [((1 << 16) - 1, STORE, key, 1)]
