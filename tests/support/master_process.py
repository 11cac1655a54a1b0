"""Masters of the store in processes of their own, which tests kill and stop, and their clients."""

from __future__ import annotations

import os
import secrets
import signal
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from configs.schema import KVStoreConfig, TransferBackend
from kvstore import MasterServer, MasterUnavailable
from kvstore.client.master_map import MasterMap
from kvstore.discovery.candidacy import Candidacy
from kvstore.discovery.directory import MasterDirectory, StaticMasters
from kvstore.discovery.finding import directory_of, followed
from kvstore.wire import messages as m
from tests.support.departures import write_down
from tests.support.fork_server import CONTEXT
from tests.support.store_worker import SLOTS, Worker, content
from tests.support.taken_words import words_of

WAIT_S = 60.0


def run_master(
    pipe: Connection,
    config: KVStoreConfig,
    secret: bytes,
    shard: int,
    port: int,
    departures: Path | None,
) -> None:
    if departures is not None:
        write_down(departures)
    with ExitStack() as stack:
        server = MasterServer(
            config,
            secret=secret,
            port=port,
            standby=config.masters.etcd.enabled,
            rebuild_s=config.masters.rebuild_s,
        )
        stack.enter_context(server)
        candidacy = None
        if config.masters.etcd.enabled:
            candidacy = Candidacy(config.masters.etcd, shard, config.masters.num_shards, server)
            stack.callback(candidacy.close)
            candidacy.open()
        pipe.send(server.address)
        while (request := pipe.recv()) is not None:
            if request == "check":
                server.check_invariants()
                pipe.send(server.statistics())
            elif request == "term":
                pipe.send(candidacy.term if candidacy is not None and candidacy.wait(0.0) else 0)
            elif request == "words":
                pipe.send(words_of(server))


