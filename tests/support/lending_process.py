"""A store node in a process of its own, and a peer that puts blocks into it one-sided."""

from __future__ import annotations

import os
import queue
import secrets
import signal
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from configs.schema import TransferConfig
from kvstore.node.kept_index import KeptIndex
from kvstore.wire import messages as m
from kvstore.wire.peer_messages import (
    TO_CLIENT,
    AskSegment,
    Written,
    decode_to_client,
    encode_to_node,
)
from tests.support.fork_server import CONTEXT
from tests.support.lending_node import LendingNode, stored_form
from transfer import RegionKey, TransferEngine, allocate
from transfer.backends import file_calls

WAIT_S = 40.0
SECRET = b"s"
SECTOR = 4096


def die_in_append(nbytes: int) -> None:
    """From now on the first record of an index is torn after so many bytes, by SIGKILL."""
    pwrite = os.pwrite

    def torn(fd: int, data: Any, at: int) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".index"):
            pwrite(fd, bytes(data)[:nbytes], at)
            os.kill(os.getpid(), signal.SIGKILL)
        return pwrite(fd, data, at)

    os.pwrite = torn


def die_in_write(nbytes: int) -> None:
    """From now on the process is killed when it has written so many bytes to slabs, or a few less.

    Direct writes have whole sectors: the last one is cut at a multiple of them.
    """
    pwritev, lock, left = os.pwritev, threading.Lock(), [nbytes]

    def torn(fd: int, buffers: Any, at: int) -> int:
        size = sum(len(buffer) for buffer in buffers)
        with lock:
            left[0] -= size
            last = left[0] < 0
            if last:
                rest = (left[0] + size) // SECTOR * SECTOR
                if rest > 0:
                    pwritev(fd, [memoryview(buffers[0])[:rest]], at)
                os.kill(os.getpid(), signal.SIGKILL)
        return pwritev(fd, buffers, at)

    file_calls.compiled = False
    os.pwritev = torn


def die_in_replace(index: KeptIndex, step: str, nbytes: int) -> None:
    """With the next record the index is replaced by a short one, and the process killed then.

    Args:
        index: Of a segment.
        step: "written": after `nbytes` of the new one; "synced": when it is whole, under a name of
            its own; "renamed": when it is in the place of the old one.
        nbytes: See there.
    """
    pwrite, fsync, rename = os.pwrite, os.fsync, os.rename

    def is_new(fd: int) -> bool:
        return os.readlink(f"/proc/self/fd/{fd}").endswith(".index.new")

    def written(fd: int, data: Any, at: int) -> int:
        if is_new(fd) and step == "written":
            pwrite(fd, bytes(data)[:nbytes], at)
            os.kill(os.getpid(), signal.SIGKILL)
        return pwrite(fd, data, at)

    def synced(fd: int) -> None:
        fsync(fd)
        if is_new(fd) and step == "synced":
            os.kill(os.getpid(), signal.SIGKILL)

    def renamed(source: Any, target: Any) -> None:
        rename(source, target)
        if step == "renamed":
            os.kill(os.getpid(), signal.SIGKILL)

    os.pwrite, os.fsync, os.rename = written, synced, renamed
    index.flush()  # what was put before is in the log: the next record makes it too long
    index._replace_above = index.figures().log_bytes


def is_kept(index: KeptIndex) -> bool:
    """Whether all that the index has learned is in its file."""
    with index._file:  # nobody is writing there
        return not index._pending


def serve(pipe, master: str, segments: list[dict[str, Any]], knobs: dict[str, Any]) -> None:
    with ExitStack() as stack:
        node = LendingNode(stack, master, SECRET, segments, **knobs)
        pipe.send((node.name, node.engine.address))
        while (request := pipe.recv()) is not None:
            if request[0] == "die_in_append":
                die_in_append(request[1])
                pipe.send(None)
            elif request[0] == "die_in_write":
                die_in_write(request[1])
                pipe.send(None)
            elif request[0] == "die_in_replace":
                die_in_replace(node.segment(0).index, *request[1:])
                pipe.send(None)
            elif request[0] == "kept":
                pipe.send(is_kept(node.segment(request[1]).index))
            elif request[0] == "held":
                pipe.send(node.segment(request[1]).held())


class LendingProcess:
    """The parent's end."""

    def __init__(self, master: str, segments: list[dict[str, Any]], **knobs: Any) -> None:
        self._pipe, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(
            target=serve, args=(theirs, master, segments, knobs), daemon=True
        )
        self.process.start()
        theirs.close()
        assert self._pipe.poll(WAIT_S), "the node does not start"
        self.name, self.address = self._pipe.recv()

    def ask(self, *request: Any) -> Any:
        self._pipe.send(request)
        assert self._pipe.poll(WAIT_S)
        return self._pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.ended(-signal.SIGKILL)

    def ended(self, code: int) -> None:
        self.process.join(WAIT_S)
        assert self.process.exitcode == code
        self._pipe.close()

    def close(self) -> None:
        if self.process.is_alive():
            self._pipe.send(None)
        self.ended(0)


class Putter:
    """A peer with an engine of its own; puts as clients do, without a master."""

    def __init__(self, stack: ExitStack, nbytes: int) -> None:
        self._offers: queue.Queue[bytes] = queue.Queue()
        self.engine = TransferEngine(TransferConfig(), name=secrets.token_hex(8), secret=SECRET)
        self.engine.on_notify(self._on_notify)
        stack.enter_context(self.engine)
        memory = allocate(nbytes)
        stack.callback(memory.close)
        self.region = self.engine.register(memory)

    def key(self, node: LendingProcess, segment: int = 0) -> RegionKey:
        self.engine.connect(node.address)
        self.engine.notify(node.name, encode_to_node(AskSegment(ask_id=1, segment=segment)))
        return RegionKey.decode(self._offers.get(timeout=WAIT_S))

    def fill(self, nbytes: int) -> tuple[bytes, int]:
        """Put random bytes into our memory; return a new block's key and checksum."""
        payload = np.frombuffer(secrets.token_bytes(nbytes), dtype=np.uint8)
        self.region.array[:nbytes] = payload
        return secrets.token_bytes(16), stored_form(payload)[1]

    def put(self, node: LendingProcess, key: RegionKey, offset: int, nbytes: int) -> bytes:
        name, checksum = self.fill(nbytes)
        self.engine.write(node.name, self.region, key, 0, offset, nbytes).wait(WAIT_S)
        self.tell(node, m.HeldBlocks([name], [offset], [nbytes], [checksum]))
        return name

    def tell(self, node: LendingProcess, held: m.HeldBlocks, segment: int = 0) -> None:
        self.engine.notify(node.name, encode_to_node(Written(held, segment)))

    def _on_notify(self, peer: str, payload: bytes) -> None:
        if payload.startswith(TO_CLIENT):
            self._offers.put(decode_to_client(payload).region_key)


def slab_segment(path: Path, nbytes: int) -> dict[str, Any]:
    return {"medium": "ssd", "bytes": nbytes, "path": path, "threads": 2}
