"""A clock that an epoll loop can wait for, and that any thread may set: a timerfd."""

from __future__ import annotations

import ctypes
import os
import time
from contextlib import suppress
from typing import Final

# From <sys/timerfd.h>; Python has these calls from 3.13 on.
CLOEXEC: Final = os.O_CLOEXEC
NONBLOCK: Final = os.O_NONBLOCK

_libc = ctypes.CDLL(None, use_errno=True)


class _Setting(ctypes.Structure):
    """struct itimerspec: seconds and nanoseconds of the interval, and until it rings."""

    _fields_ = [(name, ctypes.c_long) for name in ("every_s", "every_ns", "in_s", "in_ns")]


class Alarm:
    """Rings once per `set`: its descriptor is readable then, until `clear`. Thread-safe."""

    def __init__(self) -> None:
        self._fd: int = _libc.timerfd_create(time.CLOCK_MONOTONIC, CLOEXEC | NONBLOCK)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")

    def fileno(self) -> int:
        """The descriptor, -1 once closed."""
        return self._fd

    def set(self, seconds: float) -> None:
        """Ring in so many seconds, once; what was set before is forgotten."""
        whole, part = divmod(seconds, 1)
        setting = _Setting(0, 0, int(whole), max(int(part * 1e9), 1))
        if self._fd >= 0 and _libc.timerfd_settime(self._fd, 0, ctypes.byref(setting), None):
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")

    def clear(self) -> None:
        """Stop ringing."""
        with suppress(BlockingIOError):  # it was set again meanwhile
            os.read(self._fd, 8)

    def close(self) -> None:
        """Free the descriptor; idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
