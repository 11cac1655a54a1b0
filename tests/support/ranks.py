"""Several real processes for one test, and a board where they leave notes for each other.

    def check(board: Board, value: int) -> int: ...      # module level, so that it can be pickled
    assert run_ranks(3, check, 7, timeout_s=30) == [7, 7, 7]

Children are forked from a server in which nothing has run but imports (`fork_server.py`). The first
rank that fails decides the outcome: its traceback is raised here and the others are killed.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.support.fork_server import CONTEXT


class RankFailed(AssertionError):
    """A rank raised, died, or did not finish in time."""


@dataclass(frozen=True)
class Board:
    """Notes by name, in files; written once, waited for with a deadline."""

    rank: int
    world_size: int
    directory: Path

    def post(self, name: str, value: Any = None) -> None:
        draft = self.directory / f".{name}.{self.rank}"
        draft.write_bytes(pickle.dumps(value))
        draft.rename(self.directory / name)

    def has(self, name: str) -> bool:
        return (self.directory / name).exists()

    def read(self, name: str, *, timeout_s: float = 60.0) -> Any:
        deadline = time.monotonic() + timeout_s
        path = self.directory / name
        while not path.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {self.rank}: no note {name!r} after {timeout_s} s")
            time.sleep(0.002)
        return pickle.loads(path.read_bytes())

    def exchange(self, name: str, value: Any, ranks: list[int] | None = None) -> dict[int, Any]:
        """Post mine and read everybody's; also a barrier."""
        self.post(f"{name}.{self.rank}", value)
        others = range(self.world_size) if ranks is None else ranks
        return {rank: self.read(f"{name}.{rank}") for rank in others}


def run_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 150.0,
    exits: Mapping[int, int] | None = None,
) -> list[Any]:
    """Run `fn(board, *args)` in `world_size` processes; return their results by rank.

    `exits`: ranks that have to end with this code instead of a result (-9: killed). A rank that
    was to die and did not is a failure.
    """
    exits = exits or {}
    with tempfile.TemporaryDirectory(prefix="ranks-") as directory:
        pipes = [CONTEXT.Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            CONTEXT.Process(
                target=_child,
                args=(Board(rank, world_size, Path(directory)), fn, args, pipe[1]),
                name=f"rank-{rank}",
            )
            for rank, pipe in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        for _, writer in pipes:
            writer.close()
        try:
            return _collect([reader for reader, _ in pipes], processes, exits, timeout_s)
        finally:
            for process, (reader, _) in zip(processes, pipes, strict=True):
                if process.is_alive():
                    process.kill()
                process.join(10.0)
                process.close()
                reader.close()


def _collect(
    readers: list[Connection], processes: list[Any], exits: Mapping[int, int], timeout_s: float
) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    results: list[Any] = [None] * len(readers)
    open_ranks = {reader: rank for rank, reader in enumerate(readers)}
    while open_ranks:
        ready = wait(list(open_ranks), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            _show_stacks([processes[rank] for rank in open_ranks.values()])
            raise RankFailed(f"ranks {sorted(open_ranks.values())} not done after {timeout_s} s")
        for reader in ready:
            rank = open_ranks.pop(reader)
            try:
                ok, value = reader.recv()
            except EOFError:
                processes[rank].join(10.0)
                code = processes[rank].exitcode
                if code != exits.get(rank):
                    raise RankFailed(f"rank {rank} ended with {code} and no result") from None
                continue
            if not ok:
                raise RankFailed(f"rank {rank} failed:\n{value}")
            if rank in exits:
                raise RankFailed(f"rank {rank} was to end with {exits[rank]}, returned {value!r}")
            results[rank] = value
    return results


def _show_stacks(processes: list[Any]) -> None:
    for process in processes:
        os.kill(process.pid, signal.SIGUSR1)
    time.sleep(0.5)


def _child(board: Board, fn: Callable[..., Any], args: tuple[Any, ...], pipe: Connection) -> None:
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__, all_threads=True)
    try:
        pipe.send((True, fn(board, *args)))
    except BaseException:  # noqa: BLE001 - whatever it was, the parent has to hear of it
        pipe.send((False, traceback.format_exc()))
    finally:
        pipe.close()
