"""What the sides of bench_kvstore_peers share: client processes that measure when told to.

A side starts its servers and `CLIENTS` clients, says the processes' numbers in one line, and then
answers one JSON line per line: {"op", "size", "blocks", "clients", "seconds"} -> figures.
Runs in the interpreter of any peer: numpy and the standard library only.

Clients are started together over their pipes, not with a barrier: a side is ended by SIGKILL,
and the named semaphores below a barrier would stay in /dev/shm.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np

CLIENTS = 4
BUFFER_BYTES = 16 << 20  # what one operation moves at most
SHARE_BYTES = 160 << 20  # of the pool, per client
POOL_BYTES = CLIENTS * SHARE_BYTES
READY_S = 60.0
READY = "ready"  # of a client: it is there, or warm


Use = Callable[[Any], object]


class StoreClient(Protocol):
    """One client of a store. Every put is of new keys, unless the peer has no such notion."""

    buffer: Any  # [BUFFER_BYTES] uint8: what is put, and where gets go
    errors: tuple[type[Exception], ...]  # of the peer's own

    def put(self, size: int, blocks: int) -> None:
        """Store `blocks` values of `size` bytes from the buffer."""

    def get(self, size: int, blocks: int, turn: int) -> None:
        """Read values that an earlier put stored into the buffer; `turn` says which."""

    def view(self, size: int, turn: int, use: Use) -> None:
        """Have a value that an earlier put stored used where it lies, without a copy of ours.

        Only some peers have that; `use` gets its [size] uint8.
        """

    def begin(self) -> None:
        """Forget what earlier measurements left, where the peer does not do so by itself."""

    def tidy(self) -> bool:
        """Make room if the share is used up, outside of the time measured; True if it was."""


def filled(nbytes: int, seed: int) -> Any:
    """Bytes that look different everywhere."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def start_server(command: list[str], port: int, folder: Path) -> subprocess.Popen[bytes]:
    """Start a server and wait until its port answers; it ends with this process."""
    with (folder / f"server-{port}").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    atexit.register(process.kill)  # who asks may be killed, and can end nobody then
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return process
    raise RuntimeError(f"{command[0]} did not start")


def read_all(value: Any) -> int:
    """Read every byte of a value once, as whoever is handed it does."""
    return int(np.bitwise_xor.reduce(value.view(np.uint64)))


def operation(client: StoreClient, request: dict[str, Any]) -> Callable[[int], None]:
    """Return what is measured; it takes the number of the turn.

    Raises:
        RuntimeError: What is viewed is not what was put.
    """
    size, blocks, op = request["size"], request["blocks"], request["op"]
    if op == "put":
        return lambda turn: client.put(size, blocks)
    if op == "get":
        return lambda turn: client.get(size, blocks, turn)
    wanted = client.buffer[:size].copy()

    def compare(value: Any) -> None:
        if not np.array_equal(value, wanted):
            raise RuntimeError("what is seen is not what was put")

    for turn in range(4):
        client.view(size, turn, compare)
    use = len if op == "view" else read_all
    return lambda turn: client.view(size, turn, use)


def measure(
    client: StoreClient, request: dict[str, Any], wait: Callable[[], bool]
) -> dict[str, Any] | None:
    """Carry out one request; what is not the store's work is left out of the time.

    Args:
        client: Whose.
        request: As in the module's text.
        wait: Says that this client is ready, and waits for all; False: nobody measures.
    """
    size, blocks, op = request["size"], request["blocks"], request["op"]
    before = client.buffer[: size * blocks].copy()
    turn, spans, skipped = 0, [], 0.0
    client.begin()
    for _ in range(request.get("live", 4)):
        client.put(size, blocks)
    for _ in range(2):
        client.get(size, blocks, turn)
        turn += 1
    run = operation(client, request)
    if not wait():
        return None
    begin = now = time.perf_counter()
    while now - begin - skipped < request["seconds"]:
        run(turn)
        turn += 1
        later = time.perf_counter()
        spans.append(later - now)
        now = later
        if op == "put" and client.tidy():
            later = time.perf_counter()
            skipped, now = skipped + later - now, later
    wall_s = now - begin - skipped
    if op == "get" and not np.array_equal(client.buffer[: size * blocks], before):
        raise RuntimeError("what came back is not what was put")
    return {"wall_s": wall_s, "count": len(spans), "p50_us": 1e6 * statistics.median(spans)}


def run_client(
    make: Callable[..., StoreClient],
    index: int,
    arguments: tuple[Any, ...],
    pipe: Connection,
) -> None:
    """Be one client process."""

    def wait() -> bool:
        pipe.send(READY)
        return bool(pipe.recv())

    client = make(index, *arguments)
    client.buffer[:] = filled(BUFFER_BYTES, index)
    for _ in range(2 * SHARE_BYTES // (4 << 20)):  # so that the pool's pages exist
        client.put(4 << 20, 1)
        client.tidy()
    pipe.send(READY)
    while (request := pipe.recv()) is not None:
        try:
            if (found := measure(client, request, wait)) is not None:
                pipe.send(found)
        except (RuntimeError, OSError, ValueError, *client.errors) as error:  # told who asked
            pipe.send({"error": f"{type(error).__name__}: {error}"})
    os._exit(0)  # some peers do not end by themselves


def answer(pipes: list[Connection], request: dict[str, Any]) -> dict[str, Any]:
    """Ask as many clients as wanted at once, and add up what they say."""
    chosen = pipes[: request["clients"]]
    for pipe in chosen:
        pipe.send(request)
    said = [pipe.recv() for pipe in chosen]
    ready = [pipe for pipe, word in zip(chosen, said, strict=True) if word == READY]
    everybody = len(ready) == len(chosen)
    for pipe in ready:
        pipe.send(everybody)
    found = [pipe.recv() for pipe in chosen] if everybody else [w for w in said if w != READY]
    errors = [one["error"] for one in found if "error" in one]
    if errors:
        return {"error": errors[0]}
    nbytes = request["size"] * request["blocks"]
    return {
        "gb_s": sum(one["count"] * nbytes / one["wall_s"] for one in found) / 1e9,
        "p50_us": statistics.median(one["p50_us"] for one in found),
        "count": sum(one["count"] for one in found),
    }


def serve(make: Callable[..., StoreClient], arguments: tuple[Any, ...], pids: list[int]) -> None:
    """Start the clients and answer requests until the end of the input.

    Args:
        make: (index, *arguments) -> a client; picklable.
        arguments: For it.
        pids: Servers.
    """
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for index in range(CLIENTS):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=run_client, args=(make, index, arguments, theirs), daemon=True
        )
        process.start()
        pipes.append(ours)
        processes.append(process)
    for pipe in pipes:
        if not pipe.poll(READY_S):
            raise RuntimeError("a client did not start")
        pipe.recv()
    numbers = [os.getpid(), *pids, *(process.pid for process in processes)]
    sys.stdout.write(json.dumps({"pids": numbers}) + "\n")
    sys.stdout.flush()
    for line in sys.stdin:
        request = json.loads(line)
        found = answer(pipes, request)
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
