"""A store node with an engine of its own, and blocks put into it as clients do."""

from __future__ import annotations

import os
import secrets
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import xxhash

from configs.schema import KVStoreConfig, TransferConfig
from kvstore import StoreNode
from kvstore.checksum import part_table, table_checksum
from kvstore.node.segment import Segment
from kvstore.wire import messages as m
from transfer import TransferEngine
from transfer.pieces import make_pieces
from transfer.storage.storage import Waiter

WAIT_S = 30.0


def stored_form(payload: np.ndarray, chunk_bytes: int = 0) -> tuple[np.ndarray, int]:
    """What lies in a segment of a block, and its checksum."""
    if not chunk_bytes:
        return payload, xxhash.xxh3_64_intdigest(payload)
    table = part_table([payload], chunk_bytes)
    return np.concatenate([payload, table]), table_checksum(table)


def read(segment: Segment, offset: int, nbytes: int) -> np.ndarray:
    target = np.zeros(nbytes, dtype=np.uint8)
    segment.memory.read(target, make_pieces(offset, 0, nbytes), time.monotonic() + WAIT_S)
    return target


def damage(segment: Segment, offset: int) -> None:
    """Flip a bit below the segment, as a disk or a wild store does: nobody is told."""
    byte = read(segment, offset, 1) ^ 1
    if segment.memory.array is not None:
        segment.memory.array[offset] = byte[0]
    else:
        slab, deadline = segment.memory._slab, time.monotonic() + WAIT_S
        written = Waiter("the slab", "write", deadline)
        slab.store(byte, make_pieces(0, offset, 1), deadline, written.end)
        written.wait()
        assert read(segment, offset, 1)[0] == byte[0]


def three_media(folder: Path, nbytes: int) -> list[dict[str, object]]:
    """A segment each of memory, of a file, and of what a file stands for, memory on a bus."""
    folder.mkdir(exist_ok=True)
    (folder / "dax").touch()
    os.truncate(folder / "dax", nbytes)
    return [
        {"bytes": nbytes},
        {"medium": "ssd", "bytes": nbytes, "path": folder / "slab", "threads": 2},
        {"medium": "cxl", "bytes": nbytes, "path": folder / "dax"},
    ]


class LendingNode:
    """One node; `stack` closes it."""

    def __init__(self, stack: ExitStack, master: str, secret: bytes, segments, **knobs) -> None:
        defaults = {"heartbeat_s": 0.05, "request_timeout_s": 5.0, "scrub": {"enabled": False}}
        self.config = KVStoreConfig(segments=segments, **{**defaults, **knobs})
        self.name = secrets.token_hex(8)
        self.engine = TransferEngine(TransferConfig(), name=self.name, secret=secret)
        self.node = StoreNode(self.engine, master, self.config, secret=secret)
        self.engine.on_notify(self.node.on_notify)
        stack.enter_context(self.engine)
        stack.enter_context(self.node)
        assert self.node.wait_registered(WAIT_S)

    def segment(self, number: int) -> Segment:
        return self.node.segments[number]

    def put(
        self, number: int, offset: int, nbytes: int, *, chunk_bytes: int = 0, **labels
    ) -> m.Copy:
        """Put random bytes; return a copy order for them, without a target."""
        payload = np.frombuffer(secrets.token_bytes(nbytes), dtype=np.uint8)
        stored, checksum = stored_form(payload, chunk_bytes)
        segment, key = self.segment(number), secrets.token_bytes(16)
        segment.memory.write(stored, make_pieces(0, offset, len(stored)), time.monotonic() + WAIT_S)
        columns = {name: [value] for name, value in labels.items()}
        held = m.HeldBlocks([key], [offset], [nbytes], [checksum], chunk_bytes=[chunk_bytes])
        self.segment(number).record(m.HeldBlocks(**{**_columns(held), **columns}))
        return m.Copy(
            copy_id=secrets.randbits(40),
            key=key,
            nbytes=len(stored),
            checksum=checksum,
            chunk_bytes=chunk_bytes,
            source_segment=number,
            source_offset=offset,
            target=m.NodeAddress("", ""),
            target_offset=0,
        )

    def address(self, number: int) -> m.NodeAddress:
        return m.NodeAddress(self.name, self.engine.address, number, self.segment(number).medium)


def _columns(held: m.HeldBlocks) -> dict[str, list]:
    return {name: getattr(held, name) for name in held.__struct_fields__}
