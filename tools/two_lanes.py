"""Run the steps of CI in two lanes, one for each core: one shell command a line on stdin.

One lane takes steps from the first line on, the other from the last, until they meet: so what
waits much (processes that are killed) runs beside what computes much (linters), and both lanes end
at about the same time, however long each step takes. What a step prints comes whole, when it has
ended. A step that fails keeps none of the others from running; the exit status is 1 then.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence


class Lanes:
    """Steps that are taken from either end. Each is run once."""

    def __init__(self, steps: Sequence[str]) -> None:
        self._left = deque(steps)
        self._lock = threading.Lock()  # also: one step prints at a time
        self.failed: list[str] = []
        self.summary: list[str] = []

    def run(self) -> None:
        """Return when all steps have ended."""
        lanes = [
            threading.Thread(target=self._go, args=(take,))
            for take in (self._left.popleft, self._left.pop)
        ]
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join()

    def _go(self, take: Callable[[], str]) -> None:
        while True:
            with self._lock:
                if not self._left:
                    return
                step = take()
                print(f"== begun: {step}", flush=True)
            started = time.monotonic()
            done = subprocess.run(
                step, shell=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, errors="replace", check=False,
            )  # fmt: skip
            self._tell(step, time.monotonic() - started, done)

    def _tell(self, step: str, seconds: float, done: subprocess.CompletedProcess[str]) -> None:
        ended = "passed" if done.returncode == 0 else f"FAILED with status {done.returncode}"
        last = done.stdout.rstrip().rpartition("\n")[2].strip(" =")
        with self._lock:
            print(f"== {ended} after {seconds:.0f} s: {step}\n{done.stdout}", flush=True)
            self.summary.append(f"{seconds:5.0f} s  {ended}: {step}: {last}")
            if done.returncode:
                self.failed.append(step)


if __name__ == "__main__":
    lanes = Lanes([line.strip() for line in sys.stdin if line.strip()])
    lanes.run()
    print("\n".join(["== all steps", *lanes.summary]))
    sys.exit(1 if lanes.failed else 0)
