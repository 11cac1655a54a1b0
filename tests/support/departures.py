"""What masters of tests write down of each copy that goes: the proof that a name was evicted.

    key, "evicted" | "dropped", function of the master that let it go, monotonic clock

A line is in the file before the master answers whoever its step was for, so it outlives a master
that is killed. A name that is missed without one was lost.
"""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from kvstore.master.books.notices import Notices

_PASSING = ("drop", "_detach", "_clear", "evict", "evict_all")  # the catalog's own ways


class Departure(NamedTuple):
    """Why and when a copy went; `how`: "evicted" or "dropped"."""

    how: str
    by: str
    at_s: float


def write_down(path: Path) -> None:
    """Let each master of this process append to a file what goes, from now on."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def watched(how: str, tell: Callable[..., None]) -> Callable[..., None]:
        def told(notices: Notices, which: int | Sequence[int]) -> None:
            rows = (which,) if isinstance(which, int) else which
            keys = notices._table.keys
            by, at_s = _who(), time.monotonic()
            lines = [f"{keys[row].hex()} {how} {by} {at_s}\n" for row in rows]
            os.write(file, "".join(lines).encode())
            tell(notices, which)

        return told

    Notices.evicted = watched("evicted", Notices.evicted)  # type: ignore[method-assign]
    Notices.dropped = watched("dropped", Notices.dropped)  # type: ignore[method-assign]


def read_departures(path: Path) -> dict[bytes, list[Departure]]:
    """Return what went, by key, in order."""
    found: dict[bytes, list[Departure]] = defaultdict(list)
    for line in path.read_text().splitlines() if path.exists() else ():
        key, how, by, at_s = line.split()
        found[bytes.fromhex(key)].append(Departure(how, by, float(at_s)))
    return found


def _who() -> str:
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_name in _PASSING:
        frame = frame.f_back
    return frame.f_code.co_name
