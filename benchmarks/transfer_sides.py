"""The systems that bench_transfer compares: processes that are asked, placed, stopped and ended."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_runtime.bench.usage import other_cores, usage_now

PEERS = Path(__file__).parent / "peers"
START_S_MAX = 120.0
ANSWER_S_MAX = 90.0


class SideFailed(RuntimeError):
    """A side crashed, hung or reported an error; the message is its own."""


def cpu_s(pids: list[int]) -> float:
    """Processor seconds of processes, all threads."""
    # The kernel's number for "processor clock of process pid", see clock_getcpuclockid(3).
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)


@dataclass(slots=True)
class SideProcess:
    """One side: an initiator, and the target below it.

    Attributes:
        spins: its idle threads do not sleep, so it is stopped while others run.
        ended: why it can't be asked any more, None while it can.
    """

    name: str
    process: subprocess.Popen[bytes]
    spins: bool
    log: Path
    pids: list[int] = field(default_factory=list)
    ended: str | None = None
    cores: list[set[int]] = field(default_factory=list)
    _line: bytes = b""

    @classmethod
    def start(
        cls, name: str, python: Path, script: str, *arguments: str, spins: bool, logs: Path
    ) -> SideProcess:
        """Start it; `wait_ready` waits."""
        log = logs / name
        with log.open("wb") as errors:
            process = subprocess.Popen(
                [str(python), str(PEERS / script), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        return cls(name, process, spins, log)

    def wait_ready(self) -> None:
        """Wait until both of its processes are up; a failure is kept in `ended`."""
        with contextlib.suppress(SideFailed):
            self.pids = self._answer(START_S_MAX)["pids"]
            self._stop()

    def ask(self, request: dict[str, Any], placement: list[set[int]]) -> dict[str, Any]:
        """Measure one case.

        Returns:
            Its answer, with `other_cores` added.

        Raises:
            SideFailed: it can't; it stays up if it said so itself.
        """
        if self.ended is not None:
            raise SideFailed(self.ended)
        self._continue()
        self._place(placement)
        before, used = usage_now(), cpu_s(self.pids)
        with contextlib.suppress(BrokenPipeError):  # the missing answer says why
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        found = self._answer(ANSWER_S_MAX)
        passed, used = usage_now().since(before), cpu_s(self.pids) - used
        self._stop()
        if "error" in found:
            raise SideFailed(found["error"])
        found["other_cores"] = other_cores(passed.machine_s, used, passed.wall_s)
        return found

    def idle_cores(self, seconds: float) -> float:
        """Cores that both processes use while nothing is asked of them."""
        if self.ended is not None:
            raise SideFailed(self.ended)
        self._continue()
        time.sleep(0.2)
        before, begin = cpu_s(self.pids), time.perf_counter()
        time.sleep(seconds)
        used = (cpu_s(self.pids) - before) / (time.perf_counter() - begin)
        self._stop()
        return used

    def close(self) -> None:
        """End both processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGCONT)
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        descriptor, deadline = self.process.stdout.fileno(), time.monotonic() + timeout_s
        while b"\n" not in self._line:
            if not select.select([descriptor], [], [], max(deadline - time.monotonic(), 0.0))[0]:
                raise self._gone(f"no answer within {timeout_s:.0f} s")
            part = os.read(descriptor, 1 << 16)
            if not part:
                said = self.log.read_text(errors="replace").strip().splitlines()[-1:]
                raise self._gone(f"ended with status {self.process.wait()}: {''.join(said)[:200]}")
            self._line += part
        line, _, self._line = self._line.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def _gone(self, why: str) -> SideFailed:
        self.ended = why
        sys.stderr.write(f"{self.name}: {why}\n")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return SideFailed(why)

    def _place(self, placement: list[set[int]]) -> None:
        """Let initiator and target run on these cores, all of their threads."""
        if placement == self.cores:
            return
        for pid, cores in zip(self.pids, placement, strict=True):
            for thread in os.listdir(f"/proc/{pid}/task"):
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(int(thread), cores)
        self.cores = placement

    def _stop(self) -> None:
        if self.spins:
            os.killpg(self.process.pid, signal.SIGSTOP)

    def _continue(self) -> None:
        if self.spins:
            os.killpg(self.process.pid, signal.SIGCONT)


@contextlib.contextmanager
def running(sides: list[SideProcess]) -> Iterator[dict[str, SideProcess]]:
    """Wait until all are ready, end all at the end."""
    try:
        for side in sides:
            side.wait_ready()
        yield {side.name: side for side in sides}
    finally:
        for side in sides:
            side.close()
