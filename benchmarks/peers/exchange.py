"""How a side of the comparison is driven: JSON lines, one measurement at a time.

Needs numpy and nothing else, because it runs in the peers' environment too. A side is a program
that makes `Side` and calls `serve`:

    <- {"ready": true, "pids": [...]}
    -> {"op": "write", "size": 4096, "blocks": 1, "seconds": 0.4, ...}
    <- {"operations": 812, "seconds": 0.4, "p50_us": ..., "cpu_s": ...}      or {"error": "..."}
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

WINDOW_BYTES = 256 << 20
WARM_OPERATIONS = 2
SIGKILL = 9

# Everything else that the peers write to standard output would be taken for an answer.
_answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


class Side(Protocol):
    """One system under comparison, with its target.

    Attributes:
        pids: of both processes.
    """

    pids: list[int]

    def operation(self, request: dict[str, Any], local: Any, remote: Any) -> Callable[[], None]:
        """Return what is timed: moves all pieces, returns when they are in place, or raises."""

    def local(self) -> Any:
        """[WINDOW_BYTES] uint8: this side's memory."""

    def remote(self, offset: int, nbytes: int) -> bytes:
        """Bytes of the target's memory, by a way that is not measured."""


def offsets(request: dict[str, Any]) -> tuple[Any, Any]:
    """[blocks] int64 each: distinct places, in random order, twice as much room as bytes."""
    size, blocks = request["size"], request["blocks"]
    slots = WINDOW_BYTES // size if blocks == 1 else 2 * blocks
    rng = np.random.default_rng(size + blocks)
    return tuple(
        (rng.permutation(slots)[:blocks] * size if blocks > 1 else np.zeros(1)).astype(np.int64)
        for _ in range(2)
    )


def cpu_s(pids: list[int]) -> float:
    """Processor seconds of processes, all threads, in nanosecond steps."""
    # The kernel's number for "processor clock of process pid", see clock_getcpuclockid(3).
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)


def filled(nbytes: int, seed: int) -> Any:
    """[nbytes] uint8, every page touched."""
    words = np.arange(nbytes // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (words + np.uint64(seed)).view(np.uint8)


def start_target(script: str, *arguments: str) -> subprocess.Popen[str]:
    """Start the target: this script again; it ends with its standard input."""
    return subprocess.Popen(
        [sys.executable, script, "target", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Return the next JSON line of a target."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            found: dict[str, Any] = json.loads(line)
            return found
    raise RuntimeError(f"the target ended with status {process.wait()}")


def ask_bytes(process: subprocess.Popen[str], offset: int, nbytes: int) -> bytes:
    """Ask a target that runs `serve_bytes`."""
    assert process.stdin is not None
    process.stdin.write(json.dumps({"offset": offset, "nbytes": nbytes}) + "\n")
    process.stdin.flush()
    return bytes.fromhex(answer(process)["bytes"])


def say(fields: dict[str, Any]) -> None:
    """Write one JSON line for whoever drives this process."""
    _answers.write(json.dumps(fields) + "\n")
    _answers.flush()


def serve_bytes(memory: Any) -> None:
    """As a target: tell bytes of the memory until standard input ends."""
    for line in sys.stdin:
        wanted = json.loads(line)
        part = memory[wanted["offset"] : wanted["offset"] + wanted["nbytes"]]
        say({"bytes": part.tobytes().hex()})


def measure(side: Side, request: dict[str, Any]) -> dict[str, Any]:
    """Time one case, then compare bytes that were not there before."""
    here, there = offsets(request)
    operate = side.operation(request, here, there)
    for _ in range(WARM_OPERATIONS):
        operate()
    clock, latencies = time.perf_counter, []
    used = cpu_s(side.pids)
    begin = now = clock()
    while now - begin < request["seconds"] or len(latencies) < request.get("operations_min", 1):
        start = clock()
        operate()
        now = clock()
        latencies.append(now - start)
    used = cpu_s(side.pids) - used
    check(side, request, operate, here, there)
    p50, p99, p999 = (float(x) * 1e6 for x in np.percentile(latencies, (50, 99, 99.9)))
    moved_gb = request["size"] * request["blocks"] * len(latencies) / 1e9
    return {
        "operations": len(latencies),
        "seconds": now - begin,
        "gb_s": moved_gb / (now - begin),
        "cpu_s_per_gb": used / moved_gb,
        "p50_us": p50,
        "p99_us": p99,
        "p999_us": p999,
    }


def check(side: Side, request: dict[str, Any], operate: Callable[[], None], here: Any,
          there: Any) -> None:  # fmt: skip
    """Operate once more with fresh bytes and compare the last bytes of the last piece."""
    size = request["size"]
    nbytes = min(size, 4096)
    mine, theirs = int(here[-1]) + size - nbytes, int(there[-1]) + size - nbytes
    local = side.local()
    fresh = np.frombuffer(os.urandom(nbytes), dtype=np.uint8)
    local[mine : mine + nbytes] = fresh
    operate()
    found = side.remote(theirs, nbytes)
    if request["op"] == "read":
        # The read must have brought what the target holds over our fresh bytes.
        if local[mine : mine + nbytes].tobytes() != found:
            raise RuntimeError("bytes read differ")
    elif found != fresh.tobytes():
        raise RuntimeError("bytes written differ")


def serve(side: Side) -> None:
    """Answer requests until standard input ends; then end at once, whatever threads there are."""
    say({"ready": True, "pids": side.pids})
    for line in sys.stdin:
        try:
            result = measure(side, json.loads(line))
        except Exception as error:  # noqa: BLE001 - any failure of a peer is a result
            result = {"error": f"{type(error).__name__}: {error}"[:300]}
        say(result)
    for pid in side.pids:
        if pid != os.getpid():
            os.kill(pid, SIGKILL)
    os._exit(0)
