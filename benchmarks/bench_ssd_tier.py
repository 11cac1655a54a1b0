"""The SSD tier against plain threads that call preadv and pwritev with O_DIRECT, in one run.

    python -m benchmarks.bench_ssd_tier --directory DIRECTORY-ON-THE-DISK

A client puts and gets blocks of 1 MiB through a store node whose only segment is a file on the
disk, with a master in a process of its own, checksums and all. `near` is a client in the node's
own process, `far` one in another process of the same host; each is used by one caller with one
batch, or by four at once with a few blocks each, whose threads are there before. A get has ended
when its bytes are there; its lease is given back a moment later. Turn by turn the same number of
bytes goes to and from the same file, by as many threads as the segment has (`depth`): what the
disk gives. They write
back what they have read there, so the node loses nothing. (Of two files on one disk, both written
before, one may take writes a sixth faster than the other.) Which of the two comes first changes
from turn to turn, and the ratio is taken turn by turn. A turn of 96 blocks is over in 20 ms, much
of which is how the disk gets busy and is left again; that is measured, and beside it
(`sustained`) turns of four times as many: the same calls, one behind the other, of the same
memory under new keys, and as many calls of plain threads on the same file. Nothing passes the
page cache, neither side waits until the disk has made its writes durable, and all of the file has
been written before (the first write to a place takes the file system twice as long). Plain
threads need almost
no processor, the store needs it for checksums and, far, for a copy of what is got (`ssd_tier_cpu`,
both processes and the master): on a machine whose cores are busy (`load`) the ratio says how
busy they are.
With `--deepnvme` the segment's file is read and written by DeepSpeed's handles instead of threads.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

from benchmarks.bench_file import plainly
from benchmarks.harness import Recorder
from configs.schema import KVStoreConfig, TransferConfig
from kvstore import MasterServer, StoreClient, StoreNode
from transfer import TransferEngine, allocate
from transfer.backends.direct_io import AlignedBuffer
from transfer.backends.file import FileSlab

BLOCK = 1 << 20
SEGMENT_BYTES = 1 << 30
BLOCKS = 96  # of a turn; a region has as many
SUSTAINED_BLOCKS = 4 * BLOCKS  # of a turn that lasts
BATCH = 8  # blocks of one call, where several callers share a turn
CALLERS = (1, 4)
WARMUP, SAMPLES, SUSTAINED_SAMPLES = 1, 9, 7
DEPTHS = (4, 8)
WAIT_S = 60.0


class Side:
    """A client, and a node if it lends something; `stack` ends it."""

    def __init__(
        self, stack: ExitStack, master: str, secret: bytes, config: KVStoreConfig, *, lends: bool,
        make_slab: Callable[..., FileSlab] | None = None,
    ) -> None:  # fmt: skip
        self.engine = TransferEngine(TransferConfig(), name=secrets.token_hex(8), secret=secret)
        node = None
        if lends:
            node = StoreNode(self.engine, master, config, secret=secret, make_slab=make_slab)
            self.engine.on_notify(node.on_notify)
        self.client = StoreClient(self.engine, master, config, secret=secret, local_node=node)
        self.engine.on_notify(self.client.on_notify)
        stack.enter_context(self.engine)
        if node is not None:
            stack.enter_context(node)
            assert node.wait_registered(WAIT_S)
        stack.enter_context(self.client)
        # Callers are there before they are measured, as a server's threads are.
        self.pools = {n: stack.enter_context(ThreadPoolExecutor(n)) for n in CALLERS}
        for callers, pool in self.pools.items():
            together = threading.Barrier(callers)
            list(pool.map(lambda _, together=together: together.wait(), range(callers)))
        memory = allocate(BLOCKS * BLOCK)
        stack.callback(memory.close)
        self.memory = memory.tensor.numpy()
        self.memory[:] = np.random.default_rng().integers(0, 256, len(self.memory), dtype=np.uint8)
        self.region = self.engine.register(memory)

    def put(self, keys: list[bytes], callers: int) -> float:
        return self._share(self._put, keys, callers)

    def get(self, keys: list[bytes], callers: int) -> float:
        return self._share(self._get, keys, callers)

    def _share(self, move: Callable[..., int], keys: list[bytes], callers: int) -> float:
        """Seconds for all blocks; of several callers each takes the next few until none is left."""
        step = BLOCKS if callers == 1 else BATCH
        began = time.perf_counter()
        starts = range(0, len(keys), step)
        moved = list(self.pools[callers].map(lambda start: move(keys, start, step), starts))
        elapsed = time.perf_counter() - began
        assert sum(moved) == len(keys), moved
        return elapsed

    def _put(self, keys: list[bytes], start: int, step: int) -> int:
        offsets = np.arange(start, start + step) % BLOCKS * BLOCK
        outcomes = self.client.put(keys[start : start + step], self.region, offsets, BLOCK)
        return sum(outcome == "stored" for outcome in outcomes)

    def _get(self, keys: list[bytes], start: int, step: int) -> int:
        hit = self.client.lookup_prefix(keys[start : start + step])
        offsets = np.arange(start, start + step) % BLOCKS * BLOCK
        good = self.client.get_into(hit, self.region, offsets)
        self.client.release(hit, wait=False)  # the bytes are there
        return good


def slab_maker(deepnvme: bool) -> Callable[..., FileSlab] | None:
    if not deepnvme:
        return None
    from moe_runtime.integrations.deepnvme import deepnvme_slab

    if (maker := deepnvme_slab()) is None:
        raise SystemExit("DeepSpeed is not installed, or its async_io extension cannot be built")
    return maker


def serve(pipe: Connection, master: str, secret: bytes, config: KVStoreConfig, deep: bool) -> None:
    """The node, in a process of its own; it also plays the near client."""
    with ExitStack() as stack:
        side = Side(stack, master, secret, config, lends=True, make_slab=slab_maker(deep))
        pipe.send(None)
        while (request := pipe.recv()) is not None:
            operation, *arguments = request
            result = getattr(side, operation)(*arguments) if arguments else time.process_time()
            pipe.send(result)


def lead(pipe: Connection, config: KVStoreConfig, secret: bytes) -> None:
    """The master, in a process of its own: it shares an interpreter with no client."""
    with MasterServer(config, secret=secret) as master:
        pipe.send(master.address)
        while pipe.recv() is not None:
            pipe.send(time.process_time())


def start(stack: ExitStack, target: Callable[..., None], *arguments: object) -> Connection:
    """Run a function in a process of its own; return the parent's end of its pipe."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments))
    process.start()
    stack.callback(process.join)
    stack.callback(pipe.send, None)
    assert pipe.poll(WAIT_S)
    return pipe


