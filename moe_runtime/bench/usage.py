"""Processor time of this process and of everything else on the machine; where threads may run."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import Final

import msgspec

_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
# user, nice, system, irq, softirq, steal: what somebody was busy with
_BUSY_FIELDS: Final = (0, 1, 2, 5, 6, 7)


class Usage(msgspec.Struct, frozen=True, array_like=True):
    """A reading of the clocks; differences of two mean something.

    Attributes:
        wall_s: monotonic.
        process_s: processor seconds of this process, all threads, user and kernel.
        machine_s: processor seconds of the whole machine, in ticks of 10 ms.
    """

    wall_s: float
    process_s: float
    machine_s: float

    def since(self, earlier: Usage) -> Usage:
        """Return the differences."""
        return Usage(
            self.wall_s - earlier.wall_s,
            self.process_s - earlier.process_s,
            self.machine_s - earlier.machine_s,
        )


def usage_now() -> Usage:
    """Read the clocks."""
    fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
    busy = sum(int(fields[i]) for i in _BUSY_FIELDS)
    return Usage(time.perf_counter(), time.process_time(), busy / _TICKS_PER_S)


def other_cores(machine_s: float, own_s: float, wall_s: float) -> float:
    """Cores kept busy by anything that is no part of the measurement."""
    return max(machine_s - own_s, 0.0) / wall_s if wall_s > 0 else 0.0


def quiet_check(seconds: float = 0.2) -> float:
    """Return the busy cores of the machine while this process sleeps."""
    before = usage_now()
    time.sleep(seconds)
    passed = usage_now().since(before)
    return other_cores(passed.machine_s, passed.process_s, passed.wall_s)


def pin(cores: Collection[int]) -> None:
    """Let every thread of this process, and those it will start, run on these cores only.

    Raises:
        OSError: no such core here.
    """
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)
