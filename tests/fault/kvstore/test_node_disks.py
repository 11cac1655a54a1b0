"""Disks of store nodes that are full, broken, damaged, or somebody else's."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import subprocess
import threading
from contextlib import ExitStack

import numpy as np
import psutil
import pytest

from kvstore import PutOutcome
from kvstore.errors import SegmentUnusable
from tests.support.disk_calls import in_python
from tests.support.lending_node import LendingNode, damage, read
from tests.support.ordering_master import OrderingMaster
from tests.support.pool_member import start_pool
from tests.support.waits import eventually
from transfer import StorageFailed, StorageFull

SIZE = 1 << 20
BLOCK = 4096


@pytest.fixture
def master(stack):
    return stack.enter_context(OrderingMaster(b"s"))


@pytest.fixture
def small_disk(tmp_path, stack):
    """A file system of 2 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    able = (
        shutil.which("mount")
        and not subprocess.run(mount, capture_output=True, timeout=30).returncode
    )
    if not able:
        pytest.skip("no right to mount a small file system")
    yield folder
    stack.close()
    subprocess.run(["umount", str(folder)], check=True, timeout=30)


def ssd(path, nbytes=SIZE):
    return {"medium": "ssd", "bytes": nbytes, "path": path, "threads": 2, "direct": "prefer"}


def test_no_room_for_a_segment(small_disk, stack, master):
    descriptors, threads = psutil.Process().num_fds(), threading.active_count()
    segments = [{"bytes": SIZE}, ssd(small_disk / "fits"), ssd(small_disk / "slab", 4 * SIZE)]
    with pytest.raises(StorageFull) as caught, ExitStack() as inner:
        LendingNode(inner, master.address, b"s", segments)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.retryable
    assert sorted(path.name for path in small_disk.iterdir()) == ["fits", "fits.index"]
    eventually(lambda: psutil.Process().num_fds() <= descriptors)
    eventually(lambda: threading.active_count() <= threads)
    assert master.registered == []


def test_a_disk_that_fills_up_later(small_disk, stack, master):
    """Blocks have their place; the index has not. It is complete again when there is room."""
    with ExitStack() as inner:
        node = LendingNode(inner, master.address, b"s", [ssd(small_disk / "slab")])
        orders = [node.put(0, 8192 * i, BLOCK) for i in range(4)]
        node.segment(0).index.flush()
        filler = small_disk / "filler"
        with pytest.raises(OSError), filler.open("wb", buffering=0) as file:  # noqa: PT012
            while True:
                file.write(bytes(1024))
        # What still fits into the last page of the index has to be used up, too.
        while not node.node.statistics().segments[0].log_suspended:
            at = len(orders) % 100
            node.segment(0).index.forget_range(8192 * at, 8192 * at + BLOCK)
            orders.append(node.put(0, 8192 * at, BLOCK))
            node.segment(0).index.flush()
            assert len(orders) < 2000
        assert (small_disk / "slab.index").stat().st_size == 64
        figures = node.node.statistics().segments[0]
        held = node.segment(0).held().keys
        assert figures.blocks == len(held) <= 100, "the node goes on"
        filler.unlink()
        node.segment(0).index.flush(retry=True)
        assert not node.node.statistics().segments[0].log_suspended
    with ExitStack() as inner:
        LendingNode(inner, master.address, b"s", [ssd(small_disk / "slab")])
        assert master.registered[-1].held.keys == held


def test_a_node_that_restarts_while_its_disk_is_full(small_disk, stack, master):
    """Nothing is told rather than something stale."""
    with ExitStack() as inner, pytest.MonkeyPatch.context() as patch:
        node = LendingNode(inner, master.address, b"s", [ssd(small_disk / "slab")])
        node.put(0, 0, BLOCK)
        node.segment(0).index.flush()
        pwrite, calls = os.pwrite, []

        def full(fd, data, at):
            if "index" in os.readlink(f"/proc/self/fd/{fd}"):
                calls.append(at)
                raise OSError(errno.ENOSPC, "full")
            return pwrite(fd, data, at)

        patch.setattr(os, "pwrite", full)
        node.put(0, 0, BLOCK)  # over the first
        node.segment(0).index.flush()
        assert calls
    with ExitStack() as inner:
        LendingNode(inner, master.address, b"s", [ssd(small_disk / "slab")], verify_bytes=0)
        assert master.registered[-1].held.keys == []


def test_a_disk_that_cannot_be_read_in_one_place(tmp_path, stack, master, monkeypatch):
    scrub = {"period_s": 0.2, "bytes_per_s": 1 << 30}
    node = LendingNode(stack, master.address, b"s", [ssd(tmp_path / "slab")], scrub=scrub)
    orders = [node.put(0, 8192 * i, BLOCK) for i in range(10)]
    preadv, failures = os.preadv, []

    def failing(fd, places, offset):
        if offset <= 8192 * 7 < offset + sum(place.nbytes for place in places):
            failures.append(offset)
            raise OSError(errno.EIO, "Input/output error")
        return preadv(fd, places, offset)

    in_python(monkeypatch)
    monkeypatch.setattr(os, "preadv", failing)
    master.wait_for(lambda: master.bad)
    assert failures
    assert [r.keys for r in master.bad] == [[orders[7].key]]
    assert len(node.segment(0).held().keys) == 9
    with pytest.raises(StorageFailed) as caught:
        read(node.segment(0), 8192 * 7, BLOCK)
    assert caught.value.errno == errno.EIO


