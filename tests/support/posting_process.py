"""A process that puts values as fast as it can until it is killed, and says how many it has put."""

from __future__ import annotations

import hashlib
import mmap
import os
import secrets
import signal
import struct
from pathlib import Path
from types import TracebackType

from configs.schema import KVStoreConfig
from kvstore import PutOutcome, Store
from kvstore.client import post_box, reserved_places
from tests.support.fork_server import CONTEXT

SIZE = 4096
PERIOD, BATCH = 16, 8  # of each so many values so many are put at once
COUNTED_BYTES = 24  # put, of them not as the first, posted


def name_of(seed: bytes, number: int) -> bytes:
    return hashlib.sha256(seed + b"name %d" % number).digest()[:16]


def content_of(seed: bytes, number: int) -> bytes:
    return hashlib.sha256(seed + b"content %d" % number).digest() * (SIZE // 32)


def _put_all(
    path: str, address: str, secret: bytes, config: KVStoreConfig, seed: bytes, batches: bool
) -> None:
    reserved_places.IDLE_S = 60.0
    post_box.AGAIN_S = 0.05
    with open(path, "r+b") as file:
        counted = mmap.mmap(file.fileno(), COUNTED_BYTES)
    store = Store.connect(address, secret=secret, config=config)
    others = posted = number = 0
    while True:
        count = BATCH if batches and number % PERIOD == 0 else 1  # some are put as one batch
        numbers = range(number, number + count)
        names = [name_of(seed, n) for n in numbers]
        contents = [content_of(seed, n) for n in numbers]
        if count > 1:
            outcomes = store.put_batch(names, contents)
        else:
            outcomes = (store.put(names[0], contents[0]),)
        others += sum(outcome is not PutOutcome.STORED for outcome in outcomes)
        box = store.client.posts.box
        posted += box is not None and box.waiting() > 0
        number += count
        struct.pack_into("<QQQ", counted, 0, number, others, posted)


class PostingProcess:
    """One of them; a context manager that kills it."""

    def __init__(
        self,
        directory: Path,
        address: str,
        secret: bytes,
        config: KVStoreConfig,
        *,
        batches: bool = False,
    ) -> None:
        self.seed = secrets.token_bytes(8)
        self._path = directory / self.seed.hex()
        self._path.write_bytes(bytes(COUNTED_BYTES))
        self._process = CONTEXT.Process(
            target=_put_all, args=(str(self._path), address, secret, config, self.seed, batches)
        )
        self._process.start()

    def counted(self) -> tuple[int, int, int]:
        """How many values it has put, which of them were not stored first, which were posted."""
        put, others, posted = struct.unpack("<QQQ", self._path.read_bytes())
        return put, others, posted

    def send(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        if self._process.is_alive():
            self.send(signal.SIGKILL)
        self._process.join()

    def __enter__(self) -> PostingProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.kill()
