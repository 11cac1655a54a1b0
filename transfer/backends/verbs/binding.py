"""The names of pyverbs that this package uses, over its releases, and the descriptors it hides.

Releases before 53 call the module of constants `pyverbs.enums`, later ones
`pyverbs.libibverbs_enums`; the names in it are the same. Constants are kept as plain integers.

No call of pyverbs releases the interpreter lock: one that waits would stop every thread. So
nothing here ever waits in pyverbs: the descriptors of events are set non-blocking and watched.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Final, TypeVar

from pyverbs.pyverbs_error import PyverbsError, PyverbsRDMAError

try:
    import pyverbs.libibverbs_enums as enums
except ImportError:
    import pyverbs.enums as enums

__all__ = ["PyverbsError", "PyverbsRDMAError", "constant", "enums", "error_text", "give_up",
           "is_event_file", "opening"]  # fmt: skip

EVENT_FILES: Final = ("anon_inode:[infinibandevent]", "/dev/infiniband/uverbs")

T = TypeVar("T")


def constant(name: str) -> int:
    """Return a constant of libibverbs, without its prefix IBV_."""
    return int(getattr(enums, f"IBV_{name}"))


def error_text(error: PyverbsError) -> str:
    """Return what a failed call says, in one line."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    code = getattr(error, "error_code", None)
    return f"{text} ({errno.errorcode.get(code, code)})" if code and "Errno" not in text else text


def opening(make: Callable[[], T]) -> tuple[T, list[int]]:
    """Make an object; return it with the descriptors that were opened for it.

    Up to release 44 pyverbs tells neither the descriptor of a completion channel nor, in any
    release, that of a device's events. A second thread that opens or closes one at the same moment
    would be mistaken, so this package does so under one lock (see `device`).
    """
    before = _event_files()
    made = make()
    return made, sorted(_event_files() - before)


def _event_files() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
        if target.startswith(EVENT_FILES):
            found.add(int(name))
    return found


def give_up(descriptor: int) -> None:
    """Close a descriptor that belongs to the parent, in a forked child.

    Its number stays taken: libibverbs still knows it, and may yet close it.
    """
    nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.dup2(nowhere, descriptor, inheritable=False)
    os.close(nowhere)


def is_event_file(descriptor: int) -> bool:
    """Whether a descriptor carries events rather than commands."""
    return os.readlink(f"/proc/self/fd/{descriptor}").startswith(EVENT_FILES[0])
