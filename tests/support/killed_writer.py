"""A client process that stops or dies at a chosen point of its puts."""

from __future__ import annotations

import os
import secrets
import signal
from multiprocessing.connection import Connection

from configs.schema import KVStoreConfig, TransferBackend, TransferConfig
from kvstore import KVStoreError, Store
from kvstore.client import allocating, block_writer, disk_places, reserved_places
from tests.support.waits import eventually


def begin_and_wait(
    pipe: Connection,
    address: str,
    secret: bytes,
    config: KVStoreConfig,
    backend: TransferBackend | None,
    kind: str,
    nbytes: int,
) -> None:
    """Send the incarnation once places are held or open, and what became of the put at last.

    Args:
        kind: "reserved": places are held ahead. "batch": of a batch nothing is written yet.
            "written": all of it is, and the master was not told. "early": places on a disk are
            held ahead, and once told to go on it writes there and never asks the master.
    """
    reserved_places.IDLE_S = 60.0
    options = {} if backend is None else {"transfer": TransferConfig(backend=backend)}
    store = Store.connect(address, secret=secret, config=config, **options)
    name = store.client.core.record.name
    for byte in (b"a", b"b"):  # one may come too late on a busy machine, and is not stored then
        eventually(lambda byte=byte: store.put(secrets.token_bytes(16), byte * nbytes) == "stored")

    def stop() -> None:
        pipe.send(name)
        assert pipe.recv() == "go on"

    if kind == "reserved":
        pipe.send(name)
        assert pipe.recv() == "go on"
    elif kind == "batch":
        start = block_writer.BlockWriter._start

        def start_later(self, *args):
            block_writer.BlockWriter._start = start
            stop()
            return start(self, *args)

        block_writer.BlockWriter._start = start_later
    elif kind == "early":
        disk_places.PUT_BYTES_MIN = 1
        for _ in range(2):  # the first one orders places
            values = [secrets.token_bytes(nbytes) for _ in range(4)]
            assert set(store.put_batch([v[:16] for v in values], values)) == {"stored"}
        allocating.Allocating.ask = lambda self, *args, **options: pipe.recv()
        stop()
    elif kind == "written":
        end = block_writer.BlockWriter._end

        def end_later(self, *args):
            result = yield from end(self, *args)
            block_writer.BlockWriter._end = end
            stop()
            return result

        block_writer.BlockWriter._end = end_later
    values = {secrets.token_bytes(16): secrets.token_bytes(nbytes) for _ in range(4)}
    try:
        outcomes = [str(o) for o in store.put_batch(list(values), list(values.values()))]
    except KVStoreError as error:
        outcomes = [type(error).__name__] * len(values)
    pipe.send((values, outcomes))
    pipe.recv()
    os.kill(os.getpid(), signal.SIGKILL)
