"""Files that fail: cut short, full, broken, or left by a process that was killed while it wrote."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.schema import FileConfig
from tests.support.disk_calls import in_python
from tests.support.slab_writer import content, records
from transfer import StorageFailed, StorageFull
from transfer.backends.file import FileSlab

SLAB_BYTES = 1 << 20
SMALL = FileConfig(threads=2, io_bytes=1 << 16)
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def slab(tmp_path: Path) -> Iterator[FileSlab]:
    with FileSlab(tmp_path / "slab", SLAB_BYTES, SMALL) as slab:
        yield slab


def memory() -> torch.Tensor:
    return torch.randint(1, 256, (SLAB_BYTES,), dtype=torch.uint8)


@pytest.mark.parametrize("left", [0, 100_000, 131_072, SLAB_BYTES - 1])
def test_a_file_cut_short_under_us(slab: FileSlab, left: int) -> None:
    data, found = memory(), torch.zeros(SLAB_BYTES, dtype=torch.uint8)
    slab.write(data, 0, 0, SLAB_BYTES)
    os.truncate(slab.path, left)
    with pytest.raises(StorageFailed, match="cut short") as caught:
        slab.read(found, 0, 0, SLAB_BYTES)
    assert caught.value.path == str(slab.path)
    assert caught.value.operation == "read"
    assert left - 4096 < caught.value.offset + 4096 <= SLAB_BYTES
    with pytest.raises(StorageFailed, match="cut short"):
        slab.write(data, 0, 500_000, 10_000)
    assert slab.path.stat().st_size == left, "the write did not make it longer again"
    whole = left // 4096 * 4096
    if whole:
        slab.read(found, 0, 0, whole)
        assert torch.equal(found[:whole], data[:whole])


def test_a_broken_disk_is_an_error_with_its_number(slab: FileSlab) -> None:
    """The descriptor's number is given to a file whose start cannot be read: a real EIO."""
    broken = os.open("/proc/self/mem", os.O_RDWR)
    kept = os.dup(slab._access.fd)
    try:
        os.dup2(broken, slab._access.fd, inheritable=False)
        with pytest.raises(StorageFailed) as caught:
            slab.read(memory(), 0, 0, 4096)
        assert caught.value.errno == errno.EIO
        assert caught.value.offset == 0
        assert not caught.value.retryable
        os.dup2(kept, slab._access.fd, inheritable=False)
        slab.read(memory(), 0, 0, 4096)
    finally:
        os.close(broken)
        os.close(kept)


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOSPC, StorageFull), (errno.EDQUOT, StorageFull), (errno.EIO, StorageFailed)],
)
def test_failing_writes(
    slab: FileSlab, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[StorageFailed]
) -> None:
    calls: list[int] = []

    def failing(fd: int, places: object, offset: int) -> int:
        calls.append(offset)
        raise OSError(number, os.strerror(number))

    in_python(monkeypatch)
    monkeypatch.setattr(os, "pwritev", failing)
    with pytest.raises(kind) as caught:
        slab.write(memory(), 0, 65_536, 8_192)
    assert type(caught.value) is kind
    assert (caught.value.errno, caught.value.offset, calls) == (number, 65_536, [65_536])
    monkeypatch.undo()
    slab.write(memory(), 0, 65_536, 8_192)


def test_a_descriptor_closed_under_us(slab: FileSlab) -> None:
    kept = os.dup(slab._access.fd)
    os.close(slab._access.fd)
    try:
        for call in (slab.read, slab.write):
            with pytest.raises(StorageFailed) as caught:
                call(memory(), 0, 0, 4096)
            assert caught.value.errno == errno.EBADF
    finally:
        os.dup2(kept, slab._access.fd, inheritable=False)
        os.close(kept)


def test_a_full_disk_leaves_no_file(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(small)]
    if (
        not shutil.which("mount")
        or subprocess.run(mount, capture_output=True, timeout=30).returncode
    ):
        pytest.skip("no right to mount a small file system")
    try:
        with pytest.raises(StorageFull) as caught:
            FileSlab(small / "slab", SLAB_BYTES, SMALL).open()
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.retryable
        assert "bytes are needed, 262144 are free" in str(caught.value)
        assert list(small.iterdir()) == []
        with FileSlab(small / "slab", 128 << 10, SMALL) as slab:
            slab.write(memory(), 0, 0, 128 << 10)
    finally:
        subprocess.run(["umount", str(small)], check=True, timeout=30)


@pytest.mark.parametrize("is_told", [True, False])
def test_a_disk_that_is_too_small_is_not_filled_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_told: bool
) -> None:
    """What others need is not taken from them until the system says no, where it tells its room."""
    asked, fstatvfs = [], os.fstatvfs

    def untold(fd: int) -> os.statvfs_result:
        return os.statvfs_result([*fstatvfs(fd)[:2], *[0] * 9])

    def full(fd: int, offset: int, nbytes: int) -> None:
        asked.append(nbytes)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    if not is_told:
        monkeypatch.setattr(os, "fstatvfs", untold)
    nbytes = (1 << 50) + os.statvfs(tmp_path).f_bfree * os.statvfs(tmp_path).f_frsize
    with pytest.raises(StorageFull, match=r"No space left on device: \d+ bytes are needed"):
        FileSlab(tmp_path / "slab", nbytes, SMALL).open()
    assert bool(asked) is not is_told
    assert list(tmp_path.iterdir()) == []


def test_the_limit_of_file_sizes(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SLAB_BYTES // 2, hard))
    try:
        with pytest.raises(StorageFull) as caught:
            FileSlab(tmp_path / "slab", SLAB_BYTES, SMALL).open()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stop_after", [3, 40, 150])
def test_a_killed_writer_loses_no_ended_write(tmp_path: Path, stop_after: int) -> None:
    seed, path, slab_bytes = random.SystemRandom().getrandbits(32), tmp_path / "slab", 4 << 20
    command = [sys.executable, "-m", "tests.support.slab_writer", str(path), str(slab_bytes)]
    with subprocess.Popen([*command, str(seed)], cwd=ROOT, stdout=subprocess.PIPE) as writer:
        try:
            ended = [int(writer.stdout.readline()) for _ in range(stop_after)]
        finally:
            writer.kill()
        ended += [int(line) for line in writer.stdout.read().splitlines() if line]
    assert writer.wait(30) == -9, "it was killed while it wrote"
    found, places = torch.zeros(slab_bytes, dtype=torch.uint8), records(seed, slab_bytes)
    assert len(ended) < len(places)
    with FileSlab(path, slab_bytes, SMALL) as slab:
        slab.read(found, 0, 0, slab_bytes)
    for record in ended:
        offset, length = places[record]
        piece = found.numpy()[offset : offset + length]
        assert np.array_equal(piece, content(seed, record, length)), f"seed {seed} record {record}"
