"""How long the pool's index is incomplete after its master was killed and another was started.

    python -m benchmarks.bench_master_restart [--quick] [--shards N]

Nodes in processes of their own hold 100,000 blocks together. Their masters are killed (SIGKILL);
others, whose programs are loaded already, listen at the same addresses at once.

    listening ──▶ first node: one has noticed, read what it holds, and its first piece is entered
                  ──▶ complete: all blocks are found again; `index` is from the first node to here

`held` is how long a node takes to list and verify what it holds, asked once more afterwards.
Beside it a client reads a leased run all the time: `pause` is its longest time from the end of one
read to the end of the next, to compare with that of the second before the kill.
"""

from __future__ import annotations

import argparse
import multiprocessing
import secrets
import threading
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection

import numpy as np

from benchmarks.harness import Recorder
from configs.schema import KVStoreConfig, TransferConfig
from kvstore import MasterServer, MasterUnavailable, PutOutcome, StoreClient, StoreNode
from kvstore.client.master_map import MasterMap
from kvstore.discovery.directory import StaticMasters
from kvstore.wire import messages as m
from transfer import TransferEngine, allocate

NODES = 2
BLOCK_BYTES = 4096
BATCH = 512
WAIT_S = 120.0


def run_master(pipe: Connection, config: KVStoreConfig, secret: bytes) -> None:
    """Listen at the port that is told, until killed."""
    port = pipe.recv()
    with MasterServer(config, secret=secret, port=port, rebuild_s=2.0) as server:
        pipe.send((server.address, time.monotonic()))
        pipe.recv()


def run_node(pipe: Connection, masters: list[str], config: KVStoreConfig, secret: bytes) -> None:
    """Lend memory; answer how long it takes to list and verify what is held."""
    engine = TransferEngine(TransferConfig(), name=secrets.token_hex(8), secret=secret)
    node = StoreNode(engine, masters, config, secret=secret)

    engine.on_notify(node.on_notify)
    with engine, node:
        pipe.send(node.wait_registered(WAIT_S))
        while pipe.recv():
            started_s = time.monotonic()
            blocks = len(node.segments[0].held().keys)
            pipe.send((blocks, time.monotonic() - started_s))


class Masters:
    """One running master per shard, and the next of each, loaded and waiting."""

    def __init__(self, shards: int, config: KVStoreConfig, secret: bytes) -> None:
        self._config, self._secret = config, secret
        self._context = multiprocessing.get_context("spawn")
        self._now = [self._load() for _ in range(shards)]
        self.addresses: list[str] = []
        for _, pipe in self._now:
            pipe.send(0)
            self.addresses.append(pipe.recv()[0])
        self._next = [self._load() for _ in range(shards)]

    def _load(self) -> tuple[multiprocessing.process.BaseProcess, Connection]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=run_master, args=(theirs, self._config, self._secret), daemon=True
        )
        process.start()
        return process, ours

    def replace(self) -> float:
        """Kill all, and let the next listen; return when the last of them did."""
        for process, _ in self._now:
            process.kill()
            process.join(WAIT_S)
        for address, (_, pipe) in zip(self.addresses, self._next, strict=True):
            pipe.send(int(address.rpartition(":")[2]))
        listening_s: float = max(pipe.recv()[1] for _, pipe in self._next)
        self._now, self._next = self._next, []
        return listening_s

    def load(self) -> None:
        """Start the processes of the next masters; they only wait."""
        self._next = [self._load() for _ in self._now]
        time.sleep(3.0)

    def close(self) -> None:
        """End all processes."""
        for process, _ in (*self._now, *self._next):
            process.kill()
            process.join(WAIT_S)


class Reader:
    """Reads one leased run on a thread; `pause` is the longest time from one end to the next."""

    def __init__(self, engine: TransferEngine, client: StoreClient, keys: list[bytes]) -> None:
        self._client = client
        self._hit = client.lookup_prefix(keys)
        assert self._hit.num_blocks == len(keys)
        self._region = engine.register(allocate(len(keys) * BLOCK_BYTES))
        self._offsets = np.arange(len(keys)) * BLOCK_BYTES
        self._ending = threading.Event()
        self.pause_s = 0.0
        self.failed = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        last_s = time.monotonic()
        while not self._ending.wait(0.001):
            good = self._client.get_into(self._hit, self._region, self._offsets)
            self.failed += good < self._hit.num_blocks
            now = time.monotonic()
            self.pause_s, last_s = max(self.pause_s, now - last_s), now

    def take_pause(self) -> float:
        """Return the longest pause since the last call."""
        longest_s, self.pause_s = self.pause_s, 0.0
        return longest_s

    def close(self) -> None:
        """Stop reading."""
        self._ending.set()
        self._thread.join(WAIT_S)


