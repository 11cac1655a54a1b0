"""`moe-runtime serve` and its relatives as real processes, and what they leave behind."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

import psutil
import yaml

if TYPE_CHECKING:
    from collections.abc import Sequence

    from configs.schema import RuntimeConfig

START_S_MAX = 120.0
GONE_S_MAX = 60.0
ROOT = Path(__file__).resolve().parents[2]


class CommandProcess:
    """A command in a process group of its own; a context manager that kills what is left of it.

    Args:
        arguments: Of the Python interpreter.
        folder: For its output and its temporary files.
        environment: Added to this process's own.
    """

    def __init__(self, arguments: Sequence[str], folder: Path, **environment: str) -> None:
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True)
        self.log = folder / "stderr"
        self.lines: list[str] = []
        self._arrived: queue.Queue[str | None] = queue.Queue()
        self._seen: dict[int, psutil.Process] = {}
        with self.log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=ROOT,
                env=os.environ
                | {"TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1"}
                | environment,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.descendants()
        self.process.kill()
        self.process.wait()
        for process in self._seen.values():
            if process.is_running():
                process.kill()
        self._reader.join(timeout=GONE_S_MAX)
        assert self.process.stdout is not None
        self.process.stdout.close()

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_for_line(self, pattern: str, *, timeout_s: float = START_S_MAX) -> re.Match[str]:
        """The first line of standard output, not seen before, that matches."""
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                line = self._arrived.get(timeout=left_s)
            except queue.Empty:
                break
            assert line is not None, f"it ended without saying {pattern!r}: {self.story()}"
            self.lines.append(line)
            if match := re.search(pattern, line):
                return match
        raise AssertionError(f"no line matches {pattern!r}: {self.story()}")

    def descendants(self, wanted: str = "") -> list[psutil.Process]:
        """Living processes below it whose command line holds `wanted`; all of them are noted."""
        found = []
        try:
            children = psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        for child in children:
            try:
                command = " ".join(child.cmdline())
            except psutil.Error:
                continue
            self._seen[child.pid] = child
            if wanted in command:
                found.append(child)
        return found

    def send(self, number: signal.Signals) -> None:
        """Signal the command itself, after noting what is below it."""
        self.descendants()
        self.process.send_signal(number)

    def wait(self, timeout_s: float) -> int:
        """Its exit status, and the rest of its output in `lines`."""
        try:
            status = self.process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still there after {timeout_s:.0f} s: {self.story()}") from None
        while (line := self._arrived.get(timeout=GONE_S_MAX)) is not None:
            self.lines.append(line)
        return status

    def assert_all_gone(self) -> None:
        """No process that was ever seen below it runs."""
        deadline = time.monotonic() + GONE_S_MAX
        while left := [process for process in self._seen.values() if _runs(process)]:
            assert time.monotonic() < deadline, f"still running: {left}; {self.story()}"
            time.sleep(0.02)

    def assert_no_shared_memory_files(self) -> None:
        """Nothing below it has a file in /dev/shm, so nothing can be left there."""
        for process in self.descendants():
            maps = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8")
            assert "/dev/shm/" not in maps, process

    def story(self) -> str:
        """What it has said, for the reader of a failed test."""
        return "\n".join(["", *self.lines, self.log.read_text(errors="replace")])

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._arrived.put(line.rstrip("\n"))
        self._arrived.put(None)


class ServeProcess(CommandProcess):
    """`moe-runtime serve`."""

    def __init__(self, config: RuntimeConfig, folder: Path, *arguments: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "cluster.yaml"
        file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
        super().__init__(
            ["-m", "moe_runtime", "serve", "--config", str(file), *arguments], folder / "serve"
        )
        self.url = ""

    def wait_until_serving(self) -> None:
        """Wait for the address."""
        self.url = self.wait_for_line(r" at (http://[0-9.]+:\d+)")[1]
        self.descendants()

    @property
    def agent(self) -> psutil.Process:
        """The agent that runs at present."""
        (agent,) = self.descendants("moe_runtime launch")
        return agent


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
