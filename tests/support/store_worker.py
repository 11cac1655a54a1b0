"""A worker process of the KV pool for tests: node and client on one engine, driven by a pipe."""

from __future__ import annotations

import secrets
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from configs.schema import KVStoreConfig, TransferBackend, TransferConfig
from kvstore import KVStoreError, MasterServer, StoreClient, StoreNode
from kvstore.discovery.directory import as_directory
from kvstore.discovery.finding import directory_of, followed
from kvstore.wire import messages as m
from tests.support.fork_server import CONTEXT
from transfer import TransferEngine, TransferError, allocate

START_S = 60.0
REPLY_S = 100.0
SLOTS = 64


def content(key: bytes, nbytes: int, salt: int = 0) -> np.ndarray:
    """What a block of this name holds in tests."""
    seed = [int.from_bytes(key, "little"), salt]
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


class Commands:
    """What the parent can ask for; the first argument of a request is the method's name."""

    def __init__(self, pipe: Connection, client: StoreClient, node: StoreNode, engine, slot_bytes):
        self.pipe, self.client, self.node, self.engine = pipe, client, node, engine
        self.slot_bytes = slot_bytes
        self.memory = allocate(SLOTS * slot_bytes)
        self.region = engine.register(self.memory)
        self.array = self.memory.tensor.numpy()

    def put(self, keys, *, nbytes=None, salt=0, pin=False):
        nbytes = nbytes or self.slot_bytes
        for i, key in enumerate(keys):
            self.array[i * self.slot_bytes :][:nbytes] = content(key, nbytes, salt)
        offsets = np.arange(len(keys)) * self.slot_bytes
        outcomes = self.client.put(keys, self.region, offsets, nbytes, pin=pin)
        return [str(outcome) for outcome in outcomes]

    def get(self, keys, *, salt=0):
        """-> (blocks found, good leading blocks, whether those are equal, nodes)"""
        self.array[:] = 0
        hit = self.client.lookup_prefix(keys)
        try:
            offsets = np.arange(hit.num_blocks) * self.slot_bytes
            good = self.client.get_into(hit, self.region, offsets)
        finally:
            self.client.release(hit)
        equal = all(
            np.array_equal(
                self.array[i * self.slot_bytes :][: hit.lengths[i]],
                content(keys[i], int(hit.lengths[i]), salt),
            )
            for i in range(good)
        )
        return hit.num_blocks, good, equal, [hit.nodes[i].node for i in hit.node_idx]

    def put_and_stall(self, keys):
        """Write the blocks, say so, and never commit."""
        self.client.posts.close()  # it asks
        ask = self.client._link.ask

        def stall(request, expected, **options):
            if isinstance(request, m.Finish):
                self.pipe.send("stalled")
                time.sleep(1e6)
            return ask(request, expected, **options)

        self.client._link.ask = stall
        return self.put(keys)

    def put_pausing(self, keys):
        """Allocate, say so, and write and commit only when told to go on."""
        writer = self.client.core.writing._writer
        start = writer._start

        def pause(*args):
            writer._start = start
            self.pipe.send("writing")
            assert self.pipe.recv() == "go on"
            return start(*args)

        writer._start = pause
        return self.put(keys)

    def hold(self, keys):
        """Look up, and keep the lease for as long as this process lives."""
        self.held = self.client.hold(self.client.lookup_prefix(keys))
        return self.held.hit.num_blocks

    def read_held(self):
        """Copy what is held; return how many leading blocks were good."""
        offsets = np.arange(self.held.hit.num_blocks) * self.slot_bytes
        return self.client.get_into(self.held.hit, self.region, offsets)

    def flip(self):
        """Damage the first block that this node holds; return its key."""
        segment = self.node.segments[0]
        deadline = time.monotonic() + START_S
        while not (blocks := segment.index.blocks()):  # what others have written is told later
            assert time.monotonic() < deadline, "this node holds nothing"
            time.sleep(0.005)
        block = blocks[0]
        segment.memory.array[block.offset + block.length // 2] ^= 1
        return block.key

    def churn(self, keys, seconds):
        """Put blocks without end; return how many were stored."""
        stored, deadline = 0, time.monotonic() + seconds
        while time.monotonic() < deadline:
            for start in range(0, len(keys), 8):
                stored += self.put(keys[start : start + 8]).count("stored")
        return stored

    def browse(self, keys, seconds):
        """Get what is there without end; return (blocks got, whether all were equal)."""
        got, equal, deadline, turn = 0, True, time.monotonic() + seconds, 0
        while time.monotonic() < deadline:
            turn = (turn + 3) % len(keys)
            _, good, same, _ = self.get((keys[turn:] + keys[:turn])[:6])
            got, equal = got + good, equal and same
        return got, equal

    def use_master(self, address):
        self.node.use_master(address)
        self.client.use_master(address)
        return self.node.wait_registered(START_S)

    def statistics(self):
        return self.client.statistics()

    def told_enough(self):
        """Whether the parent wants no more of what goes on without end."""
        if not self.pipe.poll(0):
            return False
        if self.pipe.recv() != "enough":
            raise SystemExit  # the test has failed, and closes its workers
        return True

    def run(self, function, *args):
        """Call a function of a test's own with this process's commands."""
        return function(self, *args)


def serve(pipe, name, master, secret, config, backend, slot_bytes):
    engine = TransferEngine(TransferConfig(backend=backend), name=name, secret=secret)
    if not config.masters.embedded:
        master = directory_of(config.masters)
    node = StoreNode(engine, master, config, secret=secret)
    client = StoreClient(engine, master, config, secret=secret, local_node=node)
    engine.on_notify(node.on_notify)
    engine.on_notify(client.on_notify)
    with followed(as_directory(master)), engine, node, client:
        commands = Commands(pipe, client, node, engine, slot_bytes)
        pipe.send(node.wait_registered(START_S))
        while (request := pipe.recv()) is not None:
            method, args, options = request
            try:
                result = getattr(commands, method)(*args, **options)
            except (KVStoreError, TransferError, ValueError) as error:
                result = error
            pipe.send(result)
        engine.release(commands.region)
        commands.memory.close()


class Worker:
    """Parent's end of one worker process."""

    def __init__(self, name: str, *args: Any) -> None:
        self.name = name
        self.pipe, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=serve, args=(theirs, name, *args), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, method: str, *args: Any, **options: Any) -> Any:
        self.begin(method, *args, **options)
        return self.result()

    def begin(self, method: str, *args: Any, **options: Any) -> None:
        self.pipe.send((method, args, options))

    def result(self) -> Any:
        assert self.pipe.poll(REPLY_S), f"{self.name} does not answer"
        result = self.pipe.recv()
        if isinstance(result, Exception):
            raise result
        return result

    def enough(self) -> Any:
        """End what goes on without end; return what came of it."""
        self.pipe.send("enough")
        return self.result()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(REPLY_S)
        assert self.process.exitcode == -9

    def close(self) -> None:
        if self.process.is_alive():
            self.pipe.send(None)
            self.process.join(REPLY_S)
            if self.process.is_alive():
                self.process.kill()
                self.process.join(REPLY_S)
                raise AssertionError(f"{self.name} did not end by itself")
        self.pipe.close()
        self.process.close()


