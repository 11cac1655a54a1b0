"""The end of a process, without the interpreter's own tidying.

Commands close what they opened before they return. What is left is taking apart torch and some
thousand modules: one to three seconds of computing per process, during which a node that stops
eight workers does nothing else. The kernel frees memory, descriptors and sockets faster.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable


def run_and_end(command: Callable[[], object]) -> NoReturn:
    """Run a command as the whole of this process, then end it at once.

    Nothing registered with `atexit` is called. An error other than `SystemExit` is raised as usual.

    Args:
        command: Ends with `SystemExit`, as commands of click do, or returns.
    """
    try:
        command()
        status = 0
    except SystemExit as end:
        status = _status(end)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            status = status or 1  # the reader went away: there is nobody to tell
    os._exit(status)


def _status(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    sys.stderr.write(f"{end.code}\n")
    return 1
