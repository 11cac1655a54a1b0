"""The end of a process, without the interpreter's own tidying.

Commands close what they opened before they return. What is left is taking apart torch and some
thousand modules: one to three seconds of computing per process, during which a node that stops
eight workers does nothing else. The kernel frees memory, descriptors and sockets faster.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
from typing import TYPE_CHECKING, Final, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable

INTERRUPTED: Final = 130  # by Ctrl-C, as shells have it
NO_ROOM: Final = {errno.ENOSPC, errno.EDQUOT}


def run_and_end(command: Callable[[], object]) -> NoReturn:
    """Run a command as the whole of this process, then end it at once.

    Nothing registered with `atexit` is called. That there is no room for the output is one line; an
    error other than that and `SystemExit` is raised as usual.

    Args:
        command: Ends with `SystemExit`, as commands of click do, or returns.
    """
    try:
        command()
        status = 0
    except SystemExit as end:
        status = _status(end)
    except OSError as error:
        status = _no_room(error)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            status = status or 1  # the reader went away: there is nobody to tell
        except OSError as error:
            status = status or _no_room(error)
    os._exit(status)


def _no_room(error: OSError) -> int:
    """Say that a disk is full; an error other than that is raised."""
    if error.errno not in NO_ROOM:
        raise error
    with contextlib.suppress(OSError):  # it may be the disk of this stream
        sys.stderr.write(f"Error: {error}\n")
    return 1


def _status(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    sys.stderr.write(f"{end.code}\n")
    return 1
