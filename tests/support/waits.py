"""Waiting for what other threads and processes bring about."""

from __future__ import annotations

import time
from collections.abc import Callable

WAIT_S = 60.0  # that long only where something is broken


def eventually(
    condition: Callable[[], object], what: str = "what it has to be", timeout_s: float = WAIT_S
) -> None:
    """Return once the condition holds; asked again and again, at little cost to others."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.005)
