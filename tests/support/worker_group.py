"""Starts round workers as processes, and reads what they write.

They are forked from a server that has imported torch once: on two cores the imports of twenty
processes would take longer than all that is tested.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from configs.schema import ElasticConfig
from elastic.store import TCPStoreMembership
from tests.support.fork_server import CONTEXT

COMMAND = (sys.executable, "-m", "tests.support.round_worker")
ROOT = Path(__file__).parents[2]


def worker_environment(
    folder: Path, store: TCPStoreMembership, world_size: int, round_timeout_s: float
) -> dict[str, str]:
    config = ElasticConfig(
        bootstrap_timeout_s=120.0,
        install_timeout_s=60.0,
        watch_interval_s=0.3,
        stall_threshold_s=0.8,
        restart_backoff_s=0.05,
    )
    return {
        "FOLDER": str(folder),
        "STORE_PORT": str(store.port),
        "WORLD_SIZE": str(world_size),
        "ROUND_TIMEOUT_S": str(round_timeout_s),
        "ELASTIC": config.model_dump_json(),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(
            [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        ),
    }


def _work(settings: dict[str, str], errors: str) -> None:
    """Be a worker: the target of the forked process."""
    os.environ.update(settings)
    with open(errors, "wb") as stream:
        os.dup2(stream.fileno(), sys.stderr.fileno())
    from tests.support import round_worker

    round_worker.main()


class Group:
    """Worker processes of one test."""

    def __init__(self, folder: Path, world_size: int, *, round_timeout_s: float = 60.0) -> None:
        self.folder = folder
        self.store = TCPStoreMembership("127.0.0.1", 0, is_master=True)
        self.environment = worker_environment(folder, self.store, world_size, round_timeout_s)
        self.processes: dict[str, Any] = {}

    def start(self, rank: int) -> str:
        """Start a worker for this slot; return its incarnation."""
        name = secrets.token_hex(8)
        places = {"RANK": str(rank), "LOCAL_RANK": str(rank), "MOE_RUNTIME_INCARNATION": name}
        settings = {**self.environment, **places}
        errors = str(self.folder / f"{name}.stderr")
        process = CONTEXT.Process(target=_work, args=(settings, errors))
        process.start()
        self.processes[name] = process
        return name

    def signal(self, name: str, number: signal.Signals) -> float:
        """Send a signal; return when."""
        now = time.monotonic()
        os.kill(self.processes[name].pid, number)
        return now

    def ended_by(self, name: str, timeout_s: float = 60.0) -> int:
        self.processes[name].join(timeout=timeout_s)
        code: int = self.processes[name].exitcode
        return code

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.join(timeout=20)
            process.close()
        self.store.close()

    # --- what they wrote ------------------------------------------------------------------------

    def events(self, name: str, event: str | None = None, **facts: object) -> list[dict[str, Any]]:
        path = self.folder / f"{name}.jsonl"
        if not path.exists():
            return []
        whole = [line for line in path.read_text().splitlines(keepends=True) if line[-1] == "\n"]
        found = [json.loads(line) for line in whole]
        if event is not None:
            found = [line for line in found if line["event"] == event]
        return [line for line in found if facts.items() <= line.items()]

    def wait(self, what: str, condition: Callable[[], Any], timeout_s: float = 60.0) -> Any:
        deadline = time.monotonic() + timeout_s
        while not (result := condition()):
            if time.monotonic() > deadline:
                raise AssertionError(f"waited {timeout_s} s for {what}\n{self.report()}")
            time.sleep(0.005)
        return result

    def installed(self, names: list[str], ranks: list[int], timeout_s: float = 60.0) -> float:
        """Wait until all of `names` have installed a view of exactly `ranks`; return when."""

        def times() -> list[float] | None:
            last = [self.events(name, "installed")[-1:] for name in names]
            if not all(found and found[0]["ranks"] == ranks for found in last):
                return None
            if len({found[0]["epoch"] for found in last}) > 1:
                return None
            return [found[0]["t"] for found in last]

        moments: list[float] = self.wait(f"a view of ranks {ranks}", times, timeout_s)
        return max(moments)

    def serving(self, names: list[str], timeout_s: float = 60.0) -> None:
        """Wait until all of `names` have done a round in their newest epoch."""

        def all_did() -> bool:
            epochs = [self.events(name, "installed")[-1]["epoch"] for name in names]
            return all(self.events(n, "round", epoch=e) for n, e in zip(names, epochs, strict=True))

        self.wait("rounds in the new epoch", all_did, timeout_s)

    def epoch(self) -> int:
        view = self.store.read()
        return 0 if view is None else view.epoch

    def report(self) -> str:
        parts = []
        for name, process in self.processes.items():
            lines = [json.dumps(line) for line in self.events(name)][-12:]
            errors = (self.folder / f"{name}.stderr").read_text()[-1500:]
            parts.append(f"--- {name} (exit code {process.exitcode})\n" + "\n".join(lines) + errors)
        return "\n".join(parts)
