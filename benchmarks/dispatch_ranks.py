"""The processes that `bench_dispatch` compares: one for each rank, asked all at once."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

SCRIPT = Path(__file__).parent / "peers" / "dispatch_rank.py"
START_S_MAX = 120.0
ANSWER_S_MAX = 60.0


class RankGroupFailed(RuntimeError):
    """A rank crashed, hung or reported an error; the message is its own."""


class RankGroup:
    """The ranks of one kind. Use as a context manager: the processes end with it."""

    def __init__(self, kind: str, python: Path, num_ranks: int, folder: Path) -> None:
        self._log = folder / f"{kind}-{num_ranks}.log"
        self._ended: str | None = None
        environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        with self._log.open("wb") as errors:
            self._processes = [
                subprocess.Popen(
                    [str(python), str(SCRIPT), kind, str(rank), str(num_ranks), str(folder)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    start_new_session=True,
                    env=environment,
                )
                for rank in range(num_ranks)
            ]
        self._lines = [b""] * num_ranks

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()

    def wait_ready(self) -> None:
        """Wait until all ranks have met.

        Raises:
            RankGroupFailed: One ended or is late.
        """
        self._answers(START_S_MAX)

    def ask(self, request: dict[str, object]) -> list[dict[str, Any]]:
        """Send every rank the same line; return their answers.

        Raises:
            RankGroupFailed: A rank can't. After a crash or a missing answer the group is over.
        """
        if self._ended is not None:
            raise RankGroupFailed(self._ended)
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # the missing answer says why
                process.stdin.write(json.dumps(request).encode() + b"\n")
                process.stdin.flush()
        found = self._answers(ANSWER_S_MAX)
        for rank, each in enumerate(found):
            if "error" in each:
                raise RankGroupFailed(f"rank {rank}: {each['error']}")
        return found

    def _answers(self, timeout_s: float) -> list[dict[str, Any]]:
        deadline = time.monotonic() + timeout_s
        return [self._answer(rank, deadline) for rank in range(len(self._processes))]

    def _answer(self, rank: int, deadline: float) -> dict[str, Any]:
        stream = self._processes[rank].stdout
        assert stream is not None
        line = self._lines[rank]
        while b"\n" not in line:
            left_s = max(deadline - time.monotonic(), 0.0)
            if not select.select([stream.fileno()], [], [], left_s)[0]:
                raise self._over(f"rank {rank} does not answer")
            part = os.read(stream.fileno(), 1 << 16)
            if not part:
                said = self._log.read_text(errors="replace").strip().splitlines()[-1:]
                raise self._over(f"rank {rank} ended: {''.join(said)[:300]}")
            line += part
        line, _, self._lines[rank] = line.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def _over(self, why: str) -> RankGroupFailed:
        self._ended = why
        return RankGroupFailed(why)
