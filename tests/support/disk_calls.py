"""System calls on a slab's file, where a test can make them fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from transfer.backends import direct_io, file_calls, file_work


def in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have slabs call `os.preadv` and `os.pwritev`, as they do without the compiled part."""
    monkeypatch.setattr(file_calls, "compiled", False)


def replace(monkeypatch: pytest.MonkeyPatch, call: Callable[..., None], *, writes: bool) -> None:
    """Put a function in the place of what moves one extent: `read_fully` or `write_fully`."""
    in_python(monkeypatch)
    for module in (direct_io, file_calls, file_work):
        monkeypatch.setattr(module, "write_fully" if writes else "read_fully", call)
