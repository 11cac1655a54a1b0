"""Store nodes with SSD segments, killed while they write, and started again."""

from __future__ import annotations

import contextlib
import random
import secrets
import signal
import threading
import time

import numpy as np
import pytest
import xxhash

from tests.support.lending_process import LendingProcess, Putter, slab_segment
from tests.support.ordering_master import OrderingMaster
from tests.support.waits import eventually
from transfer import TransferError

SIZE = 16 << 20
BLOCK = 1 << 18
WAIT_S = 40.0


@pytest.fixture
def master(stack):
    return stack.enter_context(OrderingMaster(b"s"))


@pytest.fixture
def putter(stack):
    return Putter(stack, SIZE)


def wait_held(node, number):
    """Return what it holds, once that is so much and its file says so too."""
    eventually(lambda: len(node.ask("held", 0).keys) == number, f"{number} blocks")
    eventually(lambda: node.ask("kept", 0), "the index is written a moment later")
    return node.ask("held", 0)


def wrong_blocks(path, held):
    """Positions of blocks whose bytes in the file are not what they should be."""
    content = np.fromfile(path, dtype=np.uint8)
    return [
        i
        for i, (offset, length) in enumerate(zip(held.offsets, held.lengths, strict=True))
        if xxhash.xxh3_64_intdigest(content[offset : offset + length]) != held.checksums[i]
    ]


def test_killed_and_restarted_it_offers_what_it_has(tmp_path, master, putter):
    segments = [slab_segment(tmp_path / "slab", SIZE)]
    node = LendingProcess(master.address, segments)
    key = putter.key(node)
    keys = [putter.put(node, key, i * BLOCK, BLOCK) for i in range(40)]
    wait_held(node, 40)
    node.kill()
    again = LendingProcess(master.address, segments)
    registered = master.registered[-1]
    assert registered.node == again.name != node.name
    assert registered.held.keys == keys
    assert registered.untouched
    assert wrong_blocks(tmp_path / "slab", registered.held) == []
    again.close()


@pytest.mark.parametrize("attempt", range(4))
def test_killed_in_the_middle_of_a_put(tmp_path, master, putter, attempt):
    """Whatever of the new block is in place: the old ones there are not offered any more."""
    seed = secrets.randbits(32)
    rng = random.Random(seed)
    slab = tmp_path / "slab"
    segments = [slab_segment(slab, SIZE)]
    # Nothing is verified at the start, so what is stale would be told.
    node = LendingProcess(master.address, segments, verify_bytes=0)
    key = putter.key(node)
    for i in range(60):
        putter.put(node, key, i * BLOCK, BLOCK)
    before = wait_held(node, 60)
    low, high = 10 * BLOCK + 1000, 50 * BLOCK - 1000
    putter.fill(high - low)
    was = np.fromfile(slab, dtype=np.uint8)[:SIZE]
    node.ask("die_in_write", rng.randrange(high - low))
    put = putter.engine.write(node.name, putter.region, key, 0, low, high - low)
    with pytest.raises(TransferError):
        put.wait(WAIT_S)
    node.ended(-signal.SIGKILL)
    found = np.fromfile(slab, dtype=np.uint8)[:SIZE]
    assert not np.array_equal(found[low:high], putter.region.array[: high - low]), "it was cut"
    assert np.array_equal(found[:low], was[:low]), seed
    assert np.array_equal(found[high:], was[high:]), seed
    again = LendingProcess(master.address, segments, verify_bytes=0)
    held = master.registered[-1].held
    assert wrong_blocks(slab, held) == [], seed
    untouched = [
        k
        for k, offset, length in zip(before.keys, before.offsets, before.lengths, strict=True)
        if offset + length <= low or high <= offset
    ]
    assert set(untouched) <= set(held.keys), seed
    again.close()


@pytest.mark.parametrize("torn", [0, 1, 9, 40, 10_000])
def test_killed_in_the_middle_of_an_index_record(tmp_path, master, putter, torn):
    segments = [slab_segment(tmp_path / "slab", SIZE)]
    node = LendingProcess(master.address, segments)
    key = putter.key(node)
    keys = [putter.put(node, key, i * BLOCK, BLOCK) for i in range(10)]
    wait_held(node, 10)
    node.ask("die_in_append", torn)
    last = putter.put(node, key, 10 * BLOCK, BLOCK)
    node.ended(-9)
    again = LendingProcess(master.address, segments)
    expected = keys + ([last] if torn == 10_000 else [])
    assert master.registered[-1].held.keys == expected
    key = putter.key(again)
    more = putter.put(again, key, 11 * BLOCK, BLOCK)
    wait_held(again, len(expected) + 1)
    again.close()
    third = LendingProcess(master.address, segments)
    assert master.registered[-1].held.keys == [*expected, more]
    third.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["slab", "slab.index"]


