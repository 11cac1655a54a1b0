"""Writers to a disk that are killed or stopped: what the node proves of them, and when."""

from __future__ import annotations

import secrets
import signal
import time

import pytest

from configs.schema import TransferBackend
from tests.support.hanging_disk import HangingDisk
from tests.support.holding_writer import SIZE, Writer, lose, under_way
from tests.support.store_pool import WAIT_S, Pool
from tests.support.waits import eventually

BACKENDS = (None, TransferBackend.TCP)
SEGMENT = 8 << 20
NUM_BEFORE = 2  # blocks that the writer puts before the batch of which it holds the places
NUM_OTHERS = 126  # of these some would not fit without the places that were freed
PUT_S = 4.0  # half of it is for writing, on a busy machine too


@pytest.fixture
def pool(stack, tmp_path):
    return Pool(stack, open_put_s=PUT_S, heartbeat_s=0.1, segments=disk_alone(tmp_path))


def disk_alone(folder):
    return ({"medium": "ssd", "bytes": SEGMENT, "path": folder / "slab", "threads": 2},)


def fill_and_check(pool):
    """Use every place of the disk for others; their bytes stay as they are."""
    others = {secrets.token_bytes(16): secrets.token_bytes(SIZE) for _ in range(NUM_OTHERS)}
    assert set(pool.store.put_batch(list(others), list(others.values()))) == {"stored"}
    return others


def holds_only_what_was_committed(pool, count=NUM_BEFORE):
    assert pool.master.statistics().blocks == count
    blocks = pool.nodes[0]._segments[0].index.blocks()
    pool.nodes[0]._segments[0].verify(blocks)
    return len(pool.nodes[0]._segments[0].index.blocks()) == count


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_killed_writer_held_on_a_disk_is_free_without_an_administrator(
    stack, tmp_path, backend
):
    # What the kernel says of a process is enough; without it a put must be too old to be begun.
    put_s = 600.0 if backend is None else PUT_S
    pool = Pool(stack, open_put_s=put_s, heartbeat_s=0.1, segments=disk_alone(tmp_path))
    writer = Writer(pool, backend, "batch")
    assert under_way(pool) >= 4 * SIZE, "the fault needs places"
    free_bytes = pool.master.statistics().free_bytes + under_way(pool)
    writer.kill()
    eventually(lambda: under_way(pool) == 0, "its places are free again", timeout_s=WAIT_S)
    assert pool.master.statistics().free_bytes == free_bytes
    assert holds_only_what_was_committed(pool)
    assert not pool.nodes[0]._segments[0].writers(), "nor has it a key"
    fill_and_check(pool)
    pool.master.check_invariants()


@pytest.mark.parametrize("kind", ["batch", "early"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_killed_in_the_middle_of_a_write_it_frees_nothing_before_the_disk_is_done(
    stack, tmp_path, backend, kind, monkeypatch
):
    put_s = 600.0 if backend is None else PUT_S
    pool = Pool(stack, open_put_s=put_s, heartbeat_s=0.1, segments=disk_alone(tmp_path))
    writer = Writer(pool, backend, kind)
    num_before = pool.master.statistics().blocks
    assert num_before == NUM_BEFORE + 8 * (kind == "early")
    disk = HangingDisk(monkeypatch)
    try:
        writer.pipe.send("go on")
        assert disk.entered.wait(WAIT_S)
        held = under_way(pool)
        assert held >= 4 * SIZE
        writer.kill()
        node = pool.nodes[0]
        eventually(lambda: not node._segments[0].writers(), "it is cut off", timeout_s=WAIT_S)
        assert node._segments[0]._void, "the fault needs a write that is under way"
        time.sleep(2.0)  # several heartbeats
        assert under_way(pool) == held, "the disk may still write there"
        assert node.wait_registered(WAIT_S)
    finally:
        disk.let_go()
    eventually(lambda: under_way(pool) == 0, "its places are free again", timeout_s=WAIT_S)
    assert not node._segments[0]._void
    assert holds_only_what_was_committed(pool, num_before), "nobody said that they are there"
    others = fill_and_check(pool)
    assert {key: pool.store.get(key) for key in others} == others
    pool.master.check_invariants()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("hangs", [False, True])
def test_a_stopped_writer_that_was_cut_off_spoils_nothing_when_it_wakes(
    pool, backend, hangs, monkeypatch
):
    writer = Writer(pool, backend, "batch")
    disk = HangingDisk(monkeypatch)
    try:
        if hangs:
            writer.pipe.send("go on")
            assert disk.entered.wait(WAIT_S)
        writer.signal(signal.SIGSTOP)
        held = under_way(pool)
        assert held >= 4 * SIZE
        time.sleep(1.0)
        assert under_way(pool) == held, "it is connected"
        lose(pool, writer.name)
        if hangs:
            node = pool.nodes[0]
            eventually(lambda: node._segments[0]._void, "it is cut off", timeout_s=WAIT_S)
            time.sleep(2.0)
            assert under_way(pool) == held, "the disk may still write there"
    finally:
        disk.let_go()
    eventually(lambda: under_way(pool) == 0, "what is late is free", timeout_s=WAIT_S)
    others = fill_and_check(pool)
    writer.signal(signal.SIGCONT)
    if not hangs:
        writer.pipe.send("go on")
    values, outcomes = writer.hear()
    for (key, value), outcome in zip(values.items(), outcomes, strict=True):
        assert outcome in ("stored", "failed", "no_space"), outcomes
        if outcome == "stored":
            assert pool.store.get(key) == value
    present = {key: value for key, value in others.items() if pool.store.exists(key)}
    assert len(present) >= NUM_OTHERS - len(values), "no more than had to make room"
    assert {key: pool.store.get(key) for key in present} == present
    writer.kill()
    eventually(lambda: under_way(pool) == 0, "its places are free again", timeout_s=WAIT_S)
    pool.master.check_invariants()
