"""The index beside an SSD segment: replayed, torn, foreign, full, shared."""

from __future__ import annotations

import errno
import os
import random
import secrets
from itertools import pairwise

import pytest

from kvstore.errors import SegmentUnusable
from kvstore.node import index_log
from kvstore.node.index_log import HEADER_BYTES, IndexLog
from kvstore.node.indexed_block import columns_of
from kvstore.node.kept_index import KeptIndex
from kvstore.node.node_index import NodeIndex
from tests.unit.kvstore.test_node_index import SIZE, facts, random_block, random_columns
from transfer import StorageBusy, StorageFailed

SLAB = b"0123456789abcdef"


def opened(path, nbytes=SIZE):
    log = IndexLog(path, nbytes)
    return log, log.open()


def fresh(path):
    log, readable = opened(path)
    assert not readable
    log.replace(SLAB, [])
    return log


def churn(index: KeptIndex, rng: random.Random, steps: int) -> None:
    for _ in range(steps):
        if rng.random() < 0.2:
            index.record(columns_of(random_columns(rng)))
        elif rng.random() < 0.8:
            index.record(columns_of([random_block(rng)]))
        else:
            low = rng.randrange(SIZE)
            index.forget_range(low, low + rng.randrange(1, 200))
        if rng.random() < 0.3:
            index.flush()


def replayed(path):
    log, readable = opened(path)
    try:
        return [facts(block) for block in log.replay()] if readable else None
    finally:
        log.close()


def test_what_was_noted_is_there_after_a_restart(tmp_path):
    seed = secrets.randbits(32)
    rng = random.Random(seed)
    path = tmp_path / "index"
    kept = KeptIndex(NodeIndex(SIZE), fresh(path))
    for _ in range(5):
        churn(kept, rng, 100)
        expected = [facts(block) for block in kept.blocks()]
        kept.close()
        kept.close()
        assert replayed(path) == expected, seed
        log, _ = opened(path)
        kept = KeptIndex(log.replay(), log)
    kept.close()
    assert path.stat().st_mode & 0o077 == 0


def test_many_that_are_overwritten_are_forgotten_with_one_write(tmp_path, monkeypatch):
    path = tmp_path / "index"
    kept = KeptIndex(NodeIndex(SIZE), fresh(path))
    rng = random.Random(secrets.randbits(32))
    for place in range(0, SIZE - 600, 600):
        block = random_block(rng)
        block.offset, block.chunk_bytes = place, 0
        kept.record(columns_of([block]))
    kept.flush()
    writes, pwrite = [], os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *a: writes.append(a) or pwrite(*a))
    number = kept.forget_ranges((place, place + 600) for place in range(0, SIZE, 1200))
    assert (number, len(writes)) == (3, 1)
    assert kept.forget_ranges([(0, 600), (1200, 1300)]) == 0
    assert len(writes) == 1, "nothing was there: nothing is noted"
    expected = [facts(block) for block in kept.blocks()]
    kept._log.close()  # killed: nothing else was written
    assert replayed(path) == expected


def test_a_log_that_grew_is_replaced_by_a_short_one(tmp_path, monkeypatch):
    monkeypatch.setattr("kvstore.node.kept_index.SPARE_BYTES", 4096)
    seed = secrets.randbits(32)
    path = tmp_path / "index"
    kept = KeptIndex(NodeIndex(SIZE), fresh(path))
    rng, sizes = random.Random(seed), []
    for _ in range(40):
        churn(kept, rng, 50)
        kept.flush()
        sizes.append(kept.figures().log_bytes)
    assert max(sizes) < 40_000, sizes
    assert any(later < earlier for earlier, later in pairwise(sizes)), sizes
    with pytest.raises(StorageBusy):  # the lock went over to the new file
        opened(path)
    expected = [facts(block) for block in kept.blocks()]
    kept.close()
    assert replayed(path) == expected, seed
    assert list(tmp_path.iterdir()) == [path]


def test_a_torn_tail_costs_only_what_was_torn(tmp_path):
    seed = secrets.randbits(32)
    rng = random.Random(seed)
    path = tmp_path / "index"
    log = fresh(path)
    index, states = NodeIndex(SIZE), []
    for _ in range(30):
        states.append((log.size, [facts(b) for b in index]))
        block = random_block(rng)
        index.record(block)
        log.append(log.put_record(block))
    states.append((log.size, [facts(b) for b in index]))
    log.close()
    whole = path.read_bytes()
    for _ in range(60):
        cut = rng.randrange(HEADER_BYTES, len(whole))
        tail = rng.choice([b"", rng.randbytes(rng.randrange(200)), b"\0" * 500])
        torn = whole[:cut] + tail
        path.write_bytes(torn)
        # The tail may begin as what was cut off.
        right = next(
            (i for i, (a, b) in enumerate(zip(whole, torn, strict=False)) if a != b),
            min(len(whole), len(torn)),
        )
        expected = next(state for size, state in reversed(states) if size <= right)
        assert replayed(path) == expected, (seed, cut)
        assert path.stat().st_size <= right, "what is not right is cut off"
    damaged = bytearray(whole)
    at = rng.randrange(HEADER_BYTES, len(whole))
    damaged[at] ^= 1 << rng.randrange(8)
    path.write_bytes(damaged)
    expected = next(state for size, state in reversed(states) if size <= at)
    assert replayed(path) == expected, (seed, at)


