"""Redis or Valkey on a unix socket, with their C parsers.

python redis_store.py redis|valkey SERVER FOLDER
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import store_side

KEEP = 4


class RedisClient:
    errors: tuple[type[Exception], ...] = ()

    def __init__(self, index: int, kind: str, path: str) -> None:
        module = importlib.import_module(kind)
        made = module.Valkey if kind == "valkey" else module.Redis
        self._server = made(unix_socket_path=path)
        self.buffer: Any = store_side.filled(store_side.BUFFER_BYTES, index)
        self._index = index
        self._count = 0
        self._values: tuple[int, bytes] = (0, b"")

    def put(self, size: int, blocks: int) -> None:
        if self._values[0] != size:  # a value of the client library is a bytes object
            self._values = (size, self.buffer[:size].tobytes())
        names, value = self._names(size, blocks, self._count), self._values[1]
        self._count += 1
        if blocks == 1:
            self._server.set(names[0], value)
        else:
            self._server.mset(dict.fromkeys(names, value))

    def get(self, size: int, blocks: int, turn: int) -> None:
        names = self._names(size, blocks, turn)
        found = [self._server.get(names[0])] if blocks == 1 else self._server.mget(names)
        if len(found[-1]) != size:
            raise RuntimeError("not found")

    def begin(self) -> None:
        """Keys and places come again."""

    def tidy(self) -> bool:
        return False

    def _names(self, size: int, blocks: int, turn: int) -> list[str]:
        return [f"c{self._index}-{size}-{turn % KEEP}-{i}" for i in range(blocks)]


def main() -> None:
    kind, server, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    port, path = store_side.free_port(), str(folder / f"{kind}.sock")
    process = store_side.start_server(
        [
            server, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
            "--maxmemory", str(2 * store_side.POOL_BYTES), "--maxmemory-policy", "allkeys-lru",
            "--unixsocket", path, "--dir", str(folder),
        ],
        port, folder,
    )  # fmt: skip
    store_side.serve(RedisClient, (kind, path), [process.pid])


if __name__ == "__main__":
    main()
