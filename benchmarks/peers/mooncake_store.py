"""Mooncake Store with its own master, connection pool on.

python mooncake_store.py remote|local|dummy FOLDER

remote: the segment lies in another process, all bytes cross TCP. local: every client owns a
segment, and copies where the value lies in its own. dummy: `mooncake_client` owns the segment and
serves the clients through shared memory.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import store_side

HOST = "127.0.0.1"
KEEP = 4


def open_store(master: str, segment_bytes: int) -> Any:
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    os.environ["MC_TCP_ENABLE_CONNECTION_POOL"] = "1"
    os.environ["MC_TCP_BIND_ADDRESS"] = HOST
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    code = store.setup(HOST, "P2PHANDSHAKE", segment_bytes, 64 << 20, "tcp", "", master)
    if code:
        raise RuntimeError(f"setup returned {code}")
    return store


class MooncakeClient:
    errors: tuple[type[Exception], ...] = ()

    def __init__(self, index: int, layout: str, address: str) -> None:
        self._index = index
        if layout == "dummy":
            os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
            from mooncake.store import MooncakeDistributedStore

            self._store = MooncakeDistributedStore()
            code = self._store.setup_dummy(store_side.BUFFER_BYTES + (64 << 20), 64 << 20, address)
            if code:
                raise RuntimeError(f"setup_dummy returned {code}")
            self._place = self._store.alloc_from_mem_pool(store_side.BUFFER_BYTES)
            memory = (ctypes.c_char * store_side.BUFFER_BYTES).from_address(self._place)
            self.buffer: Any = np.frombuffer(memory, dtype=np.uint8)
        else:
            own = store_side.SHARE_BYTES + (64 << 20) if layout == "local" else 0
            self._store = open_store(address, own)
            self.buffer = np.zeros(store_side.BUFFER_BYTES, dtype=np.uint8)
            self._place = self.buffer.ctypes.data
        self._store.register_buffer(self._place, store_side.BUFFER_BYTES)
        self._count = self._used = 0
        self._live: list[tuple[list[str], int]] = []

    def put(self, size: int, blocks: int) -> None:
        self._count += 1
        names = [f"c{self._index}-{self._count}-{i}" for i in range(blocks)]
        if blocks == 1:
            codes = [self._store.put_from(names[0], self._place, size)]
        else:
            codes = self._store.batch_put_from(names, self._places(size, blocks), [size] * blocks)
        if any(codes):
            raise RuntimeError(f"put returned {next(code for code in codes if code)}")
        self._live.append((names, size * blocks))
        self._used += size * blocks

    def get(self, size: int, blocks: int, turn: int) -> None:
        names, _ = self._live[-1 - turn % KEEP]
        if blocks == 1:
            sizes = [self._store.get_into(names[0], self._place, size)]
        else:
            sizes = self._store.batch_get_into(names, self._places(size, blocks), [size] * blocks)
        if any(found != size for found in sizes):
            raise RuntimeError(f"get returned {min(sizes)}")

    def view(self, size: int, turn: int, use: store_side.Use) -> None:
        names, _ = self._live[-1 - turn % KEEP]
        handle = self._store.get_buffer(names[0])  # lives as long as this
        if handle is None or handle.size() != size:
            raise RuntimeError("get_buffer found nothing")
        use(np.frombuffer((ctypes.c_char * size).from_address(handle.ptr()), dtype=np.uint8))

    def begin(self) -> None:
        self._used = store_side.SHARE_BYTES
        self.tidy()

    def tidy(self) -> bool:
        if self._used < store_side.SHARE_BYTES * 0.8:
            return False
        for names, _ in self._live[:-KEEP]:
            self._store.batch_remove(names, True)
        self._live = self._live[-KEEP:]
        self._used = sum(nbytes for _, nbytes in self._live)
        return True

    def _places(self, size: int, blocks: int) -> list[int]:
        return [self._place + i * size for i in range(blocks)]


def hold(pipe: Connection, master: str, segment_bytes: int) -> None:
    store = open_store(master, segment_bytes)
    pipe.send("ready")
    pipe.recv()
    store.close()


def main() -> None:
    import mooncake

    layout, folder = sys.argv[1], Path(sys.argv[2])
    programs = Path(mooncake.__file__).parent
    port = store_side.free_port()
    master = store_side.start_server(
        [
            str(programs / "mooncake_master"), f"--rpc_address={HOST}", f"--rpc_port={port}",
            f"--metrics_host={HOST}", f"--metrics_port={store_side.free_port()}",
        ],
        port, folder,
    )  # fmt: skip
    address, pids = f"{HOST}:{port}", [master.pid]
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    segment = store_side.POOL_BYTES + (256 << 20)
    if layout == "remote":
        holder = context.Process(target=hold, args=(theirs, address, segment), daemon=True)
        holder.start()
        pipe.recv()
        pids += [holder.pid] if holder.pid is not None else []
    elif layout == "dummy":
        port = store_side.free_port()
        real = store_side.start_server(
            [
                str(programs / "mooncake_client"), f"--host={HOST}", f"--port={port}",
                f"--global_segment_size={segment >> 20}MB", f"--master_server_address={address}",
                "--metadata_server=P2PHANDSHAKE", "--protocol=tcp",
            ],
            port, folder,
        )  # fmt: skip
        address = f"{HOST}:{port}"
        pids.append(real.pid)
    store_side.serve(MooncakeClient, (layout, address), pids)


if __name__ == "__main__":
    main()