def test_a_log_that_ends_or_is_wrong_at_any_byte(tmp_path):
    """Cut behind each byte, or with one bit of each byte changed: all before it, nothing else."""
    seed = secrets.randbits(32)
    rng = random.Random(seed)
    path = tmp_path / "index"
    log = fresh(path)
    index, states = NodeIndex(SIZE), [(log.size, [])]
    for step in range(12):
        if step % 3 == 2:
            low = rng.randrange(SIZE)
            index.forget_range(low, SIZE)
            log.append(log.forget_record(low, SIZE))
        else:
            block = random_block(rng)
            index.record(block)
            log.append(log.put_record(block))
        states.append((log.size, [facts(b) for b in index]))
    log.close()
    whole = path.read_bytes()
    assert len(whole) == states[-1][0]

    def state_before(at):
        return next(state for size, state in reversed(states) if size <= at)

    for at in range(HEADER_BYTES, len(whole)):
        path.write_bytes(whole[:at])
        assert replayed(path) == state_before(at), (seed, at)
        wrong = bytearray(whole)
        wrong[at] ^= 1 << rng.randrange(8)
        path.write_bytes(wrong)
        assert replayed(path) == state_before(at), (seed, at)
    for at in range(HEADER_BYTES):
        path.write_bytes(whole[:at])
        assert replayed(path) is None, (seed, at)


@pytest.mark.parametrize("left", [0, 1, 8, HEADER_BYTES - 1])
def test_a_header_that_was_being_written(tmp_path, left):
    path = tmp_path / "index"
    fresh(path).close()
    os.truncate(path, left)
    assert replayed(path) is None


def test_a_log_of_another_size_or_version_or_slab_tells_nothing(tmp_path, monkeypatch):
    path = tmp_path / "index"
    log = fresh(path)
    log.append(log.put_record(random_block(random.Random(1))))
    log.close()
    other, readable = opened(path, SIZE * 2)
    assert not readable
    other.close()
    monkeypatch.setattr(index_log, "VERSION", 2)
    assert replayed(path) is None
    monkeypatch.undo()
    tail = path.read_bytes()[HEADER_BYTES:]
    log, _ = opened(path)
    log.replace(secrets.token_bytes(16), [])
    log.close()
    with path.open("ab") as file:
        file.write(tail)
    assert replayed(path) == [], "records of another slab"


def test_what_is_no_log_is_left_alone(tmp_path):
    path = tmp_path / "index"
    path.write_bytes(b"somebody's thesis")
    with pytest.raises(SegmentUnusable) as caught:
        opened(path)
    assert caught.value.path == str(path)
    assert path.read_bytes() == b"somebody's thesis"
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(StorageFailed):
        opened(link)
    (tmp_path / "folder").mkdir()
    with pytest.raises(StorageFailed):
        opened(tmp_path / "folder")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SegmentUnusable):
        opened(tmp_path / "pipe")


def test_one_owner(tmp_path):
    log = fresh(tmp_path / "index")
    with pytest.raises(StorageBusy) as caught:
        opened(log.path)
    assert caught.value.retryable
    log.close()
    opened(log.path)[0].close()


def test_a_disk_that_takes_no_more_records(tmp_path, monkeypatch):
    """Rather nothing than something stale; complete again as soon as there is room."""
    seed = secrets.randbits(32)
    rng = random.Random(seed)
    path = tmp_path / "index"
    kept = KeptIndex(NodeIndex(SIZE), fresh(path))
    churn(kept, rng, 50)
    kept.flush()
    calls, pwrite = [], os.pwrite

    def full(fd, data, at):
        calls.append(at)
        pwrite(fd, bytes(data)[:7], at)  # a torn record
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "pwrite", full)
    kept.record(columns_of([random_block(rng)]))
    kept.flush()
    assert calls
    assert kept.figures().log_suspended
    assert path.stat().st_size == HEADER_BYTES
    kept.forget_range(0, SIZE // 2)
    kept.record(columns_of([random_block(rng)]))
    kept.flush(retry=True)
    assert kept.figures().log_suspended
    assert path.stat().st_size == HEADER_BYTES
    monkeypatch.undo()
    kept.flush()
    assert kept.figures().log_suspended, "tried again only when asked to"
    kept.flush(retry=True)
    assert not kept.figures().log_suspended
    expected = [facts(block) for block in kept.blocks()]
    kept.close()
    assert replayed(path) == expected, seed
    assert list(tmp_path.iterdir()) == [path]


def test_no_room_for_a_second_log_is_room_for_a_longer_one(tmp_path, monkeypatch):
    monkeypatch.setattr("kvstore.node.kept_index.SPARE_BYTES", 0)
    path = tmp_path / "index"
    kept = KeptIndex(NodeIndex(SIZE), fresh(path))
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(errno.EIO, "no")))
    churn(kept, random.Random(2), 200)
    kept.flush()
    monkeypatch.undo()
    assert not kept.figures().log_suspended
    expected = [facts(block) for block in kept.blocks()]
    kept.close()
    assert replayed(path) == expected
    assert list(tmp_path.iterdir()) == [path]