def remote(pipe: Connection, *request: object) -> float:
    """Seconds that an operation took over there; of "cpu", the processor's so far."""
    pipe.send(request)
    assert pipe.poll(WAIT_S)
    return float(pipe.recv())


def open_written(path: Path, view: memoryview) -> tuple[int, int]:
    """Open a slab that a node has made, and write all of it once; return how many blocks it has.

    The first block is left alone: what the node says of the slab is there.
    """
    fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    num_blocks = os.fstat(fd).st_size // BLOCK
    for first in range(1, num_blocks, BLOCKS):
        offsets = [block * BLOCK for block in range(first, min(first + BLOCKS, num_blocks))]
        for call in (os.preadv, os.pwritev):
            plainly(call, fd, view, offsets, BLOCK, 1)
    return fd, num_blocks


class Scene:
    """A master, a node with its near client, a far one, and plain threads on the node's file."""

    def __init__(self, stack: ExitStack, directory: Path, depth: int, deep: bool) -> None:
        secret = secrets.token_bytes(16)
        path = directory / f"slab-{depth}"
        segment = {"medium": "ssd", "bytes": SEGMENT_BYTES, "path": path,
                   "threads": depth, "direct": "require",
                   "reader": "deepnvme" if deep else "threads"}  # fmt: skip
        config = KVStoreConfig(
            segments=(segment,), scrub={"enabled": False}, request_timeout_s=WAIT_S
        )
        self.depth = depth
        self.rng = np.random.default_rng()
        memory = torch.from_numpy(AlignedBuffer(SUSTAINED_BLOCKS * BLOCK).array)
        self.view = memoryview(memory.numpy())
        self.master = start(stack, lead, config, secret)
        address = self.master.recv()
        self.pipe = start(stack, serve, address, secret, config, deep)
        self.pipe.recv()
        self.fd, self.num_blocks = open_written(path, self.view)
        stack.callback(os.close, self.fd)
        self.far = Side(stack, address, secret, config, lends=False)

    def cpu(self) -> float:
        """Of all three processes, in seconds."""
        return time.process_time() + remote(self.pipe, "cpu") + remote(self.master, "cpu")

    def turn(self, number: int, side: str, callers: int, blocks: int) -> dict[str, float]:
        """Seconds of the store and of plain threads, and the store's of the processor."""
        keys = [secrets.token_bytes(16) for _ in range(blocks)]
        places = self.rng.permutation(np.arange(1, self.num_blocks))[:blocks]
        offsets = (places * BLOCK).tolist()
        found = {}

        def plain(operation: str, call: Callable[..., int]) -> None:
            if operation == "put":  # what lies there
                plainly(os.preadv, self.fd, self.view, offsets, BLOCK, self.depth)
            began = time.perf_counter()
            plainly(call, self.fd, self.view, offsets, BLOCK, self.depth)
            found[f"raw_{operation}"] = time.perf_counter() - began

        for operation, call in (("put", os.pwritev), ("get", os.preadv)):
            if number % 2:
                plain(operation, call)
            busy = self.cpu()
            if side == "far":
                found[operation] = getattr(self.far, operation)(keys, callers)
            else:
                found[operation] = remote(self.pipe, operation, keys, callers)
            found[f"cpu_{operation}"] = self.cpu() - busy
            if not number % 2:
                plain(operation, call)
        self.far.client.remove(keys)
        return found