class StorePool:
    """A master in this process and workers in their own."""

    def __init__(
        self,
        num_workers: int,
        *,
        segment_bytes: int = 1 << 20,
        slot_bytes: int = 4096,
        backend: TransferBackend = TransferBackend.AUTO,
        **knobs: Any,
    ) -> None:
        defaults = {
            "request_timeout_s": 40.0,
            "heartbeat_s": 0.2,
            "node_silence_s": 60.0,
            "scrub": {"enabled": False},  # as in `store_pool.Pool`
        }
        self.config = KVStoreConfig(segment_bytes=segment_bytes, **{**defaults, **knobs})
        self.secret = secrets.token_bytes(32)
        self.master = MasterServer(self.config, secret=self.secret)
        self.master.open()
        self.workers = [
            Worker(
                secrets.token_hex(8),
                self.master.address,
                self.secret,
                self.config,
                backend,
                slot_bytes,
            )
            for _ in range(num_workers)
        ]

    def __enter__(self) -> StorePool:
        try:
            for worker in self.workers:
                assert worker.result() is True, "not registered in time"
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            for worker in self.workers:
                worker.close()
        finally:
            self.master.close()

    def statistics(self) -> m.MasterStatistics:
        """The master's figures, after a look at its books."""
        self.master.check_invariants()
        return self.master.statistics()
