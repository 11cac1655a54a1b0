"""The line of compiled calls on a file: whose turn it is, and how it ends."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from configs.schema import FileConfig
from tests.support.waits import eventually
from transfer import native
from transfer.backends.file import FileSlab
from transfer.backends.file_calls import FAILED, LATE, OK, STOPPED

pytestmark = pytest.mark.skipif(native.compiled is None, reason="transfer._native is not built")

BLOCK = 4096
BLOCKS = 64
LATER_S = 60.0


class Scene:
    """A line, a file of blocks that are all zero, and memory in which no block is."""

    def __init__(self, tmp_path: Path, num_threads: int) -> None:
        assert native.compiled is not None
        self.line = native.compiled.CallLine(num_threads)
        self.path = tmp_path / "file"
        self.path.write_bytes(bytes(BLOCKS * BLOCK))
        self.fd = os.open(self.path, os.O_RDWR)
        self.memory = np.random.default_rng().integers(1, 256, BLOCKS * BLOCK, dtype=np.uint8)
        self.kept: list[object] = []

    def put(self, number: int, blocks: list[int], *, fd: int = -1, left_s: float = LATER_S) -> None:
        """Have blocks written, one call each, from where they lie in memory."""
        lows = np.array(blocks, dtype=np.int64) * BLOCK
        columns = lows, np.full_like(lows, BLOCK), np.arange(len(lows) + 1), lows, lows + BLOCK
        self.kept.append(columns)
        self.line.put(
            number, self.fd if fd < 0 else fd, True, BLOCK, BLOCKS * BLOCK,
            int((time.monotonic() + left_s) * 1e9), self.memory.ctypes.data, *columns,
        )  # fmt: skip

    def written(self) -> list[int]:
        """The blocks that lie in the file; all others must be zero."""
        found = np.fromfile(self.path, dtype=np.uint8).reshape(-1, BLOCK)
        there = [i for i in range(BLOCKS) if found[i].any()]
        wanted = self.memory.reshape(-1, BLOCK)
        assert all(np.array_equal(found[i], wanted[i]) for i in there)
        return there


@pytest.fixture
def scene(tmp_path: Path):
    made = Scene(tmp_path, 1)
    yield made
    os.close(made.fd)


def test_what_is_short_is_ended_before_the_next_is_begun(scene: Scene) -> None:
    for number in (1, 2, 3):
        scene.put(number, list(range(4 * number, 4 * number + 4)))
    assert [scene.line.take(0) for _ in range(3)] == [(i, OK, ANY, 0) for i in (1, 2, 3)]
    assert scene.written() == list(range(4, 16))


class _Any:
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = object.__hash__


ANY = _Any()


def test_what_is_long_lets_others_have_their_turn(scene: Scene) -> None:
    scene.put(1, list(range(20)))
    scene.put(2, [40, 41])
    assert scene.line.take(0) == (2, OK, ANY, 0)
    assert 0 < len(scene.written()) < 10, "the long one had begun, and was not ended first"
    assert scene.line.take(0) == (1, OK, ANY, 0)
    assert scene.written() == [*range(20), 40, 41]


def test_a_call_that_fails_ends_its_batch_alone(scene: Scene) -> None:
    fd = os.open(scene.path, os.O_RDONLY)
    scene.put(1, list(range(10)), fd=fd)
    scene.put(2, [20])
    assert scene.line.take(0) == (1, FAILED, 0, errno.EBADF)
    assert scene.line.take(0) == (2, OK, ANY, 0)
    assert scene.written() == [20]
    os.close(fd)


def test_nothing_is_begun_too_late(scene: Scene) -> None:
    scene.put(1, list(range(10)), left_s=-0.001)
    found = scene.line.take(0)
    assert found is not None
    assert found[:2] == (1, LATE)
    assert not scene.written()


def test_a_thread_that_is_called_comes_back_once(scene: Scene) -> None:
    scene.put(1, [5])
    scene.line.call()
    assert scene.line.take(0) is None
    assert scene.line.take(0) == (1, OK, ANY, 0)


def test_what_is_stopped_before_it_began_does_nothing(scene: Scene) -> None:
    scene.put(1, [1, 2, 3])
    scene.put(2, [7])
    assert scene.line.stop(1)
    assert not scene.line.stop(1), "it has ended"
    assert not scene.line.stop(9), "nobody knows it"
    scene.line.close()
    assert scene.line.take(0) == (2, OK, ANY, 0), "what is there is done"
    assert scene.line.take(0) is None
    assert scene.written() == [7]


def test_runs_of_blocks_that_are_held_are_left_alone(scene: Scene) -> None:
    until = int((time.monotonic() + LATER_S) * 1e9)
    assert scene.line.hold(2 * BLOCK, 3 * BLOCK, until)
    scene.put(1, [2, 3])
    scene.put(2, [9])
    assert scene.line.take(0) == (2, OK, ANY, 0)
    assert scene.written() == [9]
    scene.line.call()
    assert scene.line.take(0) is None
    scene.line.let_go(2 * BLOCK, 3 * BLOCK)
    assert scene.line.take(0) == (1, OK, ANY, 0)
    assert scene.written() == [2, 3, 9]


def num_calls() -> int:
    """System calls of this thread that write."""
    told = Path("/proc/thread-self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in told)["syscw"])


def test_what_lies_together_in_the_file_is_one_call_and_keeps_every_thread_busy(
    tmp_path: Path,
) -> None:
    if not Path("/proc/thread-self/io").exists():
        pytest.skip("this kernel does not count calls")
    for num_threads, blocks, expected in (
        (1, list(range(8)), 2),  # by four
        (1, [0, 1, 2, 4, 6, 7], 3),  # as far as they lie together
        (4, list(range(8)), 6),  # 2, 2, and single ones, which four threads would take
        (16, list(range(32)), 32),  # of many threads each has one
    ):
        scene = Scene(tmp_path, num_threads)
        order = list(blocks)
        random.shuffle(order)
        # Somewhere else in memory, so that only the file is in order.
        offsets = np.array(order, dtype=np.int64) * BLOCK
        lows = np.array(blocks, dtype=np.int64) * BLOCK
        columns = offsets, np.full_like(lows, BLOCK), np.arange(len(lows) + 1), lows, lows + BLOCK
        before = num_calls()
        scene.line.put(
            1, scene.fd, True, BLOCK, BLOCKS * BLOCK, int((time.monotonic() + LATER_S) * 1e9),
            scene.memory.ctypes.data, *columns,
        )  # fmt: skip
        assert scene.line.take(0) == (1, OK, ANY, 0)
        assert num_calls() - before == expected, (num_threads, blocks)
        found = np.fromfile(scene.path, dtype=np.uint8).reshape(-1, BLOCK)
        wanted = scene.memory.reshape(-1, BLOCK)
        assert np.array_equal(found[blocks], wanted[order])
        assert not found[sorted(set(range(BLOCKS)) - set(blocks))].any()
        os.close(scene.fd)


def test_a_run_ends_where_blocks_are_held(scene: Scene) -> None:
    until = int((time.monotonic() + LATER_S) * 1e9)
    assert scene.line.hold(2 * BLOCK, 3 * BLOCK, until)
    scene.put(1, [0, 1, 2, 3])
    scene.put(2, [9])
    assert scene.line.take(0) == (2, OK, ANY, 0)
    assert scene.written() == [0, 1, 9]
    scene.line.let_go(2 * BLOCK, 3 * BLOCK)
    assert scene.line.take(0) == (1, OK, ANY, 0)
    assert scene.written() == [0, 1, 2, 3, 9]


@pytest.mark.parametrize("wrong", ["lengths", "bounds", "highs", "none", "type"])
def test_columns_that_do_not_fit_are_refused(scene: Scene, wrong: str) -> None:
    lows = np.arange(3, dtype=np.int64) * BLOCK
    columns = {
        "offsets": lows,
        "lengths": np.full(3, BLOCK, dtype=np.int64),
        "bounds": np.arange(4, dtype=np.int64),
        "lows": lows,
        "highs": lows + BLOCK,
    }
    if wrong == "lengths":
        columns["lengths"][1] = 0
    elif wrong == "bounds":
        columns["bounds"][3] = 4
    elif wrong == "highs":
        columns["highs"] = columns["highs"][:2]
    elif wrong == "none":
        columns = {name: column[:0] for name, column in columns.items()}
    else:
        columns["lows"] = columns["lows"].astype(np.float64)
    with pytest.raises(ValueError):
        scene.line.put(
            1, scene.fd, True, BLOCK, BLOCKS * BLOCK, 1 << 62, scene.memory.ctypes.data,
            *columns.values(),
        )  # fmt: skip
    scene.line.close()
    assert scene.line.take(0) is None
    with pytest.raises(ValueError):
        scene.line.take(1)


def test_many_batches_of_many_threads_each_end_once(tmp_path: Path) -> None:
    """Some are stopped while threads are at them; what is said of each is said once."""
    scene = Scene(tmp_path, 4)
    ends: list[tuple[int, int]] = []
    lock = threading.Lock()

    def note(lane: int) -> None:
        while True:
            found = scene.line.take(lane)
            if found is None:
                return
            with lock:
                ends.append(found[:2])

    threads = [threading.Thread(target=note, args=(lane,)) for lane in range(4)]
    for thread in threads:
        thread.start()
    stopped = set()
    for number in range(400):
        scene.put(number, random.sample(range(BLOCKS), random.randint(1, BLOCKS)))
        if number % 3 == 0 and scene.line.stop(number):
            stopped.add(number)
        if number % 5 == 0:
            low = random.randrange(BLOCKS) * BLOCK
            assert scene.line.hold(low, low + BLOCK, int((time.monotonic() + LATER_S) * 1e9))
            scene.line.let_go(low, low + BLOCK)
    scene.line.close()
    for thread in threads:
        thread.join(LATER_S)
        assert not thread.is_alive()
    numbers = [number for number, _ in ends]
    assert len(set(numbers)) == len(numbers)
    assert set(numbers) | stopped == set(range(400))
    assert not set(numbers) & stopped
    assert {outcome for _, outcome in ends} <= {OK, STOPPED}
    scene.written()
    os.close(scene.fd)


class _Attributes(ctypes.Structure):
    """What sched_getattr tells; `runtime` is the time slice."""

    _fields_ = (
        ("size", ctypes.c_uint32), ("policy", ctypes.c_uint32), ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32), ("priority", ctypes.c_uint32), ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64), ("period", ctypes.c_uint64),
    )  # fmt: skip


def slice_of(thread_id: int) -> int:
    """Nanoseconds; 0 where the kernel does not tell."""
    own = _Attributes()
    number = {"x86_64": 315, "aarch64": 275}[platform.machine()]
    ctypes.CDLL(None).syscall(number, thread_id, ctypes.byref(own), ctypes.sizeof(own), 0)
    return own.runtime


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="numbers of calls")
def test_threads_of_a_slab_have_short_slices_and_no_others(tmp_path: Path) -> None:
    mine = slice_of(0)
    if not mine:
        pytest.skip("this kernel has no slices of threads")
    before = {thread.ident for thread in threading.enumerate()}
    with FileSlab(tmp_path / "slab", BLOCKS * BLOCK, FileConfig(threads=3)) as slab:
        slab.sync()
        theirs = [t for t in threading.enumerate() if t.ident not in before]
        assert len(theirs) == 3
        eventually(lambda: {slice_of(t.native_id) for t in theirs if t.native_id} == {100_000})
    assert slice_of(0) == mine
