"""Freed memory goes back to the system, as far as the C library can be told to.

A column that grows moves: where it lay is a hole in the heap, too small for what grows next. The
GNU C library keeps the pages of such holes, at a million keys 25 to 42 bytes for each.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Final


def _find_trim() -> Callable[[int], int] | None:
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int  # type: ignore[attr-defined]
    return trim


_TRIM: Final = _find_trim()  # None: another C library, which has a way of its own with holes


def return_freed_memory() -> None:
    """Give the whole pages of holes in the heap back. Milliseconds per 100 MB. Thread-safe."""
    if _TRIM is not None:
        _TRIM(0)
