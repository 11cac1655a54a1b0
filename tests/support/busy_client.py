"""A client in a process of its own that puts and gets without end, to be killed or stopped."""

from __future__ import annotations

import os
import random
import secrets
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from configs.schema import KVStoreConfig, TransferBackend, TransferConfig
from kvstore import KVStoreError, Store
from tests.support.fork_server import CONTEXT
from tests.support.store_pool import WAIT_S, Pool
from tests.support.waits import eventually
from transfer import TransferError

SIZES = (512, 4096, 30_000, 200_000)
BATCH = 12


def value_of(key: bytes) -> bytes:
    """What a block of this name holds."""
    rng = random.Random(key)
    return rng.randbytes(rng.choice(SIZES))


def fresh_batch() -> dict[bytes, bytes]:
    """New names and what they hold."""
    return {key: value_of(key) for key in (secrets.token_bytes(16) for _ in range(BATCH))}


def put_and_get(pipe: Connection, store: Store) -> None:
    """Tell of each name before it is put, and of those that were stored; check what is got."""
    stored: list[bytes] = []
    held = []
    while True:
        batch = fresh_batch()
        pipe.send(("puts", list(batch)))
        outcomes = store.put_batch(list(batch), list(batch.values()))
        batch = {k: v for (k, v), o in zip(batch.items(), outcomes, strict=True) if o == "stored"}
        single = secrets.token_bytes(16)
        pipe.send(("puts", [single]))
        if store.put(single, value_of(single)[:512]) == "stored":
            stored.append(single)
            pipe.send(("stored", [single]))
        stored += batch
        pipe.send(("stored", list(batch)))
        # A put may come too late on a busy machine: what was not stored is not looked up.
        some = random.sample(stored, min(3, len(stored)))
        held.append(store.client.hold(store.client.lookup(some)))
        if len(held) > 8:
            held.pop(0).close()
        for key, result in zip(stored[-20:], store.get_batch(stored[-20:]), strict=True):
            assert result.value in (None, value_of(key), value_of(key)[:512]), key.hex()


def put_when_told(pipe: Connection, store: Store, way: str) -> None:
    """Be granted places for blocks, say so, and write only when told to; then say what happened."""
    for _ in range(3):  # one may come too late on a busy machine, and is not stored then
        eventually(lambda: store.put(secrets.token_bytes(16), bytes(512)) == "stored")
    pipe.send("ready")
    batch = pipe.recv()
    part = store.quick_writes._plain if way == "short" else store.client.core.writing._writer
    name = "write" if way == "short" else "_start"
    write = getattr(part, name)

    def pause(*args: object) -> object:
        setattr(part, name, write)
        pipe.send("granted")
        assert pipe.recv() == "go on"
        return write(*args)

    setattr(part, name, pause)
    hit = store.client.lookup(list(batch)[:0] or pipe.recv())
    pipe.send(hit.num_blocks)
    try:
        if way == "short":
            ((key, value),) = batch.items()
            result: object = [str(store.put(key, value))]
        else:
            result = [str(o) for o in store.put_batch(list(batch), list(batch.values()))]
    except (KVStoreError, TransferError) as error:
        result = type(error).__name__
    pipe.send(result)
    with store.client.core.staging.borrow(int(hit.lengths.sum())) as region:
        offsets = hit.lengths.cumsum() - hit.lengths
        try:
            got: object = store.client.get_into(hit, region, offsets)
        except (KVStoreError, TransferError) as error:
            got = type(error).__name__
    pipe.send(got)


def serve(
    pipe: Connection,
    addresses: list[str],
    secret: bytes,
    config: KVStoreConfig,
    backend: TransferBackend,
    way: str,
) -> None:
    """The process."""
    transfer = TransferConfig(backend=backend)
    with Store.connect(addresses, secret=secret, config=config, transfer=transfer) as store:
        pipe.send(store.client.core.engine.name)
        if way:
            put_when_told(pipe, store, way)
        else:
            put_and_get(pipe, store)


class BusyClient:
    """The parent's end.

    Attributes:
        name: The client's incarnation.
        begun: What it may have put.
        stored: What it said was stored.
    """

    def __init__(
        self, pool: Pool, *, backend: TransferBackend = TransferBackend.AUTO, way: str = ""
    ) -> None:
        self.pipe, theirs = CONTEXT.Pipe()
        args = theirs, pool.addresses, pool.secret, pool.config, backend, way
        self.process = CONTEXT.Process(target=serve, args=args, daemon=True)
        self.process.start()
        theirs.close()
        self.name = self.recv()
        self.begun: set[bytes] = set()
        self.stored: set[bytes] = set()
        self.is_stopped = False

    def recv(self):
        assert self.pipe.poll(WAIT_S), "the client does not answer"
        return self.pipe.recv()

    def watch(self, seconds: float, until: Callable[[], bool]) -> None:
        """Take note of what it does, for so long at least and until that holds."""
        least_s = time.monotonic() + seconds
        most_s = time.monotonic() + WAIT_S
        while time.monotonic() < least_s or len(self.stored) < 3 * BATCH or not until():
            assert time.monotonic() < most_s, "it has not come to that"
            self.take(self.recv())

    def take(self, said: tuple[str, list[bytes]]) -> None:
        kind, keys = said
        (self.begun if kind == "puts" else self.stored).update(keys)

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)
        self.is_stopped = True

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)
        self.is_stopped = False

    def kill(self) -> None:
        """SIGKILL; then take in what it had said."""
        self.process.kill()
        self.process.join(WAIT_S)
        assert self.process.exitcode == -signal.SIGKILL
        try:
            while self.pipe.poll(0):
                self.take(self.pipe.recv())
        except (EOFError, OSError):
            pass  # it died in the middle of a word

    def close(self) -> None:
        if self.process.is_alive():
            if self.is_stopped:
                self.go_on()
            self.process.kill()
            self.process.join(WAIT_S)
        self.pipe.close()

    def _signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
