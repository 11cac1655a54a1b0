"""A process that runs `tests.support.rail_worker` and is spoken to in lines of JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
END_S = 30.0


class Worker:
    """A process in a namespace that speaks lines of JSON."""

    def __init__(self, *, space: str | None = None, **options: Any) -> None:
        inside = ["ip", "netns", "exec", space] if space else []
        self.process = subprocess.Popen(
            [*inside, sys.executable, "-m", "tests.support.rail_worker", json.dumps(options)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the worker has ended"
        found: dict[str, Any] = json.loads(line)
        return found

    def say(self, **fields: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(fields) + "\n")
        self.process.stdin.flush()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(END_S)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
