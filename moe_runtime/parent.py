"""A process that must not outlive the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT_VARIABLE = "MOE_RUNTIME_PARENT"
#: names the failure domain of workers: the agent that started them
NODE_VARIABLE = "MOE_RUNTIME_NODE"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, if the parent asked for it.

    The parent names itself in MOE_RUNTIME_PARENT; without it nothing happens. A parent that ended
    before this call is noticed too.
    """
    expected = os.environ.pop(PARENT_VARIABLE, None)
    if expected is None:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(expected):
        sys.exit(f"moe-runtime: the process that started this one ({expected}) has ended")
