"""A disk that takes nothing until it is let go."""

from __future__ import annotations

import threading

import pytest

from tests.support.disk_calls import replace
from transfer.backends import direct_io

PATIENCE_S = 60.0


class HangingDisk:
    """All slabs of this process, from now on.

    Attributes:
        entered: Set once a write hangs.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._plain = direct_io.write_fully
        self._free = threading.Event()
        self.entered = threading.Event()
        replace(monkeypatch, self._write, writes=True)

    def _write(self, *arguments: object) -> None:
        self.entered.set()
        assert self._free.wait(PATIENCE_S)
        self._plain(*arguments)  # type: ignore[arg-type]

    def let_go(self) -> None:
        """Write what hangs, and all that comes."""
        self._free.set()
