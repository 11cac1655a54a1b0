"""Serves the application with uvicorn inside the caller's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING

import uvicorn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fastapi import FastAPI

_STOP_TIMEOUT_S = 5


class _Server(uvicorn.Server):
    """Leaves signals to the process that owns the loop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """One listening port. Belongs to one event loop."""

    def __init__(self, app: FastAPI, *, host: str, port: int) -> None:
        self._app = app
        self._host = host
        self._port = port
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None
        self.url = ""

    async def start(self) -> None:
        """Listen; `url` is set afterwards.

        Raises:
            OSError: The port is taken.
        """
        listener = socket.create_server((self._host, self._port), backlog=2048)
        config = uvicorn.Config(
            self._app,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=_STOP_TIMEOUT_S,
        )
        server = self._server = _Server(config)
        self._task = asyncio.create_task(server.serve(sockets=[listener]), name="http-server")
        while not server.started and not self._task.done():
            await asyncio.sleep(0.005)
        if self._task.done():
            self._task.result()
        host, port = listener.getsockname()[:2]
        self.url = f"http://{host}:{port}"

    async def stop(self) -> None:
        """Stop listening; connections still open get a few seconds, then they are cut."""
        if self._server is None or self._task is None:
            return
        self._server.should_exit = True
        await self._task
        self._server = self._task = None
