"""Our store, driven as the peers are: a master, a lending node, and clients with `Store`.

python our_store.py shared_memory|tcp
"""

from __future__ import annotations

import multiprocessing
import secrets
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import store_side

from configs.schema import KVStoreConfig, TransferBackend, TransferConfig
from kvstore import KVStoreError, MasterServer, PutOutcome, RegionPiece, Store, StoreNode
from transfer import TransferEngine, TransferError, allocate

KEEP = 4  # batches of keys that gets turn to


def config() -> KVStoreConfig:
    return KVStoreConfig(segment_bytes=store_side.POOL_BYTES, request_timeout_s=10.0)


class OurClient:
    errors: tuple[type[Exception], ...] = (KVStoreError, TransferError)

    def __init__(self, index: int, address: str, secret: bytes, backend: str) -> None:
        transfer = TransferConfig(backend=TransferBackend(backend))
        self._store = Store.connect(address, secret=secret, config=config(), transfer=transfer)
        self._region = self._store.register(allocate(store_side.BUFFER_BYTES))
        self.buffer: Any = self._region.array
        self._live: list[list[bytes]] = []
        self._names: list[bytes] = []
        self._prefix, self._count = secrets.token_bytes(8), 0

    def begin(self) -> None:
        for first in range(0, len(self._names), 16384):
            self._store.remove_batch(self._names[first : first + 16384])
        self._names.clear()

    def put(self, size: int, blocks: int) -> None:
        numbers = range(self._count, self._count + blocks)
        self._count += blocks
        names = [self._prefix + number.to_bytes(8) for number in numbers]
        if blocks == 1:
            outcomes = {self._store.put(names[0], RegionPiece(self._region, 0, size))}
        else:
            places = np.arange(blocks) * size
            outcomes = set(self._store.client.put(names, self._region, places, size))
        # `EXISTS`: a reply came so late that the request was repeated.
        if not outcomes <= {PutOutcome.STORED, PutOutcome.EXISTS}:
            raise RuntimeError(f"put: {sorted(outcomes)}")
        self._live = [*self._live[1 - KEEP :], names]
        self._names += names

    def get(self, size: int, blocks: int, turn: int) -> None:
        names = self._live[turn % KEEP]
        if blocks == 1:
            piece = RegionPiece(self._region, 0, size)
            whole = self._store.get_into(names[0], piece) == size
        else:
            hit = self._store.client.lookup(names)
            places = np.arange(blocks) * size
            whole = self._store.client.get_into(hit, self._region, places) == blocks
            self._store.client.release(hit, wait=False)
        if not whole:
            raise RuntimeError("not found")

    def view(self, size: int, turn: int, use: store_side.Use) -> None:
        with self._store.view(self._live[turn % KEEP][0]) as value:
            if value is None or not value.in_place:
                raise RuntimeError("not found in place")
            use(np.frombuffer(value.memory, dtype=np.uint8))

    def tidy(self) -> bool:
        return False  # the pool evicts, within the time measured


def lead(pipe: Connection, secret: bytes) -> None:
    with MasterServer(config(), secret=secret) as master:
        pipe.send(master.address)
        pipe.recv()


def lend(pipe: Connection, address: str, secret: bytes) -> None:
    engine = TransferEngine(TransferConfig(), name=secrets.token_hex(8), secret=secret)
    node = StoreNode(engine, address, config(), secret=secret)

    engine.on_notify(node.on_notify)
    with engine, node:
        pipe.send(node.wait_registered(30.0))
        pipe.recv()


def main() -> None:
    context, secret = multiprocessing.get_context("spawn"), secrets.token_bytes(32)
    ours, theirs = context.Pipe()
    master = context.Process(target=lead, args=(theirs, secret), daemon=True)
    master.start()
    address = ours.recv()
    pipe, theirs = context.Pipe()
    node = context.Process(target=lend, args=(theirs, address, secret), daemon=True)
    node.start()
    if not pipe.recv():
        raise RuntimeError("the node was not registered")
    backend = "auto" if sys.argv[1] == "shared_memory" else sys.argv[1]
    pids = [process.pid for process in (master, node) if process.pid is not None]
    store_side.serve(OurClient, (address, secret, backend), pids)


if __name__ == "__main__":
    main()
