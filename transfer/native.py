"""The compiled loops where they were built, else the same in Python.

The only module that imports `transfer._native`. MOE_RUNTIME_NATIVE=0 keeps it from being used.
All addresses and offsets are bytes; callers have checked the bounds.
"""

from __future__ import annotations

import ctypes
import os
from types import ModuleType
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

IOVECS_MAX: Final = 512


def _copy_one(target: int, source: int, nbytes: int, /) -> None:
    """Copy bytes between two addresses, which may overlap.

    Raises:
        ValueError: `nbytes` is negative.
    """
    if nbytes < 0:
        raise ValueError(f"negative length {nbytes}")
    ctypes.memmove(target, source, nbytes)


def _copy_pieces(
    target_base: int,
    source_base: int,
    target_offsets: Ints,
    source_offsets: Ints,
    lengths: Ints,
    /,
) -> None:
    """Copy scattered pieces between two areas.

    Args:
        target_base: address that `target_offsets` count from.
        source_base: address that `source_offsets` count from.
        target_offsets: [N] int64.
        source_offsets: [N] int64.
        lengths: [N] int64.

    Raises:
        ValueError: no int64 arrays of one length, or a negative length.
    """
    _check(target_offsets, source_offsets, lengths)
    memmove = ctypes.memmove
    for target, source, length in zip(
        (target_offsets + target_base).tolist(),
        (source_offsets + source_base).tolist(),
        lengths.tolist(),
        strict=True,
    ):
        memmove(target, source, length)


def _process_vm_write(
    pid: int,
    remote_base: int,
    local_base: int,
    remote_offsets: Ints,
    local_offsets: Ints,
    lengths: Ints,
    /,
) -> int:
    """Copy our pieces into another process.

    Returns:
        Bytes moved: all of them.

    Raises:
        OSError: not permitted, no such process, or an address that is not mapped there.
        ValueError: no int64 arrays of one length, or a negative length.
    """
    return _between(
        "process_vm_writev", pid, remote_base, local_base, remote_offsets, local_offsets, lengths
    )


def _process_vm_read(
    pid: int,
    remote_base: int,
    local_base: int,
    remote_offsets: Ints,
    local_offsets: Ints,
    lengths: Ints,
    /,
) -> int:
    """Copy another process's pieces into ours. As `process_vm_write`, the other way."""
    return _between(
        "process_vm_readv", pid, remote_base, local_base, remote_offsets, local_offsets, lengths
    )


def _check(*arrays: Ints) -> None:
    if any(a.ndim != 1 or a.dtype != np.int64 or not a.flags.c_contiguous for a in arrays):
        raise ValueError("offsets and lengths must be 1-d arrays of int64")
    if len({len(a) for a in arrays}) != 1:
        raise ValueError("offsets and lengths differ in number")
    lengths = arrays[-1]
    if lengths.size and int(lengths.min()) < 0:
        raise ValueError(f"negative length {int(lengths.min())}")


def _between(
    call: str,
    pid: int,
    remote_base: int,
    local_base: int,
    remote_offsets: Ints,
    local_offsets: Ints,
    lengths: Ints,
) -> int:
    _check(remote_offsets, local_offsets, lengths)
    function = getattr(ctypes.CDLL(None, use_errno=True), call)
    function.restype = ctypes.c_ssize_t
    # Rows of (address, length), which is what a struct iovec is.
    near = np.stack([local_offsets + local_base, lengths], axis=1)
    far = np.stack([remote_offsets + remote_base, lengths], axis=1)
    done, moved = 0, 0
    while done < len(lengths):
        rows = slice(done, done + IOVECS_MAX)
        count = ctypes.c_ulong(len(near[rows]))
        got = function(
            ctypes.c_int(pid), near[rows].ctypes, count, far[rows].ctypes, count, ctypes.c_ulong(0)
        )
        if got < 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        moved += got
        ends = np.cumsum(near[rows, 1])
        finished = int(np.searchsorted(ends, got, side="right"))
        rest = got - (int(ends[finished - 1]) if finished else 0)
        done += finished
        if rest:  # a call may stop within a piece
            near[done] += (rest, -rest)
            far[done] += (rest, -rest)
        elif not finished:
            raise OSError(14, os.strerror(14))
    return moved


# The module itself: for its classes, whose Python twins live elsewhere (`backends/`).
compiled: ModuleType | None
try:
    if os.environ.get("MOE_RUNTIME_NATIVE") == "0":
        raise ImportError("turned off by MOE_RUNTIME_NATIVE=0")
    from transfer import _native
except ImportError:
    compiled = None
    copy_one = _copy_one
    copy_pieces = _copy_pieces
    process_vm_read = _process_vm_read
    process_vm_write = _process_vm_write
else:
    compiled = _native
    copy_one = _native.copy_one
    copy_pieces = _native.copy_pieces
    process_vm_read = _native.process_vm_read
    process_vm_write = _native.process_vm_write

COMPILED: Final = compiled is not None

if TYPE_CHECKING:
    from transfer._native import MappedCopy as MappedCopy
    from transfer._native import MappedWindow as MappedWindow
    from transfer._native import Message as Message
elif compiled is not None:
    MappedCopy = compiled.MappedCopy
    MappedWindow = compiled.MappedWindow
    Message = compiled.Message
else:

    class MappedCopy:
        """Nothing: without the compiled part there is no short way."""

    class MappedWindow:
        """The attributes of a window that the compiled part looks at."""

        __slots__ = ("live", "nbytes", "rights", "start")

    class Message:
        """Nothing: without the compiled part there is no short way."""