def test_killed_before_an_overwrite_is_noted(tmp_path, master, putter):
    """The old block is forgotten in the file before its bytes are touched; if that note is torn,
    the bytes were not touched either.
    """
    segments = [slab_segment(tmp_path / "slab", SIZE)]
    node = LendingProcess(master.address, segments, verify_bytes=0)
    key = putter.key(node)
    keys = [putter.put(node, key, i * BLOCK, BLOCK) for i in range(4)]
    wait_held(node, 4)
    node.ask("die_in_append", 5)
    putter.fill(BLOCK)
    with pytest.raises(TransferError):
        putter.engine.write(node.name, putter.region, key, 0, BLOCK, BLOCK).wait(WAIT_S)
    node.ended(-9)
    again = LendingProcess(master.address, segments, verify_bytes=0)
    held = master.registered[-1].held
    assert held.keys == keys
    assert wrong_blocks(tmp_path / "slab", held) == []
    again.close()


@pytest.mark.parametrize(
    ("step", "torn"), [("written", 0), ("written", 70), ("written", 1500), ("synced", 0),
                       ("renamed", 0)],
)  # fmt: skip
def test_killed_while_the_index_is_replaced(tmp_path, master, putter, step, torn):
    """The old one or the new one is found, never half of either, and what follows is kept."""
    segments = [slab_segment(tmp_path / "slab", SIZE)]
    node = LendingProcess(master.address, segments, verify_bytes=0)
    key = putter.key(node)
    keys = [putter.put(node, key, i * BLOCK, BLOCK) for i in range(20)]
    # Some are overwritten, so that the log has more than the index.
    keys[3:6] = [putter.put(node, key, i * BLOCK, BLOCK) for i in range(3, 6)]
    wait_held(node, 20)
    node.ask("die_in_replace", step, torn)
    size = (tmp_path / "slab.index").stat().st_size
    last = putter.put(node, key, 20 * BLOCK, BLOCK)
    node.ended(-signal.SIGKILL)
    assert (tmp_path / "slab.index.new").exists() is (step != "renamed")
    assert ((tmp_path / "slab.index").stat().st_size < size) is (step == "renamed")
    again = LendingProcess(master.address, segments, verify_bytes=0)
    held = master.registered[-1].held
    assert held.keys == keys + ([last] if step == "renamed" else [])
    assert wrong_blocks(tmp_path / "slab", held) == []
    more = putter.put(again, putter.key(again), 30 * BLOCK, BLOCK)
    wait_held(again, len(held.keys) + 1)
    again.close()
    third = LendingProcess(master.address, segments)
    assert master.registered[-1].held.keys == [*held.keys, more]
    third.close()


def test_killed_at_any_moment_again_and_again(tmp_path, master, putter):
    """Blocks are put over one another without a pause; each life ends in the middle of that."""
    seed = secrets.randbits(32)
    rng = random.Random(seed)
    segments = [slab_segment(tmp_path / "slab", SIZE)]
    ends = 0
    for _ in range(5):
        node = LendingProcess(master.address, segments, verify_bytes=0)
        held = master.registered[-1].held
        assert wrong_blocks(tmp_path / "slab", held) == [], seed
        ends += bool(held.keys)
        killer = threading.Timer(rng.uniform(0.1, 0.6), node.process.kill)
        key = putter.key(node)
        putter.put(node, key, 0, BLOCK)  # however soon it is killed, it was at work
        limit = time.monotonic() + WAIT_S
        killer.start()
        with contextlib.suppress(TransferError):
            while time.monotonic() < limit:
                nbytes = rng.choice([4096, BLOCK, 3 * BLOCK]) + rng.choice([0, 0, 100])
                putter.put(node, key, rng.randrange(0, SIZE - nbytes, 4096), nbytes)
        killer.join()
        node.ended(-signal.SIGKILL)
    assert ends, "what was there was found at least once"


def test_two_nodes_on_one_file(tmp_path, master, putter):
    segments = [slab_segment(tmp_path / "slab", SIZE)]
    node = LendingProcess(master.address, segments)
    key = putter.key(node)
    putter.put(node, key, 0, BLOCK)
    with pytest.raises((AssertionError, EOFError)):
        LendingProcess(master.address, segments)  # its node raises StorageBusy: it never starts
    wait_held(node, 1)
    node.close()
    again = LendingProcess(master.address, segments)
    assert len(master.registered[-1].held.keys) == 1
    again.close()