def fill(engine: TransferEngine, client: StoreClient, blocks: int) -> list[bytes]:
    """Put so many random blocks; return their keys."""
    memory = allocate(BATCH * BLOCK_BYTES)
    region = engine.register(memory)
    offsets = np.arange(BATCH) * BLOCK_BYTES
    keys: list[bytes] = []
    while len(keys) < blocks:
        memory.tensor.numpy()[:] = np.random.default_rng().integers(
            0, 256, BATCH * BLOCK_BYTES, dtype=np.uint8
        )
        batch = [secrets.token_bytes(16) for _ in range(min(BATCH, blocks - len(keys)))]
        outcomes = client.put(batch, region, offsets[: len(batch)], BLOCK_BYTES)
        assert set(outcomes) == {PutOutcome.STORED}, set(outcomes)
        keys += batch
    return keys


def measure(shards: int, blocks: int, rounds: int, recorder: Recorder) -> None:
    """Fill a pool, then kill its masters again and again."""
    config = KVStoreConfig(
        segment_bytes=blocks * BLOCK_BYTES * 3 // 2 // NODES,
        request_timeout_s=30.0,
        lease_s=600.0,
    )
    secret = secrets.token_bytes(16)
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        masters = Masters(shards, config, secret)
        stack.callback(masters.close)
        nodes = []
        for _ in range(NODES):
            ours, theirs = context.Pipe()
            args = (theirs, masters.addresses, config, secret)
            process = context.Process(target=run_node, args=args, daemon=True)
            process.start()
            stack.callback(process.kill)
            nodes.append(ours)
        assert all(pipe.recv() for pipe in nodes)
        engine = stack.enter_context(TransferEngine(TransferConfig(), name="bench", secret=secret))
        client = StoreClient(engine, masters.addresses, config, secret=secret)

        engine.on_notify(client.on_notify)
        stack.enter_context(client)
        keys = fill(engine, client, blocks)
        observer = MasterMap(
            StaticMasters(masters.addresses), config, secret=secret, identity="observer"
        )
        stack.callback(observer.close)
        reader = Reader(engine, client, keys[:16])
        stack.callback(reader.close)
        figures: dict[str, list[float]] = {
            name: []
            for name in ("complete", "first node", "held", "index", "pause", "pause before")
        }
        for _ in range(rounds):
            time.sleep(1.0)
            figures["pause before"].append(reader.take_pause())
            one_round(masters, nodes, observer, blocks, figures)
            figures["pause"].append(reader.take_pause())
            masters.load()
        assert reader.failed == 0, f"{reader.failed} reads of leased blocks failed"
        for name, samples in figures.items():
            recorder.add(name, "s", samples, shards=shards, blocks=blocks, nodes=NODES)


def one_round(
    masters: Masters,
    nodes: list[Connection],
    observer: MasterMap,
    blocks: int,
    figures: dict[str, list[float]],
) -> None:
    """Replace all masters once, and take the times."""
    listening_s = masters.replace()
    noticed_s = complete_s = 0.0
    while not complete_s:
        time.sleep(0.005)
        try:
            found = observer.ask(m.Observe(), m.MasterStatistics, timeout_s=WAIT_S)
        except MasterUnavailable:
            continue  # the connection was to the killed one
        now = time.monotonic()
        noticed_s = noticed_s or (now if found.nodes else 0.0)
        complete_s = now if found.blocks == blocks else 0.0
    held_s = []
    for pipe in nodes:
        pipe.send(True)
        count, took_s = pipe.recv()
        assert count > 0
        held_s.append(took_s)
    figures["complete"].append(complete_s - listening_s)
    figures["first node"].append(noticed_s - listening_s)
    figures["held"].append(max(held_s))
    figures["index"].append(complete_s - noticed_s)


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="few blocks, one round, no record")
    parser.add_argument("--shards", type=int, action="append", help="default: 1 and 2")
    options = parser.parse_args()
    blocks, rounds = (4_000, 1) if options.quick else (100_000, 5)
    recorder = Recorder("master_restart")
    for shards in options.shards or (1, 2):
        measure(shards, blocks, rounds, recorder)
    if not options.quick:
        recorder.write()


if __name__ == "__main__":
    main()