def test_writes_that_fail_leave_no_block_behind(tmp_path, stack, master, monkeypatch):
    node = LendingNode(stack, master.address, b"s", [ssd(tmp_path / "slab")])
    node.put(0, 0, BLOCK)
    in_python(monkeypatch)
    monkeypatch.setattr(os, "pwritev", lambda *a: (_ for _ in ()).throw(OSError(errno.EIO, "no")))
    with pytest.raises(StorageFailed):
        node.put(0, 0, BLOCK)
    monkeypatch.undo()
    assert node.segment(0).held().keys == [], "the old one may have lost bytes"


@pytest.mark.parametrize("file", ["slab", "slab.index"])
def test_a_file_of_another_user(tmp_path, stack, master, file):
    if os.geteuid():
        pytest.skip("only root can give a file away")
    with ExitStack() as inner:
        LendingNode(inner, master.address, b"s", [ssd(tmp_path / "slab")]).put(0, 0, BLOCK)
    os.chown(tmp_path / file, 12_345, -1)
    with pytest.raises((SegmentUnusable, StorageFailed), match="12345"), ExitStack() as inner:
        LendingNode(inner, master.address, b"s", [ssd(tmp_path / "slab")])
    os.chown(tmp_path / file, 0, -1)
    LendingNode(stack, master.address, b"s", [ssd(tmp_path / "slab")])
    assert len(master.registered[-1].held.keys) == 1


@pytest.mark.parametrize("medium", ["dram", "cxl", "ssd"])
def test_a_corrupted_block_is_found_by_its_reader(tmp_path, stack, medium):
    """In every tier: the bytes do not come through, the copy goes, the block can be put anew."""
    path = tmp_path / "file"
    if medium == "cxl":
        path.touch()
        os.truncate(path, SIZE)
    segment = {"medium": medium, "bytes": SIZE, "path": None if medium == "dram" else path}
    knobs = {"segments": [segment], "scrub": {"enabled": False}}
    master, (member,) = start_pool(stack, members=1, nbytes=1 << 16, **knobs)
    keys = [secrets.token_bytes(16) for _ in range(4)]
    offsets = np.arange(4) * BLOCK

    def put():
        return list(member.client.put(keys, member.region, offsets, BLOCK))

    assert put() == [PutOutcome.STORED] * 4
    eventually(lambda: len(member.node.segments[0].held().keys) == 4)
    (bad,) = [b for b in member.node.segments[0].index.blocks() if b.key == keys[2]]
    damage(member.node.segments[0], bad.offset + 4000)
    expected = member.bytes[: 2 * BLOCK].clone()
    hit = member.client.lookup_prefix(keys)
    assert hit.num_blocks == 4
    assert member.client.get_into(hit, member.region, offsets + (1 << 15)) == 2
    member.client.release(hit)
    assert bytes(member.bytes[1 << 15 :][: 2 * BLOCK]) == bytes(expected)
    assert list(member.client.exists(keys)) == [True, True, False, True]
    assert master.statistics().corrupt_blocks == 1
    assert put() == [PutOutcome.EXISTS, PutOutcome.EXISTS, PutOutcome.STORED, PutOutcome.EXISTS]
    hit = member.client.lookup_prefix(keys)
    assert member.client.get_into(hit, member.region, offsets + (1 << 15)) == 4
    member.client.release(hit)
    master.check_invariants()


@pytest.mark.parametrize("medium", ["dram", "cxl", "ssd"])
def test_a_corrupted_block_is_found_by_the_scrubber(tmp_path, stack, medium):
    """Nobody reads it: the master drops it all the same, and no other."""
    path = tmp_path / "file"
    if medium == "cxl":
        path.touch()
        os.truncate(path, SIZE)
    segment = {"medium": medium, "bytes": SIZE, "path": None if medium == "dram" else path}
    scrub = {"period_s": 0.3, "bytes_per_s": 1 << 30}
    master, (member,) = start_pool(stack, members=1, segments=[segment], scrub=scrub)
    keys = [secrets.token_bytes(16) for _ in range(4)]
    assert set(member.client.put(keys, member.region, np.arange(4) * BLOCK, BLOCK)) == {"stored"}
    eventually(lambda: len(member.node.segments[0].held().keys) == 4)
    (bad,) = [b for b in member.node.segments[0].index.blocks() if b.key == keys[1]]
    damage(member.node.segments[0], bad.offset + 7)
    eventually(lambda: list(member.client.exists(keys)) == [True, False, True, True])
    assert master.statistics().corrupt_blocks == 1
    # The node hears of it after the master has dropped it.
    eventually(lambda: member.node.statistics().scrub.dropped_blocks == 1, "counted by its node")
    master.check_invariants()
