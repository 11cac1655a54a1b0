"""Batches of whole blocks, taken call by call by several threads, compiled and in Python."""

from __future__ import annotations

import errno
import mmap
import os
import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.schema import FileConfig
from tests.support.disk_calls import in_python
from transfer import StorageFailed, TransferError, TransferTimeout, native
from transfer.backends import file_calls
from transfer.backends.direct_io import AlignedBuffer
from transfer.backends.file import FileSlab
from transfer.backends.file_calls import WholeCalls
from transfer.pieces import make_pieces
from transfer.storage.batch_queue import BatchQueue
from transfer.storage.storage import Waiter

PAGE = 4096
CALL = 1 << 16  # of the smallest slab
NUM = 48
SLAB_BYTES = 2 * NUM * CALL


@pytest.fixture(params=["compiled", "python"], autouse=True)
def way(request, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "python":
        in_python(monkeypatch)
    elif native.compiled is None:
        pytest.skip("transfer._native is not built: no C compiler")
    return request.param


@pytest.fixture
def slab(tmp_path: Path):
    with FileSlab(tmp_path / "slab", SLAB_BYTES, FileConfig(threads=3, io_bytes=CALL)) as opened:
        if not opened.alignment.direct:
            pytest.skip(f"no direct access: {opened.alignment.why_buffered}")
        yield opened


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Which threads took batches in Python, or the numbers of those that a line was given."""
    lanes: list[int] = []
    run, join = WholeCalls.run, WholeCalls.join

    def taken_in_python(self: WholeCalls, lane: int, crowded: np.ndarray) -> None:
        lanes.append(lane)
        run(self, lane, crowded)

    def joined(self: WholeCalls, line: object, number: int) -> None:
        lanes.append(number)
        join(self, line, number)

    monkeypatch.setattr(WholeCalls, "run", taken_in_python)
    monkeypatch.setattr(WholeCalls, "join", joined)
    return lanes


def memory_of(num_calls: int) -> torch.Tensor:
    array = AlignedBuffer(num_calls * CALL).array
    array[:] = np.random.default_rng().integers(0, 256, len(array), dtype=np.uint8)
    return torch.from_numpy(array)


def read_back(slab: FileSlab) -> np.ndarray:
    return np.fromfile(slab.path, dtype=np.uint8)[: slab.nbytes]


def test_blocks_lie_where_they_belong(slab: FileSlab, taken: list[int]) -> None:
    memory, rng = memory_of(NUM), np.random.default_rng()
    places = rng.permutation(SLAB_BYTES // CALL)[:NUM] * CALL
    expected = np.zeros(SLAB_BYTES, dtype=np.uint8)
    slab.write(memory, np.arange(NUM) * CALL, places, CALL)
    assert taken, "the batch was not taken in whole calls"
    for i, place in enumerate(places.tolist()):
        expected[place : place + CALL] = memory.numpy()[i * CALL : (i + 1) * CALL]
    assert np.array_equal(read_back(slab), expected)
    back = memory_of(NUM)
    slab.read(back, np.arange(NUM) * CALL, places, CALL)
    assert torch.equal(back, memory)


def test_many_pieces_of_one_call(slab: FileSlab, taken: list[int]) -> None:
    """Pieces of one run of blocks, scattered in memory: vectors of one call."""
    memory, order = memory_of(4), np.random.default_rng().permutation(4 * CALL // PAGE)
    slab.write(memory, order * PAGE, np.arange(len(order)) * PAGE, PAGE)
    assert taken
    pages = memory.numpy().reshape(-1, PAGE)
    assert np.array_equal(read_back(slab)[: 4 * CALL].reshape(-1, PAGE), pages[order])
    back = memory_of(4)
    slab.read(back, order * PAGE, np.arange(len(order)) * PAGE, PAGE)
    assert torch.equal(back, memory)


def test_a_file_that_was_cut(slab: FileSlab, taken: list[int]) -> None:
    memory = memory_of(NUM)
    cut = random.randrange(1, NUM) * CALL + PAGE
    os.truncate(slab.path, cut)
    with pytest.raises(StorageFailed, match="cut short"):
        slab.read(memory, np.arange(NUM) * CALL, np.arange(NUM) * CALL, CALL)
    with pytest.raises(StorageFailed, match=f"cut short: the file has {cut} bytes"):
        slab.write(memory, np.arange(NUM) * CALL, np.arange(NUM) * CALL, CALL)
    assert slab.path.stat().st_size == cut, "nothing made it longer"
    assert taken


def test_a_call_that_fails_says_where_and_why(slab: FileSlab, taken: list[int]) -> None:
    """Memory that is mapped for reading alone: the system refuses to read into it."""
    mapped = mmap.mmap(-1, NUM * CALL, prot=mmap.PROT_READ)
    array = np.frombuffer(mapped, dtype=np.uint8)
    deadline = time.monotonic() + 30.0
    waiter = Waiter("slab", "read", deadline)
    offsets = np.arange(NUM) * CALL
    slab.fetch(array, make_pieces(offsets, offsets, CALL), deadline, waiter.end)
    with pytest.raises((StorageFailed, TypeError)) as caught:
        waiter.wait()
    assert taken
    if file_calls.compiled:
        assert isinstance(caught.value, StorageFailed)
        assert caught.value.errno == errno.EFAULT
        assert caught.value.offset % CALL == 0
    memory = memory_of(1)
    slab.write(memory, 0, 0, CALL)  # the slab goes on


def test_nothing_is_begun_after_the_deadline(slab: FileSlab) -> None:
    memory, offsets = memory_of(NUM), np.arange(NUM) * CALL
    late = time.monotonic() - 0.001
    waiter = Waiter("slab", "write", time.monotonic() + 30.0)
    slab.store(memory.numpy(), make_pieces(offsets, offsets, CALL), late, waiter.end)
    with pytest.raises(TransferTimeout):
        waiter.wait()
    assert not read_back(slab).any()


def test_a_turn_is_over_when_others_wait(slab: FileSlab) -> None:
    """In Python; `test_call_line` has that of compiled calls."""
    memory, offsets = memory_of(NUM), np.arange(NUM) * CALL
    pieces = make_pieces(offsets, offsets, CALL)
    access = slab._opened("write")[1]
    work = slab._write_work(
        access, memory.numpy(), pieces.source_offsets, pieces.target_offsets, pieces.lengths,
        time.monotonic() + 30.0,
    )  # fmt: skip
    calls = work.whole_calls()
    assert calls is not None
    calls.run(0, np.ones(1, dtype=np.int64))
    assert calls.left == NUM - file_calls.TURN_CALLS
    calls.run(0, np.zeros(1, dtype=np.int64))
    assert calls.left == 0
    assert np.array_equal(read_back(slab)[: NUM * CALL], memory.numpy())


def test_small_and_large_batches_of_many_threads(slab: FileSlab, taken: list[int]) -> None:
    """Each thread has its own part of the slab, and batches of one call to all of it."""
    share, failures = 2 * NUM // 4, []

    def work(index: int) -> None:
        rng = np.random.default_rng()
        base, expected = index * share, np.zeros((share, CALL), dtype=np.uint8)
        memory = memory_of(share)
        for _ in range(12):
            count = int(rng.integers(1, share + 1))
            sources, places = (rng.permutation(share)[:count] for _ in range(2))
            slab.write(memory, sources * CALL, (base + places) * CALL, CALL)
            expected[places] = memory.numpy().reshape(-1, CALL)[sources]
            back = memory_of(share)
            slab.read(back, np.arange(share) * CALL, (base + np.arange(share)) * CALL, CALL)
            if not np.array_equal(back.numpy().reshape(-1, CALL), expected):
                failures.append(index)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(set(taken)) > 1, "several lanes took part"


def test_neighbours_of_whole_blocks_lose_nothing(slab: FileSlab) -> None:
    """Whole blocks are written over and over while part of one among them is, beside its own."""
    memory, ends, stop = memory_of(2 * NUM), [], threading.Event()

    def whole() -> None:
        while not stop.is_set():
            slab.write(memory, np.arange(0, NUM, 2) * CALL, np.arange(0, NUM, 2) * CALL, CALL)

    thread = threading.Thread(target=whole)
    thread.start()
    try:
        for i in range(150):
            part = torch.full((100,), i % 251, dtype=torch.uint8)
            place = random.randrange(NUM // 2) * 2 * CALL + random.randrange(CALL - 100)
            slab.write(part, 0, place, 100)
            ends.append(place)
    finally:
        stop.set()
        thread.join()
    slab.write(memory, np.arange(0, NUM, 2) * CALL, np.arange(0, NUM, 2) * CALL, CALL)
    found = read_back(slab)[: NUM * CALL].reshape(-1, CALL)
    assert np.array_equal(found[::2], memory.numpy()[: NUM * CALL].reshape(-1, CALL)[::2])
    assert not found[1::2].any(), "nobody wrote there"


def test_parts_of_blocks_wait_for_no_batch_that_waits_for_them(slab: FileSlab) -> None:
    """More writes of parts than the slab has threads, all in what whole batches write over."""
    memory, zeros, failures = memory_of(NUM), np.zeros(100, dtype=np.uint8), []
    offsets = np.arange(NUM) * CALL

    def write_parts() -> None:
        deadline = time.monotonic() + 60.0
        waiters = [Waiter("slab", "write", deadline) for _ in range(4)]
        for waiter in waiters:
            place = random.randrange(NUM) * CALL + 7
            slab.store(zeros, make_pieces(0, place, 100), deadline, waiter.end)
        for waiter in waiters:
            waiter.wait()

    def write(whole: bool) -> None:
        try:
            for _ in range(20):
                if whole:
                    slab.write(memory, offsets, offsets, CALL, timeout_s=60.0)
                else:
                    write_parts()
        except TransferError as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(i % 2 == 0,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    found = read_back(slab)[: NUM * CALL].reshape(-1, CALL)
    wanted = memory.numpy().reshape(-1, CALL)
    assert np.array_equal(found[:, 107:], wanted[:, 107:])
    assert np.array_equal(found[:, :7], wanted[:, :7])
    part, cleared = found[:, 7:107], np.zeros(100, dtype=np.uint8)
    assert all(
        (p == w).all() or (p == cleared).all() for p, w in zip(part, wanted[:, 7:107], strict=True)
    )


def test_a_slab_that_is_closed_ends_what_is_under_way(slab: FileSlab) -> None:
    memory, offsets = memory_of(NUM), np.arange(NUM) * CALL
    deadline = time.monotonic() + 30.0
    waiters = [Waiter("slab", "write", deadline) for _ in range(20)]
    for waiter in waiters:
        slab.store(memory.numpy(), make_pieces(offsets, offsets, CALL), deadline, waiter.end)
    slab.close()
    errors: list[str] = []
    for waiter in waiters:
        try:
            waiter.wait()
        except StorageFailed as error:
            errors.append(str(error))
    assert all("not open" in error for error in errors)


def test_no_batch_is_left_behind(slab: FileSlab) -> None:
    memory = memory_of(NUM)
    for _ in range(50):
        count = random.randint(1, NUM)
        slab.write(memory, np.arange(count) * CALL, np.arange(count) * 2 * CALL, CALL)
    queue = slab._queue
    assert isinstance(queue, BatchQueue)
    assert queue.num_alive == 0
    assert not queue._waiting
