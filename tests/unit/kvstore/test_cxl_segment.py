"""A byte-addressable path: memory behind a file (tmpfs), and a device that demands alignment.

No dax device is needed: /dev/zero is a character device that can be mapped shared, and what the
kernel tells of a device stands in a folder that a test can put in the place of sysfs.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import secrets
import time
from pathlib import Path

import numpy as np
import pytest

from kvstore.errors import SegmentUnusable
from kvstore.node import cxl_segment
from kvstore.node.cxl_segment import DEFAULT_ALIGNMENT, CxlSegment
from transfer import StorageBusy, StorageFailed
from transfer.pieces import make_pieces

SIZE = 3 << 20
TMPFS = Path("/dev/shm")


@pytest.fixture
def memory_file():
    if not TMPFS.is_dir() or not os.access(TMPFS, os.W_OK):
        pytest.skip("no file system in memory that can be written to")
    path = TMPFS / f"moe-runtime-test-{secrets.token_hex(8)}"
    path.touch(mode=0o600)
    os.truncate(path, SIZE)
    yield path
    path.unlink()


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """/dev/zero, of which sysfs tells what a test says."""
    status = os.stat("/dev/zero")
    folder = tmp_path / f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    folder.mkdir()
    monkeypatch.setattr(cxl_segment, "DEVICES", tmp_path)

    def tell(size: int, align: int | None) -> Path:
        (folder / "size").write_text(f"{size}\n", encoding="ascii")
        if align is not None:
            (folder / "align").write_text(f"{align}\n", encoding="ascii")
        return Path("/dev/zero")

    return tell


def mapped_bytes(segment: CxlSegment) -> int:
    """Length of the mapping in which the segment begins, as the kernel has it."""
    assert segment.array is not None
    start = segment.array.ctypes.data
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        low, high = (int(number, 16) for number in line.split(" ", 1)[0].split("-"))
        if low <= start < high:
            assert low == start
            return high - low
    raise AssertionError(hex(start))


def write_everywhere(segment: CxlSegment, nbytes: int) -> np.ndarray:
    content = np.random.default_rng().integers(0, 256, nbytes, dtype=np.uint8)
    pieces, deadline = make_pieces(0, 0, nbytes), time.monotonic() + 10.0
    segment.write(content, pieces, deadline)
    found = np.zeros(nbytes, dtype=np.uint8)
    segment.read(found, pieces, deadline)
    assert np.array_equal(found, content)
    return content


def _read(path: Path, pipe) -> None:
    pipe.send(path.read_bytes())


def test_memory_behind_a_file_is_that_memory(memory_file: Path) -> None:
    segment = CxlSegment(memory_file, SIZE)
    segment.open()
    content = write_everywhere(segment, SIZE)
    # Nothing is written back first: another process finds the bytes where they are.
    context = multiprocessing.get_context("fork")
    pipe, theirs = context.Pipe()
    reader = context.Process(target=_read, args=(memory_file, theirs))
    reader.start()
    assert pipe.poll(20.0)
    assert pipe.recv() == content.tobytes()
    reader.join()
    with pytest.raises(StorageBusy):
        CxlSegment(memory_file, SIZE).open()
    lent = segment.lend().numpy()[-100:]
    segment.close()
    assert np.array_equal(lent, content[-100:]), "views outlive it"
    with pytest.raises(StorageBusy):  # somebody may still write there
        CxlSegment(memory_file, SIZE).open()
    del lent, segment
    gc.collect()
    again = CxlSegment(memory_file, SIZE)
    assert len(again.open().blocks()) == 0, "nothing is believed after a restart"
    again.close()


@pytest.mark.parametrize("align", [None, 4096, 2 << 20, 4 << 20])
def test_whole_alignments_of_a_device_are_mapped(device, align: int | None) -> None:
    demanded = align or DEFAULT_ALIGNMENT
    nbytes = SIZE + 100
    segment = CxlSegment(device(64 << 20, align), nbytes)
    segment.open()
    assert mapped_bytes(segment) == -(-nbytes // demanded) * demanded
    assert segment.array is not None
    assert len(segment.array) == nbytes, "what is behind it is not lent"
    write_everywhere(segment, nbytes)
    segment.close()


def test_a_device_that_is_too_small(device) -> None:
    exact = device(4 << 20, 2 << 20)
    segment = CxlSegment(exact, 4 << 20)
    segment.open()
    segment.close()
    for size, align in ((4 << 20, 2 << 20), (3 << 20, 2 << 20)):
        with pytest.raises(SegmentUnusable) as caught:
            CxlSegment(device(size, align), size + 1 if size == 4 << 20 else size).open()
        assert f"{size} bytes" in caught.value.seen


def test_a_device_of_which_nothing_is_known(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(cxl_segment, "DEVICES", tmp_path)
    with pytest.raises(SegmentUnusable, match="0 bytes"):
        CxlSegment(Path("/dev/zero"), SIZE).open()


def test_a_file_without_a_name_is_no_path() -> None:
    """/proc gives memory files only links, and links are not followed."""
    descriptor = os.memfd_create("test")
    try:
        os.ftruncate(descriptor, SIZE)
        with pytest.raises(StorageFailed):
            CxlSegment(Path(f"/proc/self/fd/{descriptor}"), SIZE).open()
    finally:
        os.close(descriptor)
