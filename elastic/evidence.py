"""Why a member is thought to be gone, and how far that can be trusted.

| kind            | seen by                       | missed by        | may be wrong about          |
|-----------------|-------------------------------|------------------|-----------------------------|
| connection_lost | end of file, reset, refused   | SIGSTOP, a hang  | a cut link, a closed engine |
| process_exit    | /proc on one node, the agent  | hangs            | nothing: it is certain      |
| deadline        | no message for too long       | nothing, is late | a slow or starved process   |

None of it makes anybody leave the group: only a committed view does. A deadline is confirmed by a
probe that the suspect's engine thread answers, and a process that was itself stalled accuses
nobody by a deadline, because it cannot tell its own silence from theirs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

EXITING_FLAG = 0x4  # PF_EXITING of the kernel: set before a dying process closes its sockets


class EvidenceKind(StrEnum):
    """Kinds of evidence, from the weakest to the strongest."""

    DEADLINE = "deadline"
    CONNECTION_LOST = "connection_lost"
    PROCESS_EXIT = "process_exit"

    @property
    def strength(self) -> int:
        """Larger is stronger."""
        return _STRENGTH[self]


_STRENGTH = {kind: position for position, kind in enumerate(EvidenceKind)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What was seen.

    Attributes:
        kind: How far it can be trusted.
        detail: What exactly, for people.
    """

    kind: EvidenceKind
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}" if self.detail else str(self.kind)


def process_ended(pid: int) -> bool:
    """Whether the process of this node has ended or is past the point of no return.

    A pid may have been given to another process: then the answer is False, never a wrong True.
    It must only be asked about a process of the same pid namespace.
    """
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False
    # The name in parentheses may itself hold spaces and parentheses.
    state, *fields = status.rpartition(")")[2].split()
    flags = int(fields[5])
    return state in "ZX" or bool(flags & EXITING_FLAG)


class Watch:
    """A thread that notices when its own process did not run, and calls `look` now and then.

    It sleeps a fraction of the threshold at a time. When a sleep took longer by more than the
    threshold, the whole process (or its interpreter lock) was stalled.

    Args:
        threshold_s: Longest sleep that is still normal.
        look: Called about every `look_interval_s` on the watch's thread; must not raise.
        look_interval_s: See `look`.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        *,
        threshold_s: float,
        look: Callable[[], None],
        look_interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._threshold_s = threshold_s
        self._look = look
        self._look_interval_s = look_interval_s
        self._clock = clock
        self._beat = clock()
        self._stall_ended: float | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread. Idempotent."""
        if self._thread is None:
            self._beat = self._clock()
            self._thread = threading.Thread(target=self._run, name="elastic-watch", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it, at most as long as one `look` takes."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)

    def stalled(self) -> bool:
        """Whether this process is in, or came out of, a stall less than a threshold ago.

        True also before the watch itself has run again: after a stop the asking thread may be
        the first to run.
        """
        now = self._clock()
        if self._thread is not None and now - self._beat > self._threshold_s:
            return True
        return self._stall_ended is not None and now - self._stall_ended < self._threshold_s

    def _run(self) -> None:
        pause_s = min(self._threshold_s / 4, self._look_interval_s)
        next_look = self._clock() + self._look_interval_s
        while not self._stop.wait(pause_s):
            now = self._clock()
            if now - self._beat > self._threshold_s:
                self._stall_ended = now
            self._beat = now
            if now >= next_look:
                # A look that hangs counts as a stall: without the store nobody can be evicted.
                self._look()
                next_look = self._clock() + self._look_interval_s
