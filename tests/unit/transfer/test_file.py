"""A slab's life, its refusals, its queue and its deadlines."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.schema import DirectIO, FileConfig, SyncPolicy
from tests.support.disk_calls import in_python, replace
from tests.support.engines import open_descriptors
from tests.support.waits import eventually
from transfer import StorageBusy, StorageFailed, TransferTimeout
from transfer.backends.block_locks import BlockLocks
from transfer.backends.direct_io import direct_alignment, read_fully, write_fully
from transfer.backends.file import FileSlab
from transfer.errors import TransferError
from transfer.storage.batch_queue import BatchQueue

SLAB_BYTES = 1 << 20
SMALL = FileConfig(threads=2, io_bytes=1 << 16)
SOON_S = 60.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "slab"


@pytest.fixture
def slab(path: Path) -> Iterator[FileSlab]:
    with FileSlab(path, SLAB_BYTES, SMALL) as slab:
        yield slab


def content(nbytes: int = SLAB_BYTES) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


def test_bytes_survive_the_slab(path: Path) -> None:
    data, found = content(), torch.zeros(SLAB_BYTES, dtype=torch.uint8)
    with FileSlab(path, SLAB_BYTES, SMALL) as slab:
        slab.write(data, 0, 0, SLAB_BYTES)
        slab.sync()
    with FileSlab(path, SLAB_BYTES, SMALL) as slab:
        slab.read(found, 0, 0, SLAB_BYTES)
    assert torch.equal(data, found)


def test_the_file_is_whole_from_the_start_and_ours_alone(slab: FileSlab, path: Path) -> None:
    status = path.stat()
    assert status.st_size == SLAB_BYTES
    assert status.st_blocks * 512 >= SLAB_BYTES, "no holes"
    assert status.st_mode & 0o777 == 0o600
    # This file system has direct access, or the reason why it is not used is told.
    assert slab.alignment.direct == (slab.alignment.why_buffered == "")


def test_direct_access_passes_the_page_cache(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    alignment = direct_alignment(descriptor)
    os.close(descriptor)
    if not alignment.direct:
        pytest.skip(f"no direct access here: {alignment.why_buffered}")
    config = SMALL.model_copy(update={"direct": DirectIO.REQUIRE})
    with FileSlab(path, SLAB_BYTES, config) as slab:
        assert slab.alignment == alignment
        flags = Path(f"/proc/self/fdinfo/{slab._access.fd}").read_text()
        assert int(flags.split("flags:")[1].split()[0], 8) & os.O_DIRECT


def test_a_file_system_without_direct_access_is_told_apart(
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = Path("/dev/shm") / f"moe-test-{os.getpid()}-{time.monotonic_ns()}"
    require = SMALL.model_copy(update={"direct": DirectIO.REQUIRE})
    with pytest.raises(StorageFailed, match="direct access"):
        FileSlab(path, SLAB_BYTES, require).open()
    assert not path.exists(), "what was made is removed"
    try:
        with FileSlab(path, SLAB_BYTES, SMALL) as slab:
            assert "direct access" in slab.alignment.why_buffered
            data, found = content(3000), torch.zeros(3000, dtype=torch.uint8)
            slab.write(data, 0, 17, 3000)
            slab.read(found, 0, 17, 3000)
            assert torch.equal(data, found)
        assert "page cache" in caplog.text
    finally:
        path.unlink(missing_ok=True)


def test_who_takes_the_flag_and_refuses_what_comes_after_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an overlay over a file system in memory does, before Linux 6.6."""
    with FileSlab(path, SLAB_BYTES, SMALL) as slab:
        if not slab.alignment.direct:
            pytest.skip(f"no direct access here: {slab.alignment.why_buffered}")
    path.unlink()
    preadv, refused = os.preadv, []

    def refuse(fd: int, places: list[memoryview], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(offset)
            raise OSError(errno.EINVAL, "Invalid argument")
        return preadv(fd, places, offset)

    monkeypatch.setattr(os, "preadv", refuse)
    require = SMALL.model_copy(update={"direct": DirectIO.REQUIRE})
    with pytest.raises(StorageFailed, match="refuses direct access"):
        FileSlab(path, SLAB_BYTES, require).open()
    assert not path.exists(), "what was made is removed"
    with FileSlab(path, SLAB_BYTES, SMALL) as slab:
        assert len(refused) == 2
        assert "refuses direct access" in slab.alignment.why_buffered
        assert not fcntl.fcntl(slab._access.fd, fcntl.F_GETFL) & os.O_DIRECT
        data, found = content(3000), torch.zeros(3000, dtype=torch.uint8)
        slab.write(data, 0, 17, 3000)
        slab.read(found, 0, 17, 3000)
        assert torch.equal(data, found)


def test_a_second_owner_is_refused(slab: FileSlab, path: Path) -> None:
    with pytest.raises(StorageBusy) as caught:
        FileSlab(path, SLAB_BYTES, SMALL).open()
    assert caught.value.retryable
    assert path.exists(), "the owner's file stays"
    slab.close()
    with FileSlab(path, SLAB_BYTES, SMALL):
        pass


def test_files_that_are_not_ours_alone_are_refused(path: Path, tmp_path: Path) -> None:
    path.write_bytes(b"x" * 10)
    path.chmod(0o600)
    with pytest.raises(StorageFailed, match="has 10 bytes"):
        FileSlab(path, SLAB_BYTES, SMALL).open()
    path.chmod(0o640)
    with pytest.raises(StorageFailed, match="lets others in"):
        FileSlab(path, SLAB_BYTES, SMALL).open()
    assert path.read_bytes() == b"x" * 10
    link, fifo = tmp_path / "link", tmp_path / "fifo"
    link.symlink_to(path)
    os.mkfifo(fifo, 0o600)
    for refused in (link, fifo, tmp_path, tmp_path / "nowhere" / "slab"):
        with pytest.raises(StorageFailed):
            FileSlab(refused, SLAB_BYTES, SMALL).open()
    with pytest.raises(ValueError, match="positive"):
        FileSlab(path, 0)


@pytest.mark.parametrize(
    ("memory_offset", "slab_offset", "length"),
    [(0, SLAB_BYTES - 1, 2), (0, -1, 1), (4095, 0, 2), (-1, 0, 1), (0, 1 << 62, 1), (0, 0, -1)],
)
def test_pieces_out_of_bounds(
    slab: FileSlab, memory_offset: int, slab_offset: int, length: int
) -> None:
    memory = torch.zeros(4096, dtype=torch.uint8)
    for call in (slab.read, slab.write):
        with pytest.raises(ValueError, match=r"inside|negative"):
            call(memory, memory_offset, slab_offset, length)
    with pytest.raises(ValueError, match="contiguous"):
        slab.read(torch.zeros(8, 8)[:, ::2], 0, 0, 1)


def test_a_call_without_bytes_does_nothing(slab: FileSlab) -> None:
    memory = torch.zeros(1, dtype=torch.uint8)
    slab.write(memory, 0, 0, 0)
    slab.read(memory, [], [], [])


def test_thousands_of_pieces_are_one_call(slab: FileSlab) -> None:
    count, length = 4096, 256
    data, found = content(), torch.zeros(SLAB_BYTES, dtype=torch.uint8)
    order = np.random.default_rng().permutation(count) * length
    slab.write(data, np.arange(count) * length, order, length)
    slab.read(found, np.arange(count) * length, order, length)
    assert torch.equal(data, found)


def test_each_write_can_be_durable(path: Path) -> None:
    config = SMALL.model_copy(update={"sync": SyncPolicy.EACH_WRITE})
    with FileSlab(path, SLAB_BYTES, config) as slab:
        flags = Path(f"/proc/self/fdinfo/{slab._access.fd}").read_text()
        assert int(flags.split("flags:")[1].split()[0], 8) & os.O_DSYNC
        slab.write(content(), 0, 0, SLAB_BYTES)


def test_a_closed_slab_refuses(path: Path) -> None:
    slab = FileSlab(path, SLAB_BYTES, SMALL)
    memory = torch.zeros(16, dtype=torch.uint8)
    for _ in range(2):
        for call in (lambda: slab.read(memory, 0, 0, 16), slab.sync):
            with pytest.raises(StorageFailed, match="not open"):
                call()
        slab.open()
        slab.write(memory, 0, 0, 16)
        with pytest.raises(StorageFailed, match="is open"):
            slab.open()
        slab.close()
        slab.close()


def test_an_operation_ends_at_its_deadline_while_the_disk_hangs(
    slab: FileSlab, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang, entered = threading.Event(), threading.Event()

    def hanging(*arguments: object) -> None:
        entered.set()
        hang.wait(SOON_S)

    replace(monkeypatch, hanging, writes=False)
    memory = torch.zeros(4096, dtype=torch.uint8)
    try:
        with pytest.raises(TransferTimeout, match="read"):
            slab.read(memory, 0, 0, 4096, timeout_s=3.0)
        assert entered.is_set()
    finally:
        hang.set()
    monkeypatch.undo()
    slab.read(memory, 0, 0, 4096)


class SlowWork:
    """Extents that wait for permission."""

    def __init__(self, extents: int) -> None:
        self.extents = extents
        self.go = threading.Event()
        self.moved: list[int] = []

    def __len__(self) -> int:
        return self.extents

    def weigh(self, index: int) -> int:
        return 1

    def perform(self, index: int, lane: int) -> None:
        assert self.go.wait(SOON_S)
        self.moved.append(index)


def new_queue(queued_max: int = 2) -> BatchQueue:
    queue = BatchQueue(
        "slab",
        backend="file",
        threads=1,
        queued_max=queued_max,
        turn_bytes=1,
        closed=lambda name, operation: StorageFailed(name, operation, "closed"),
    )
    queue.open()
    return queue


def test_the_queue_is_bounded_and_fair() -> None:
    queue, ended = new_queue(), []
    large, small = SlowWork(50), SlowWork(1)
    late = time.monotonic() + SOON_S
    queue.submit(large, "read", late, lambda error: ended.append(("large", error)))
    queue.submit(small, "read", late, lambda error: ended.append(("small", error)))
    with pytest.raises(TransferTimeout):
        queue.submit(SlowWork(1), "read", time.monotonic() + 0.02, ended.append)
    large.go.set()
    small.go.set()
    last = SlowWork(1)
    last.go.set()
    queue.submit(last, "read", late, lambda error: ended.append(("last", error)))
    assert queue.close()
    assert next(name for name, _ in ended) == "small", "it did not wait for the large one's end"
    assert len(ended) == 3
    assert queue.num_alive == 0


def test_overdue_batches_are_not_begun_and_closing_fails_the_rest() -> None:
    queue, ended = new_queue(3), {}
    first, overdue, rest = SlowWork(2), SlowWork(1), SlowWork(1)
    late = time.monotonic() + SOON_S

    def note(name: str) -> object:
        return lambda error: ended.setdefault(name, error)

    queue.submit(first, "read", late, note("first"))
    queue.submit(overdue, "read", time.monotonic(), note("overdue"))
    time.sleep(0.02)
    queue.submit(rest, "read", late, note("rest"))

    def let_go() -> None:
        eventually(lambda: queue._closed, "it is being closed")
        first.go.set()

    letting = threading.Thread(target=let_go)
    letting.start()
    assert queue.close()
    letting.join()
    assert isinstance(ended["overdue"], StorageFailed | TransferTimeout)
    assert isinstance(ended["rest"], StorageFailed)
    assert not overdue.moved
    assert not rest.moved
    with pytest.raises(StorageFailed):
        queue.submit(rest, "read", late, note("closed"))


def test_one_failure_ends_the_batch_and_a_bug_is_no_hang() -> None:
    queue, ended = new_queue(), []

    class Failing(SlowWork):
        def perform(self, index: int, lane: int) -> None:
            self.moved.append(index)
            raise RuntimeError("a bug")

    work, come = Failing(100), threading.Event()

    def note(error: TransferError | None) -> None:
        ended.append(error)
        come.set()
        raise RuntimeError("another bug")

    queue.submit(work, "read", time.monotonic() + SOON_S, note)
    assert come.wait(SOON_S)
    assert work.moved == [0]
    assert "a bug" in str(ended[0])
    good = SlowWork(1)
    good.go.set()
    done = threading.Event()
    queue.submit(good, "read", time.monotonic() + SOON_S, lambda error: done.set())
    assert done.wait(SOON_S), "the thread lives on"
    queue.close()


def test_block_locks() -> None:
    locks, late = BlockLocks(), time.monotonic() + SOON_S
    assert locks.acquire(0, 10, alone=False, deadline=late)
    assert locks.acquire(5, 15, alone=False, deadline=late), "whole blocks go together"
    assert not locks.acquire(14, 16, alone=True, deadline=time.monotonic())
    assert locks.acquire(15, 16, alone=True, deadline=late)
    assert not locks.acquire(15, 16, alone=False, deadline=time.monotonic() + 0.01)
    threading.Timer(0.02, lambda: locks.release(15, 16, alone=True)).start()
    assert locks.acquire(15, 16, alone=False, deadline=late), "it waits for its turn"
    for low, high in ((0, 10), (5, 15), (15, 16)):
        locks.release(low, high, alone=False)
    assert locks.acquire(0, 100, alone=True, deadline=time.monotonic())


def test_short_calls_are_taken_up_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom(10_000)
    path.write_bytes(data)
    descriptor = os.open(path, os.O_RDWR)
    real_read, real_write = os.preadv, os.pwritev

    def some(places: list[memoryview], limit: int) -> list[memoryview]:
        return [places[0][:limit]]

    in_python(monkeypatch)
    monkeypatch.setattr(os, "preadv", lambda f, p, o: real_read(f, some(p, 700), o))
    monkeypatch.setattr(os, "pwritev", lambda f, p, o: real_write(f, some(p, 300), o))
    try:
        target = bytearray(9_000)
        view = memoryview(target)
        read_fully(descriptor, [view[:10], view[10:8_000], view[8_000:]], 500, "slab")
        assert target == data[500:9_500]
        write_fully(descriptor, [view[:10], view[10:]], 1_000, "slab")
        assert path.read_bytes() == data[:1_000] + data[500:9_500]
    finally:
        os.close(descriptor)


def test_nothing_is_left_after_many_lives(path: Path) -> None:
    memory = content(5000)
    before, threads = open_descriptors(), threading.active_count()
    for _ in range(50):
        with FileSlab(path, SLAB_BYTES, SMALL) as slab:
            slab.write(memory, 0, 123, 5000)
    assert open_descriptors() <= before
    assert threading.active_count() <= threads
    assert [found.name for found in path.parent.iterdir()] == ["slab"]


def test_a_forked_child_has_no_slab(slab: FileSlab) -> None:
    memory = content(4096)
    slab.write(memory, 0, 0, 4096)
    descriptor = slab._access.fd
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.fstat(descriptor)
        except OSError:
            try:
                slab.read(memory, 0, 0, 1)
            except StorageFailed:
                code = 0
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    slab.read(memory, 0, 0, 4096)
