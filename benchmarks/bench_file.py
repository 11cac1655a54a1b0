"""Slabs against plain threads that call preadv and pwritev with O_DIRECT, in one run.

    python -m benchmarks.bench_file --directory DIRECTORY-ON-THE-DISK

Both move the same blocks between the same file and the same huge-page memory, turn by turn, so a
disk that has slow minutes has them for both; the ratio is taken turn by turn. `depth` is the
number of system calls under way at once. A slab is given all blocks of a turn in one call.
Unaligned blocks start 100 bytes beside a block of the file: every edge is read before it is
written. Nothing passes the page cache.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch

from benchmarks.harness import Recorder
from configs.schema import DirectIO, FileConfig
from transfer.backends.direct_io import AlignedBuffer
from transfer.backends.file import FileSlab

SLAB_BYTES = 1 << 30
TURN_BYTES = 128 << 20
WARMUP, SAMPLES = 1, 7
BLOCKS = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
DEPTHS = (1, 4, 8)
UNALIGNED = 100


def offsets_of(pattern: str, nbytes: int, rng: np.random.Generator) -> np.ndarray:
    count, places = TURN_BYTES // nbytes, SLAB_BYTES // nbytes - 1
    if pattern == "sequential":
        return (np.arange(count) + rng.integers(0, places - count)) * nbytes
    return rng.permutation(places)[:count] * nbytes


def plainly(call: Callable[..., int], fd: int, memory: memoryview, offsets: list[int],
            nbytes: int, depth: int) -> None:  # fmt: skip
    """What anybody would write first: as many threads as calls, each with its share."""

    def move(share: slice) -> None:
        for place, offset in list(enumerate(offsets))[share]:
            part = memory[place * nbytes : (place + 1) * nbytes]
            assert call(fd, [part], offset) == nbytes

    threads = [threading.Thread(target=move, args=(slice(i, None, depth),)) for i in range(depth)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def turn(slab: FileSlab, fd: int, memory: torch.Tensor, operation: str, offsets: np.ndarray,
         nbytes: int, depth: int) -> tuple[float, float, float]:  # fmt: skip
    """Seconds of the slab and of the threads, and processor seconds of the slab, per turn."""
    places = np.arange(len(offsets)) * nbytes
    moves = slab.read if operation == "read" else slab.write
    call = os.preadv if operation == "read" else os.pwritev
    view, listed = memoryview(memory.numpy()), offsets.tolist()
    began, cpu = time.perf_counter(), time.process_time()
    moves(memory, places, offsets, nbytes)
    ours, cpu = time.perf_counter() - began, time.process_time() - cpu
    began = time.perf_counter()
    plainly(call, fd, view, listed, nbytes, depth)
    return ours, time.perf_counter() - began, cpu


def fill(path: Path) -> None:
    """What was never written is not read from the disk."""
    memory = torch.from_numpy(AlignedBuffer(TURN_BYTES).array)
    with FileSlab(path, SLAB_BYTES) as slab:
        for start in range(0, SLAB_BYTES, TURN_BYTES):
            slab.write(memory, 0, start, TURN_BYTES)


def measure(recorder: Recorder, path: Path, depth: int) -> None:
    config = FileConfig(direct=DirectIO.REQUIRE, threads=depth)
    rng = np.random.default_rng()
    memory = torch.from_numpy(AlignedBuffer(TURN_BYTES).array)
    memory.numpy()[:] = rng.integers(0, 256, size=TURN_BYTES, dtype=np.uint8)
    with FileSlab(path, SLAB_BYTES, config) as slab, ExitStack() as stack:
        fd = os.open(path, os.O_RDWR | os.O_DIRECT)
        stack.callback(os.close, fd)
        for operation in ("read", "write"):
            for pattern in ("sequential", "random"):
                for nbytes in BLOCKS:
                    turns = [
                        turn(slab, fd, memory, operation, offsets_of(pattern, nbytes, rng),
                             nbytes, depth)
                        for _ in range(WARMUP + SAMPLES)
                    ][WARMUP:]  # fmt: skip
                    labels = {"operation": operation, "pattern": pattern, "block_bytes": nbytes,
                              "depth": depth}  # fmt: skip
                    gigabytes = TURN_BYTES / 1e9
                    recorder.add("slab", "GB/s", [gigabytes / t[0] for t in turns], **labels)
                    recorder.add("threads", "GB/s", [gigabytes / t[1] for t in turns], **labels)
                    recorder.add("slab/threads", "ratio", [t[1] / t[0] for t in turns], **labels)
                    recorder.add("slab_cpu", "s/GB", [t[2] / gigabytes for t in turns], **labels)
        edges(recorder, slab, memory, depth, rng)


def edges(recorder: Recorder, slab: FileSlab, memory: torch.Tensor, depth: int,
          rng: np.random.Generator) -> None:  # fmt: skip
    for operation in ("read", "write"):
        for nbytes in BLOCKS:
            samples = []
            for _ in range(WARMUP + SAMPLES):
                offsets = offsets_of("random", nbytes, rng) + UNALIGNED
                moves = slab.read if operation == "read" else slab.write
                began = time.perf_counter()
                moves(memory, np.arange(len(offsets)) * nbytes, offsets, nbytes)
                samples.append(TURN_BYTES / 1e9 / (time.perf_counter() - began))
            recorder.add("slab_unaligned", "GB/s", samples[WARMUP:], operation=operation,
                         pattern="random", block_bytes=nbytes, depth=depth)  # fmt: skip


def latency(recorder: Recorder, path: Path) -> None:
    """One block at a time, submit to completion: what the threads and the queue add."""
    rng, count, nbytes = np.random.default_rng(), 400, 64 << 10
    memory = torch.from_numpy(AlignedBuffer(nbytes).array)
    view = memoryview(memory.numpy())
    with FileSlab(path, SLAB_BYTES, FileConfig(direct=DirectIO.REQUIRE)) as slab:
        fd = os.open(path, os.O_RDWR | os.O_DIRECT)
        ours, plain = [], []
        for offset in (rng.integers(0, SLAB_BYTES // nbytes, size=count) * nbytes).tolist():
            began = time.perf_counter()
            slab.read(memory, 0, offset, nbytes)
            between = time.perf_counter()
            os.preadv(fd, [view], (offset + SLAB_BYTES // 2) % SLAB_BYTES)
            ended = time.perf_counter()
            ours.append(1e6 * (between - began))
            plain.append(1e6 * (ended - between))
        os.close(fd)
    recorder.add("slab_latency", "us", ours, operation="read", block_bytes=nbytes)
    recorder.add("call_latency", "us", plain, operation="read", block_bytes=nbytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=None, help="default: a temporary one")
    arguments = parser.parse_args()
    recorder = Recorder("file")
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        path = Path(directory) / "slab"
        fill(path)
        latency(recorder, path)
        for depth in DEPTHS:
            measure(recorder, path, depth)
    recorder.write()


if __name__ == "__main__":
    main()
