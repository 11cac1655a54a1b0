"""Client processes that put the same names at once, wherever a signal finds them, and read them."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import secrets
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvstore import AsyncStore, KVStoreError, MasterUnavailable, Store
from kvstore.discovery.finding import directory_of, followed
from kvstore.errors import BlockCorrupt, Fenced
from kvstore.values.names import key_of
from tests.support.fork_server import CONTEXT
from tests.support.master_process import MasterCluster
from tests.support.put_journal import (
    Journals,
    JournalWriter,
    is_version,
    value_of,
)
from tests.support.waits import eventually
from transfer import TransferError

WAIT_S = 60.0
MEET_S = 0.02  # so often all writers put one name at once
CHURNED = 6  # names that come and go
LOOKS = 50  # of a reader, at least


class Writer:
    """Puts, removes and reads, and writes down what it does."""

    def __init__(self, store: Store, path: Path, seed: int, *, churns: bool) -> None:
        self.store, self.rng, self.churns = store, random.Random(seed), churns
        self.journal = JournalWriter(path)
        self.numbers = itertools.count(secrets.randbits(48) << 20)
        self.versions = itertools.count(secrets.randbits(40) << 16)
        self.tag, self.own = secrets.token_hex(4), itertools.count()
        self.stored: list[str] = []
        self.wrong: list[str] = []
        self.way = ""
        plain = store.quick_writes._plain
        write = plain.write

        def watched(*args: Any) -> Any:
            written = write(*args)
            self.way = "posted" if written is not None and written.posted else "asked"
            return written

        plain.write = watched

    def call(self, what: str, name: str, version: int, function: Callable[[], object]) -> str:
        number, self.way = next(self.numbers), "asked"
        self.journal.write("begin", number, what, name, version, time.monotonic())
        try:
            outcome = str(function())
        except (KVStoreError, TransferError):
            outcome = "raised"
        way = self.way if what == "put" else ""
        self.journal.write("end", number, outcome, way, time.monotonic())
        return outcome

    def put(self, name: str) -> None:
        version = next(self.versions)
        value = value_of(name, version)
        in_a_loop = self.rng.random() < 0.3

        def put() -> object:
            if in_a_loop:
                return asyncio.run(self.put_in_a_loop(name, value))
            return self.store.put(name, value)

        outcome = self.call("put", name, version, put)
        if outcome == "stored":
            self.stored.append(name)

    async def put_in_a_loop(self, name: str, value: bytes) -> object:
        async with AsyncStore(self.store) as pool:
            return await pool.put(name, value)

    def put_batch(self, names: list[str]) -> None:
        """The long way of several names, each written down as a call of its own."""
        versions = [next(self.versions) for _ in names]
        values = [value_of(n, v) for n, v in zip(names, versions, strict=True)]
        numbers = [next(self.numbers) for _ in names]
        for number, name, version in zip(numbers, names, versions, strict=True):
            self.journal.write("begin", number, "put", name, version, time.monotonic())
        try:
            outcomes = [str(o) for o in self.store.put_batch(names, values)]
        except (KVStoreError, TransferError):
            outcomes = ["raised"] * len(names)
        for number, outcome in zip(numbers, outcomes, strict=True):
            self.journal.write("end", number, outcome, "batch", time.monotonic())

    def read(self, name: str) -> None:
        try:
            value = self.store.get(name)
        except BlockCorrupt:
            self.wrong.append(f"{name}: corrupt")
            return
        except (KVStoreError, TransferError):
            return
        if value is not None and not is_version(name, value):
            self.wrong.append(name)

    def meet(self) -> str:
        """Wait for the moment at which all put one name, and return it."""
        now = time.monotonic()
        moment = int(now / MEET_S) + 1
        while (left_s := moment * MEET_S - time.monotonic()) > 0:
            time.sleep(left_s if left_s > 0.002 else 0)
        return f"met {moment}"

    def step(self) -> None:
        rng = self.rng
        name = self.meet()
        if rng.random() < 0.15:
            self.put_batch([name, self.fresh()])
        else:
            self.put(name)
        for _ in range(rng.randrange(1, 6)):
            self.put(self.fresh())
        if self.churns:
            self.churn(f"churned {rng.randrange(CHURNED)}")
        self.read(rng.choice([name, *self.stored[-8:]]))
        time.sleep(0.01)  # so that a pool has room for all of a test

    def churn(self, name: str) -> None:
        if self.rng.random() < 0.5:
            self.call("remove", name, 0, lambda: self.store.remove(name))
        else:
            self.put(name)
        self.read(name)

    def fresh(self) -> str:
        return f"own {self.tag} {next(self.own)}"


def write_on(pipe: Connection, store: Store, folder: Path, seed: int, churns: bool) -> object:
    writer = Writer(store, folder / secrets.token_hex(8), seed, churns=churns)
    pipe.send("ready")
    while not pipe.poll(0):
        writer.step()
    pipe.recv()
    return writer.wrong


def read_on(pipe: Connection, store: Store, folder: Path, is_strict: bool) -> object:
    """Look up what others say they have stored; return what was missed, and what was wrong.

    It looks some times after it was told that it is enough: a request may have waited for a leader
    that was stopped as long as everything else took.
    """
    journals, missed, wrong, looked = Journals(folder), [], [], 0
    names: list[str] = []
    pipe.send("ready")
    while not pipe.poll(0) or looked <= LOOKS:
        names += [c.name for c in journals.read() if c.is_stored and c.name[0] != "c"]
        for name in [*names[-4:], *random.sample(names, min(4, len(names)))]:
            began_s = time.monotonic()
            try:
                found = bool(looked % 2) or is_found(store, name)
                value = store.get(name) if found else None
            except BlockCorrupt:
                wrong.append(f"{name}: corrupt")
                continue
            except (KVStoreError, TransferError):
                continue
            looked += 1
            if value is None and is_strict:
                missed.append((name, began_s))
            elif value is not None and not is_version(name, value):
                wrong.append(name)
        time.sleep(0.002)
    pipe.recv()
    return looked, missed, wrong


def is_found(store: Store, name: str) -> bool:
    """Look a name up as `StoreClient` does."""
    hit = store.client.lookup([key_of(name, store.namespace)])
    try:
        return hit.num_blocks == 1
    finally:
        store.client.release(hit)


def serve(pipe: Connection, masters: Any, secret: bytes, config: Any, run: Any, *args: Any) -> None:
    with ExitStack() as stack:
        if not config.masters.embedded:
            masters = stack.enter_context(followed(directory_of(config.masters)))
        store = stack.enter_context(Store.connect(masters, secret=secret, config=config))
        eventually(lambda: answers(store), "somebody leads")
        try:
            result = run(pipe, store, *args)
        except Fenced as error:
            result = error
        pipe.send(result)
        pipe.recv()
    pipe.send("closed")


def answers(store: Store) -> bool:
    try:
        store.exists("nobody puts this")
    except MasterUnavailable:
        return False
    return True


class PostingProcess:
    """The parent's end of a client process."""

    def __init__(self, cluster: MasterCluster, run: Callable[..., object], *args: Any) -> None:
        self.pipe, theirs = CONTEXT.Pipe()
        addresses = [master.address for master in cluster.masters]
        given = (theirs, addresses, cluster.secret, cluster.config, run, *args)
        self.process = CONTEXT.Process(target=serve, args=given, daemon=True)
        self.process.start()
        theirs.close()
        cluster.stack.callback(self.close)
        self.is_ended = False

    def recv(self) -> Any:
        assert self.pipe.poll(WAIT_S), "the client does not answer"
        return self.pipe.recv()

    def enough(self) -> Any:
        """End what goes on without end, and the client; return what came of it."""
        self.signal(signal.SIGCONT)
        self.pipe.send("enough")
        return self.end()

    def end(self) -> Any:
        result = self.recv()
        self.pipe.send("close")
        assert self.recv() == "closed"
        self.process.join(WAIT_S)
        self.is_ended = True
        return result

    def signal(self, number: int) -> None:
        if self.process.is_alive():
            os.kill(self.process.pid or 0, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(WAIT_S)
        assert self.process.exitcode == -signal.SIGKILL
        self.is_ended = True

    def close(self) -> None:
        if not self.is_ended and self.process.is_alive():
            self.process.kill()
            self.process.join(WAIT_S)
        self.pipe.close()