class MasterProcess:
    """One master; a context manager. What goes there is written down in a file, if there is one."""

    def __init__(
        self,
        config: KVStoreConfig,
        secret: bytes,
        *,
        shard: int = 0,
        port: int = 0,
        departures: Path | None = None,
    ) -> None:
        self._pipe, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(
            target=run_master, args=(theirs, config, secret, shard, port, departures), daemon=True
        )
        self.process.start()
        theirs.close()
        assert self._pipe.poll(WAIT_S), "the master does not start"
        self.address = self._pipe.recv()

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def ask(self, request: str) -> Any:
        self._pipe.send(request)
        assert self._pipe.poll(WAIT_S), request
        return self._pipe.recv()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def stopped(self) -> bool:
        with open(f"/proc/{self.process.pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "T"

    def kill(self) -> None:
        self.process.kill()
        self.process.join(WAIT_S)
        assert self.process.exitcode == -signal.SIGKILL

    def close(self) -> None:
        if self.process.is_alive():
            self.signal(signal.SIGCONT)
            self._pipe.send(None)
            self.process.join(WAIT_S)
        self._pipe.close()
        if self.process.is_alive():
            self.kill()

    def __enter__(self) -> MasterProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MasterCluster:
    """Masters at fixed addresses, and workers with node and client."""

    def __init__(
        self,
        stack: ExitStack,
        *,
        shards: int = 1,
        workers: int = 3,
        slot_bytes: int = 4096,
        backend: TransferBackend = TransferBackend.AUTO,
        departures: Path | None = None,
        **knobs,
    ) -> None:
        defaults = {
            "segment_bytes": 1 << 25,
            "request_timeout_s": 40.0,
            "heartbeat_s": 0.5,
            "node_silence_s": 60.0,
            "open_put_s": 20.0,
            "lease_s": 60.0,
            "scrub": {"enabled": False},  # as in `store_pool.Pool`
            # Nodes of a machine that stands still for some seconds tell a new master late.
            "masters": {"rebuild_s": 10.0},
        }
        self.config = KVStoreConfig(**{**defaults, **knobs})
        self.secret = secrets.token_bytes(16)
        self.stack, self._departures = stack, departures
        # Closed after the workers, which say goodbye to them, whenever they were started.
        self._processes = stack.enter_context(ExitStack())
        self.masters = [self.start_master(shard) for shard in range(shards)]
        self.directory: MasterDirectory = StaticMasters([master.address for master in self.masters])
        self.slot_bytes, self._backend = slot_bytes, backend
        self.workers = [self._launch() for _ in range(workers)]
        for worker in self.workers:
            assert worker.result() is True, "not registered in time"
        if not self.config.masters.embedded:
            self.directory = stack.enter_context(followed(directory_of(self.config.masters)))
        self.map = MasterMap(self.directory, self.config, secret=self.secret, identity="test")
        stack.callback(self.map.close)

    def start_worker(self) -> Worker:
        worker = self._launch()
        assert worker.result() is True, "not registered in time"
        return worker

    def _launch(self) -> Worker:
        addresses = [master.address for master in self.masters]
        args = (addresses, self.secret, self.config, self._backend, self.slot_bytes)
        worker = Worker(secrets.token_hex(8), *args)
        self.stack.callback(worker.close)
        return worker

    def start_master(self, shard: int, port: int = 0) -> MasterProcess:
        return self._processes.enter_context(
            MasterProcess(
                self.config, self.secret, shard=shard, port=port, departures=self._departures
            )
        )

    def restart_master(self, shard: int) -> None:
        """Start a master where a killed one was."""
        self.masters[shard] = self.start_master(shard, self.masters[shard].port)

    def figures(self) -> m.MasterStatistics:
        """The pool's, after a look at the books of all masters."""
        parts = [master.ask("check") for master in self.masters]
        for figures in parts:
            used = (
                figures.free_bytes
                + figures.committed_bytes
                + figures.open_bytes
                + figures.retired_bytes
                + figures.quarantined_bytes
            )
            assert used == figures.capacity_bytes, figures
        return self.map.ask(m.Observe(), m.MasterStatistics)

    def wait_blocks(self, number: int) -> None:
        deadline = time.monotonic() + WAIT_S
        while (found := self.map.ask(m.Observe(), m.MasterStatistics).blocks) < number:
            assert time.monotonic() < deadline, f"{found} of {number} blocks"
            time.sleep(0.02)


# -- run in a worker ---------------------------------------------------------------------------


# Again and again until the test has seen enough, however long that takes: see `Worker.enough`.


def read_held(commands, keys):
    """Read a leased run all the time; return (when each read ended, monotonic; all equal)."""
    hit = commands.client.lookup_prefix(keys)
    assert hit.num_blocks == len(keys)
    offsets = np.arange(len(keys)) * commands.slot_bytes
    expected = [content(key, commands.slot_bytes) for key in keys]
    reads, equal = [], True
    while not commands.told_enough():
        good = commands.client.get_into(hit, commands.region, offsets)
        equal &= good == len(keys)
        for i, block in enumerate(expected):
            at = i * commands.slot_bytes
            equal &= np.array_equal(commands.array[at : at + len(block)], block)
        reads.append(time.monotonic())
    return reads, bool(equal)


def write_on(commands, batch):
    """Put new keys all the time; return (stored keys, other outcomes, longest put in seconds)."""
    stored, other, longest_s = [], [], 0.0
    while not commands.told_enough():
        began_s = time.monotonic()
        keys = [secrets.token_bytes(16) for _ in range(batch)]
        outcomes = commands.put(keys)
        # "exists": written for the dead master, and told to the next by the node.
        stored += [k for k, o in zip(keys, outcomes, strict=True) if o in ("stored", "exists")]
        other += [o for o in outcomes if o not in ("stored", "exists")]
        longest_s = max(longest_s, time.monotonic() - began_s)
        time.sleep(0.01)
    return stored, other, longest_s


def find(commands, keys):
    """Return how many of these are there and right; each for itself where some are not."""
    found = 0
    for start in range(0, len(keys), SLOTS):
        some = keys[start : start + SLOTS]
        if commands.get(some)[1:3] == (len(some), True):
            found += len(some)
        else:
            found += sum(commands.get([key])[1:3] == (1, True) for key in some)
    return found


def look_up_on(commands, keys):
    """Look all of these up all the time.

    Returns:
        Number of lookups, and of those that found less: when each began and ended (monotonic).
    """
    looks, short = 0, []
    while not commands.told_enough():
        began_s = time.monotonic()
        try:
            hit = commands.client.lookup_prefix(keys)
        except MasterUnavailable:
            time.sleep(0.02)
            continue
        looks += 1
        if hit.num_blocks < len(keys):
            short.append((began_s, time.monotonic()))
        commands.client.release(hit)
        time.sleep(0.01)
    return looks, short
