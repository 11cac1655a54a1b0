"""Looking at processes, and noticing one's own stall."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from elastic.evidence import EvidenceKind, Watch, process_ended
from tests.support.waits import eventually


def test_process_ended() -> None:
    assert not process_ended(os.getpid())
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    assert not process_ended(process.pid)
    os.kill(process.pid, signal.SIGSTOP)
    assert not process_ended(process.pid)  # stopped is not ended
    process.kill()
    deadline = time.monotonic() + 60
    while not process_ended(process.pid):  # a zombie has ended
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.wait(timeout=10)
    assert process_ended(process.pid)


def test_strength_has_an_order() -> None:
    assert (
        EvidenceKind.DEADLINE.strength
        < EvidenceKind.CONNECTION_LOST.strength
        < EvidenceKind.PROCESS_EXIT.strength
    )


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_watch_sees_a_jump_of_time_and_forgets_it() -> None:
    clock = Clock()
    looks: list[float] = []  # by the clock
    watch = Watch(
        threshold_s=1.0, look=lambda: looks.append(clock.now), look_interval_s=0.02, clock=clock
    )
    assert not watch.stalled()
    watch.start()
    try:
        clock.now = 0.5
        assert not watch.stalled()
        clock.now = 5.0
        assert watch.stalled()  # whether or not the watch has run since
        eventually(lambda: looks and looks[-1] == 5.0, "now it has")
        assert watch.stalled()
        for step in range(1, 9):
            clock.now = 5.0 + 0.2 * step
            eventually(lambda: looks[-1] == clock.now, "it has run since")
        assert not watch.stalled()
    finally:
        watch.stop()


def ask(process: subprocess.Popen[str]) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("x\n")
    process.stdin.flush()
    return process.stdout.readline()


def test_a_stopped_process_knows_it_was_stalled() -> None:
    code = (
        "import sys, time\n"
        "from elastic.evidence import Watch\n"
        "watch = Watch(threshold_s=0.5, look=lambda: None, look_interval_s=5.0)\n"
        "watch.start()\n"
        "print(watch.stalled(), flush=True)\n"
        "for line in sys.stdin:\n"
        "    print(watch.stalled(), flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdout.readline()
        eventually(lambda: ask(process) == "False\n", "on a busy machine too, it is well at last")
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(1.0)
        process.stdin.write("x\n")
        process.stdin.flush()
        os.kill(process.pid, signal.SIGCONT)
        assert process.stdout.readline() == "True\n"
        eventually(lambda: ask(process) == "False\n", "and forgets it")
    finally:
        process.kill()
        process.wait(timeout=10)
        process.stdin.close()
        process.stdout.close()
