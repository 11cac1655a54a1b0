"""What a memory may take at most: asked before its pages are, since the kernel does not say no.

It hands out pages until none are left, and then kills a process, perhaps another one.
"""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path
from typing import Final

_MEMINFO: Final = Path("/proc/meminfo")
# Of the process's control group, as a container sees its own: version 2, version 1.
_LIMITS: Final = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def meminfo() -> dict[str, int]:
    """Return the kernel's table of memory, as it writes it: most entries in KiB."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError):
        for line in _MEMINFO.read_text(encoding="ascii").splitlines():
            name, _, rest = line.partition(":")
            found[name] = int(rest.split()[0])
    return found


def check_room(nbytes: int, table: dict[str, int]) -> None:
    """Refuse what this machine, or this container, does not have.

    Args:
        nbytes: What is wanted.
        table: From `meminfo`.

    Raises:
        OSError: ENOMEM; says how much there is.
    """
    if "MemAvailable" not in table:  # no /proc, or a kernel before 3.14
        return
    room = (table["MemAvailable"] + table.get("SwapFree", 0)) << 10
    for path in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # ValueError: "max", no limit
            room = min(room, int(path.read_text(encoding="ascii")))
    if nbytes > room:
        raise OSError(errno.ENOMEM, f"no memory of {nbytes} bytes: {room} are available")
