"""The HTTP front end: OpenAI API, request journal, router, and the link to the workers.

    HTTP  app -> completions | chat -> Generation  ----(text)----> client
                                          ^
          relay: Journal (pure), Router (pure)  -- WorkerLink --> workers

`Front` (in `front.front`) owns all of it in one event loop; nothing here is shared with threads.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_runtime.front.front import Front
    from moe_runtime.front.http_server import HttpServer

_PUBLIC = {"Front": "moe_runtime.front.front", "HttpServer": "moe_runtime.front.http_server"}

__all__ = ["Front", "HttpServer"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
