"""The scrubber of a node, with a master that only listens."""

from __future__ import annotations

import itertools
import random
import secrets
import threading
import time

import pytest

from tests.support.lending_node import LendingNode, damage, three_media
from tests.support.ordering_master import OrderingMaster
from tests.support.waits import eventually

SIZE = 1 << 20
WAIT_S = 30.0


@pytest.fixture
def master(stack):
    return stack.enter_context(OrderingMaster(b"s"))


def test_bad_blocks_of_every_medium_are_found_and_reported(tmp_path, stack, master):
    scrub = {"period_s": 0.2, "bytes_per_s": 1 << 30}
    node = LendingNode(stack, master.address, b"s", three_media(tmp_path, SIZE), scrub=scrub)
    orders = [
        [node.put(number, 50_000 * i, 40_000, chunk_bytes=5000 * (i % 2)) for i in range(8)]
        for number in range(3)
    ]
    figures = lambda: node.node.statistics().scrub  # noqa: E731
    eventually(lambda: figures().passes >= 2)
    assert (figures().bad_blocks, master.bad) == (0, [])
    for number in range(3):
        damage(node.segment(number), 50_000 * number + 20_000)  # a payload
        damage(node.segment(number), 50_000 * 5 + 40_003)  # a part table
    eventually(lambda: figures().dropped_blocks == 6)
    reported = {
        (key, segment, offset)
        for r in master.bad
        for key, segment, offset in zip(r.keys, r.segments, r.offsets, strict=True)
    }
    assert reported == {
        (orders[number][i].key, number, 50_000 * i) for number in range(3) for i in (number, 5)
    }
    assert all(set(r.corrupt) == {True} and set(r.nodes) == {node.name} for r in master.bad)
    assert figures().bad_blocks == 6
    assert [len(node.segment(n).held().keys) for n in range(3)] == [6, 6, 6]
    assert figures().nbytes > 2 * 24 * 40_000
    assert figures().last_pass_s > 0


def test_blocks_that_go_while_they_are_read_cost_no_pause_without_end(stack, master):
    scrub = {"period_s": 0.2, "bytes_per_s": 1 << 30}
    node = LendingNode(stack, master.address, b"s", [{"bytes": SIZE}], scrub=scrub)
    scrubber, segment = node.node._scrubber, node.segment(0)
    verify, emptied = scrubber._verify, threading.Event()

    def verify_and_lose(*args):
        verify(*args)
        segment.index.forget_range(0, SIZE)  # as if all had been written over
        emptied.set()

    scrubber._verify = verify_and_lose
    node.put(0, 0, 40_000)
    assert emptied.wait(WAIT_S)
    passes = node.node.statistics().scrub.passes
    eventually(lambda: node.node.statistics().scrub.passes > passes + 1)


def test_a_pass_is_spread_over_its_period(stack, master):
    scrub = {"period_s": 0.8, "bytes_per_s": 1 << 40}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvstore.node.scrubber.BUFFER_BYTES", 1 << 16)
        patch.setattr("kvstore.node.scrubber.IDLE_S", 0.01)
        node = LendingNode(stack, master.address, b"s", [{"bytes": SIZE}], scrub=scrub)
        scrubber, batches = node.node._scrubber, []
        verify = scrubber._verify

        def timed(segment, batch):
            batches.append((batch[0].offset, time.monotonic()))
            verify(segment, batch)

        for i in range(16):
            node.put(0, i << 16, 1 << 16)
        scrubber._verify = timed
        eventually(lambda: sum(offset == 0 for offset, _ in batches) > 1, "a whole pass")
    last = [at for at, (offset, _) in enumerate(batches) if offset == 0]
    whole = [began_s for _, began_s in batches[last[0] : last[1]]]
    assert len(whole) == 16
    # However long a batch took, the next one did not begin before its time.
    pauses = [after - before for before, after in itertools.pairwise(whole)]
    assert min(pauses) > 0.9 * 0.8 / 16, "not all at once, whatever the bandwidth"


def test_it_reads_no_faster_than_it_may(stack, master):
    scrub = {"period_s": 0.001, "bytes_per_s": 1 << 20}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvstore.node.scrubber.BUFFER_BYTES", 1 << 16)
        node = LendingNode(stack, master.address, b"s", [{"bytes": SIZE}], scrub=scrub)
        for i in range(16):
            node.put(0, i << 16, 1 << 16)
        started = time.monotonic()
        began = node.node.statistics().scrub.nbytes
        time.sleep(0.5)
        read = node.node.statistics().scrub.nbytes - began
        elapsed = time.monotonic() - started
    assert read <= (elapsed + 0.2) * (1 << 20)


def test_a_place_that_is_just_being_given_to_another_block(stack, master):
    """The bytes change before the node is told; the block that is there then is not reported."""
    scrub = {"period_s": 0.05, "bytes_per_s": 1 << 30}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvstore.node.scrubber.AGAIN_S", 5.0)
        node = LendingNode(stack, master.address, b"s", [{"bytes": SIZE}], scrub=scrub)
        node.put(0, 0, 1000)
        seen = threading.Event()
        wrong = node.node._scrubber._wrong

        def watched(segment, batch):
            found = wrong(segment, batch)
            if found:
                seen.set()
            return found

        node.node._scrubber._wrong = watched
        damage(node.segment(0), 500)
        assert seen.wait(WAIT_S)
        order = node.put(0, 0, 2000)
        passes = node.node.statistics().scrub.passes
        eventually(lambda: node.node.statistics().scrub.passes > passes + 2)
    assert node.segment(0).held().keys == [order.key]
    assert master.bad == []


def test_what_cannot_be_reported_now_is_reported_later(stack, master):
    scrub = {"period_s": 0.05, "bytes_per_s": 1 << 30}
    knobs = {"scrub": scrub, "request_timeout_s": 0.5}
    node = LendingNode(stack, master.address, b"s", [{"bytes": SIZE}], **knobs)
    master.deaf = True
    orders = [node.put(0, 2000 * i, 1000) for i in range(3)]
    damage(node.segment(0), 2000)
    eventually(lambda: node.node.statistics().scrub.bad_blocks == 1)
    assert master.bad == []
    master.deaf = False
    master.wait_for(lambda: master.bad)
    assert master.bad[0].keys == [orders[1].key]


def test_it_can_be_left_out(stack, master):
    node = LendingNode(stack, master.address, b"s", [{"bytes": SIZE}], scrub={"enabled": False})
    assert "store-scrubber" not in {thread.name for thread in threading.enumerate()}
    assert node.node.statistics().scrub.passes == 0


def test_random_damage(tmp_path, stack, master):
    """Whatever byte of whatever block changes, that block and no other is found."""
    seed = secrets.randbits(32)
    rng = random.Random(seed)
    scrub = {"period_s": 0.1, "bytes_per_s": 1 << 30}
    node = LendingNode(stack, master.address, b"s", three_media(tmp_path, SIZE), scrub=scrub)
    chosen = set()
    for number in range(3):
        for i in range(20):
            nbytes = rng.randint(1, 40_000)
            order = node.put(number, 50_000 * i, nbytes, chunk_bytes=rng.choice([0, 512, 7777]))
            if rng.random() < 0.3:
                damage(node.segment(number), 50_000 * i + rng.randrange(order.nbytes))
                chosen.add(order.key)
    eventually(lambda: sum(len(r.keys) for r in master.bad) >= len(chosen))
    passes = node.node.statistics().scrub.passes
    eventually(lambda: node.node.statistics().scrub.passes > passes + 1)
    assert {key for r in master.bad for key in r.keys} == chosen, seed
