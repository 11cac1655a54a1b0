"""Time of one batch through the KV pool: put, lookup, get, between two processes of one host.

    python -m benchmarks.bench_kvstore

The master runs in this process, the lending node in another, the client here. Every put stores
new keys; the pool holds about 40 batches, so most puts evict. Bytes per second count block bytes.
"""

from __future__ import annotations

import multiprocessing
import secrets
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection

import numpy as np

from benchmarks.harness import Recorder
from configs.schema import KVStoreConfig, TransferBackend, TransferConfig
from kvstore import MasterServer, PutOutcome, StoreClient, StoreNode
from transfer import Region, TransferEngine, allocate

WARMUP, SAMPLES = 10, 60
STEPS = ("put", "lookup", "get", "release", "memcpy")
SHAPES = ((1, 65536), (16, 65536), (64, 16384), (64, 65536), (8, 1 << 20))


def lend(pipe: Connection, address: str, secret: bytes, config: KVStoreConfig) -> None:
    engine = TransferEngine(TransferConfig(), name=secrets.token_hex(8), secret=secret)
    node = StoreNode(engine, address, config, secret=secret)
    engine.on_notify(node.on_notify)
    with engine, node:
        pipe.send(node.wait_registered(30.0))
        pipe.recv()


def measure(recorder: Recorder, backend: TransferBackend, blocks: int, nbytes: int) -> None:
    config = KVStoreConfig(segment_bytes=40 * blocks * nbytes, request_timeout_s=10.0)
    secret = secrets.token_bytes(32)
    with ExitStack() as stack:
        master = stack.enter_context(MasterServer(config, secret=secret))
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        process = multiprocessing.get_context("spawn").Process(
            target=lend, args=(theirs, master.address, secret, config)
        )
        process.start()
        stack.callback(process.join)
        stack.callback(ours.send, None)
        assert ours.recv()
        name = secrets.token_hex(8)
        engine = TransferEngine(TransferConfig(backend=backend), name=name, secret=secret)
        client = StoreClient(engine, master.address, config, secret=secret)
        engine.on_notify(client.on_notify)
        stack.enter_context(engine)
        stack.enter_context(client)
        memory = allocate(blocks * nbytes)
        stack.callback(memory.close)
        region = engine.register(memory)
        rounds = [one_round(client, region, blocks, nbytes) for _ in range(WARMUP + SAMPLES)]
        labels = {"backend": str(backend), "blocks": blocks, "block_bytes": nbytes}
        for step in STEPS:
            samples = [times[step] for times in rounds[WARMUP:]]
            recorder.add(f"{step}_batch", "us", samples, **labels)


def one_round(client: StoreClient, region: Region, blocks: int, nbytes: int) -> dict[str, float]:
    """Return microseconds of each step; what comes back is compared with what was put."""
    memory = region.tensor.numpy()
    memory[:] = content = np.frombuffer(secrets.token_bytes(len(memory)), dtype=np.uint8)
    keys = [secrets.token_bytes(16) for _ in range(blocks)]
    offsets = np.arange(blocks) * nbytes
    began = time.perf_counter()
    outcomes = client.put(keys, region, offsets, nbytes)
    put = time.perf_counter()
    spare = content.copy()
    cleared = time.perf_counter()
    np.copyto(spare, memory)
    copied = time.perf_counter()
    memory[:] = 0
    started = time.perf_counter()
    hit = client.lookup_prefix(keys)
    found = time.perf_counter()
    good = client.get_into(hit, region, offsets)
    got = time.perf_counter()
    client.release(hit)
    released = time.perf_counter()
    assert set(outcomes) == {PutOutcome.STORED}
    assert good == blocks
    assert np.array_equal(memory, content)
    spans = (put - began, found - started, got - found, released - got, copied - cleared)
    return {step: 1e6 * span for step, span in zip(STEPS, spans, strict=True)}


def main() -> None:
    recorder = Recorder("kvstore")
    for backend in (TransferBackend.SHARED_MEMORY, TransferBackend.TCP):
        for blocks, nbytes in SHAPES:
            measure(recorder, backend, blocks, nbytes)
    recorder.write()


if __name__ == "__main__":
    main()
