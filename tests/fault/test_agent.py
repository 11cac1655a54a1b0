"""The agent with real processes: it restarts only the dead one, drains, and leaves no orphan."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from configs.schema import ElasticConfig
from elastic import agent as agent_module
from elastic.agent import LocalAgent, WorkerGroup
from tests.support.local_store import LocalStore
from tests.support.waits import eventually

CONFIG = ElasticConfig(restart_backoff_s=0.05, max_restarts=3)

# Says who it is in a file of its own, then sleeps; SIGTERM ends it politely unless told not to.
WORKER = """
import json, os, signal, sys, time
folder, mode = sys.argv[1:]
names = ("RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT "
         "TORCHELASTIC_RESTART_COUNT TORCHELASTIC_RUN_ID MOE_RUNTIME_INCARNATION").split()
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
path = f"{folder}/{os.environ['RANK']}.{os.environ['TORCHELASTIC_RESTART_COUNT']}"
with open(path + ".part", "w") as out:
    json.dump({"pid": os.getpid(), **{name: os.environ[name] for name in names}}, out)
os.rename(path + ".part", path)
if mode == "short":
    sys.exit(0)
if mode == "broken":
    sys.exit(3)
time.sleep(120)
"""

AGENT = """
import sys
from configs.schema import ElasticConfig
from elastic.agent import LocalAgent, WorkerGroup
command = tuple(sys.argv[1:])
group = WorkerGroup(command=command, num_workers=3)
agent = LocalAgent(ElasticConfig(), group, drain_timeout_s=5.0)
sys.exit(agent.run_until_signal())
"""


def said(folder: Path) -> dict[str, dict[str, str]]:
    found = (p for p in folder.iterdir() if p.suffix != ".part")
    return {path.name: json.loads(path.read_text()) for path in found}


def group(folder: Path, mode: str, num_workers: int = 3) -> WorkerGroup:
    command = (sys.executable, "-c", WORKER, str(folder), mode)
    return WorkerGroup(command=command, num_workers=num_workers, master_port=1234, run_id="run-7")


class Running:
    """An agent in a thread, which stops with the block."""

    def __init__(self, agent: LocalAgent) -> None:
        self.agent = agent
        self.result: int | None = None
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        self.result = self.agent.run()

    def __enter__(self) -> LocalAgent:
        self.thread.start()
        return self.agent

    def __exit__(self, *error: object) -> None:
        self.agent.request_stop()
        self.thread.join(timeout=30)
        assert not self.thread.is_alive()


def test_only_the_dead_worker_is_restarted(tmp_path: Path) -> None:
    store = LocalStore()
    running = Running(LocalAgent(CONFIG, group(tmp_path, "normal"), store=store))
    with running as agent:
        eventually(lambda: len(said(tmp_path)) == 3)
        before, names = agent.pids(), agent.incarnations()
        os.kill(before[1], signal.SIGKILL)
        eventually(lambda: "1.1" in said(tmp_path))
        after = agent.pids()
        assert (after[0], after[2]) == (before[0], before[2])
        assert after[1] != before[1]
        assert store.ended == {names[1]: "signal 9"}
        assert agent.incarnations()[1] != names[1]
        everybody = said(tmp_path)
    assert running.result == 0
    assert all(not psutil.pid_exists(pid) for pid in (*before.values(), *after.values()))
    first, second = everybody["1.0"], everybody["1.1"]
    assert first["MOE_RUNTIME_INCARNATION"] == names[1]
    assert second["MOE_RUNTIME_INCARNATION"] != names[1]
    assert (second["RANK"], second["LOCAL_RANK"], second["WORLD_SIZE"]) == ("1", "1", "3")
    assert (second["LOCAL_WORLD_SIZE"], second["GROUP_RANK"]) == ("3", "0")
    assert (second["MASTER_ADDR"], second["MASTER_PORT"]) == ("127.0.0.1", "1234")
    assert second["TORCHELASTIC_RUN_ID"] == "run-7"


def test_a_worker_that_ends_well_is_not_restarted(tmp_path: Path) -> None:
    agent = LocalAgent(CONFIG, group(tmp_path, "short", num_workers=2))
    assert agent.run() == 0
    assert sorted(said(tmp_path)) == ["0.0", "1.0"]


def test_a_worker_that_dies_again_and_again_is_given_up(tmp_path: Path) -> None:
    store = LocalStore()
    agent = LocalAgent(CONFIG, group(tmp_path, "broken", num_workers=1), store=store)
    start = time.monotonic()
    assert agent.run() == 1
    assert len(said(tmp_path)) == 4  # the first life and three restarts
    assert set(store.ended.values()) == {"exit code 3"}
    assert len(store.ended) == 4
    assert time.monotonic() - start > 0.05 + 0.1  # the second and third restart waited


def test_a_restart_that_fails_is_tried_again_and_costs_no_other_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, failures = agent_module._Handler, []

    def handler(**options: Any) -> Any:
        if options["env"]["TORCHELASTIC_RESTART_COUNT"] == "1":
            failures.append(options["env"]["RANK"])
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return start(**options)

    monkeypatch.setattr(agent_module, "_Handler", handler)
    with Running(LocalAgent(CONFIG, group(tmp_path, "normal"))) as agent:
        eventually(lambda: len(said(tmp_path)) == 3)
        before = agent.pids()
        os.kill(before[1], signal.SIGKILL)
        eventually(lambda: "1.2" in said(tmp_path))
        after = agent.pids()
        assert (after[0], after[2]) == (before[0], before[2])
    assert failures == ["1"]


def test_a_program_that_is_not_there_is_said_at_once(tmp_path: Path) -> None:
    missing = WorkerGroup(command=(str(tmp_path / "nothing"),), num_workers=2)
    with pytest.raises(FileNotFoundError):
        LocalAgent(CONFIG, missing).run()


def test_a_worker_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    agent = LocalAgent(CONFIG, group(tmp_path, "stubborn", num_workers=1), drain_timeout_s=0.3)
    with Running(agent):
        eventually(lambda: len(said(tmp_path)) == 1)
        (pid,) = agent.pids().values()
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_worker_outlives_its_agent(tmp_path: Path, number: signal.Signals) -> None:
    mode = "stubborn" if number is signal.SIGKILL else "normal"
    command = [sys.executable, "-c", AGENT, sys.executable, "-c", WORKER, str(tmp_path), mode]
    agent = subprocess.Popen(command)
    try:
        eventually(lambda: len(said(tmp_path)) == 3)
        pids = [int(worker["pid"]) for worker in said(tmp_path).values()]
        assert all(psutil.pid_exists(pid) for pid in pids)
        agent.send_signal(number)
        expected = 0 if number is signal.SIGTERM else -signal.SIGKILL
        assert agent.wait(timeout=60) == expected
        # Orphans are reaped by init, which may take a moment or (in a container) never happen.
        eventually(lambda: not any(_runs(pid) for pid in pids))
    finally:
        agent.kill()
        agent.wait(timeout=10)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
