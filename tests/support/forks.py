"""A child of this process, made by a fork alone."""

from __future__ import annotations

import json
import os
import select
import signal
from collections.abc import Callable
from typing import Any

SOON_S = 30.0


def in_a_child(work: Callable[[], Any]) -> Any:
    """Fork, and return what `work` returns over there; a child that hangs is a failure."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = work()
        except BaseException as error:  # noqa: BLE001 - told to the parent
            answer = f"{type(error).__name__}: {error}"
        os.write(writer, json.dumps(answer).encode())
        os._exit(0)
    os.close(writer)
    try:
        ready, _, _ = select.select([reader], [], [], SOON_S)
        if not ready:
            os.kill(child, signal.SIGKILL)
        data = os.read(reader, 1 << 20)
    finally:
        os.waitpid(child, 0)
        os.close(reader)
    assert ready, "the child hangs"
    return json.loads(data)