def measure(recorder: Recorder, directory: Path, depth: int, deep: bool) -> None:
    with ExitStack() as stack:
        scene = Scene(stack, directory, depth, deep)
        for side, callers in itertools.product(("near", "far"), CALLERS):
            labels = {"block_bytes": BLOCK, "depth": depth, "client": side, "callers": callers,
                      "reader": "deepnvme" if deep else "threads"}  # fmt: skip
            for name, blocks, samples in (
                ("ssd_tier", BLOCKS, SAMPLES),
                ("sustained", SUSTAINED_BLOCKS, SUSTAINED_SAMPLES),
            ):
                numbers = range(WARMUP + samples)
                turns = [scene.turn(n, side, callers, blocks) for n in numbers][WARMUP:]
                record(recorder, name, turns, blocks * BLOCK / 1e9, labels)
            load = [os.getloadavg()[0] / (os.cpu_count() or 1)]
            recorder.add("load", "per core", load, depth=depth, client=side, callers=callers)


def record(
    recorder: Recorder,
    name: str,
    turns: list[dict[str, float]],
    gigabytes: float,
    labels: dict[str, object],
) -> None:
    """Add the figures of turns of so many bytes."""
    raw = "raw" if name == "ssd_tier" else f"{name}_raw"
    for op in ("put", "get"):
        by_op = {"operation": op, **labels}
        recorder.add(name, "GB/s", [gigabytes / t[op] for t in turns], **by_op)
        recorder.add(raw, "GB/s", [gigabytes / t[f"raw_{op}"] for t in turns], **by_op)
        recorder.add(f"{name}/raw", "ratio", [t[f"raw_{op}"] / t[op] for t in turns], **by_op)
        recorder.add(f"{name}_cpu", "s/GB", [t[f"cpu_{op}"] / gigabytes for t in turns], **by_op)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=None, help="default: a temporary one")
    parser.add_argument("--deepnvme", action="store_true", help="measure DeepSpeed's handles too")
    arguments = parser.parse_args()
    recorder = Recorder("ssd_tier")
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        directory = Path(name)
        for deep in [False, True] if arguments.deepnvme else [False]:
            for depth in DEPTHS:
                measure(recorder, directory, depth, deep)
                for path in directory.glob("slab-*"):
                    path.unlink()
    recorder.write()


if __name__ == "__main__":
    main()
