"""The agent of `serve` as a child process: started again when it is killed, stopped in steps.

An agent that ends by itself has its reasons (every worker left, or was given up) and stays ended.
One that was killed has none; with it the kernel killed its workers, and requests wait in the
journal until the workers of the next agent take them over.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from typing import TYPE_CHECKING

from configs.sources import PREFIX
from moe_runtime.parent import PARENT_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

logger = logging.getLogger(__name__)

KILL_AFTER_S = 20.0
QUICK_DEATH_S = 30.0
BACKOFF_DOUBLINGS_MAX = 6


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without settings: the file that the agent is given has them all.

    A variable would beat the file there, and with it what the user said on the command line.
    """
    return {key: value for key, value in environ.items() if not key.startswith(PREFIX)}


class AgentProcess:
    """Belongs to one event loop.

    Args:
        command: Program and arguments.
        environment: Added to this process's own.
        backoff_s: Pause before the second start in a row; doubles with each quick death.
        on_killed: Awaited after each kill, before the next start.
        quiet: Whether its output (and its workers') is thrown away.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        backoff_s: float,
        on_killed: Callable[[], Awaitable[None]],
        quiet: bool,
    ) -> None:
        self._command = tuple(command)
        self._environment = {PARENT_VARIABLE: str(os.getpid()), **environment}
        self._backoff_s = backoff_s
        self._on_killed = on_killed
        self._quiet = quiet
        self._process: asyncio.subprocess.Process | None = None
        self._watching: asyncio.Task[int] | None = None
        self._stopping = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """Process id of the agent started last."""
        return None if self._process is None else self._process.pid

    @property
    def status(self) -> int | None:
        """Exit status once the agent has ended and is not started again."""
        watching = self._watching
        return watching.result() if watching is not None and watching.done() else None

    async def start(self) -> None:
        """Start the agent, and start it again whenever it is killed."""
        self._process = await self._spawn()
        self._watching = asyncio.create_task(self._watch(), name="agent-watch")

    async def ended(self) -> int:
        """Wait until the agent has ended and is not started again; its exit status."""
        assert self._watching is not None, "start() first"
        return await asyncio.shield(self._watching)

    async def stop(self, *, patience_s: float) -> None:
        """Wait for its end, then ask for it, then kill it: no worker outlives it. Idempotent.

        Args:
            patience_s: How long it may take to end by itself; 0: it is asked now.
        """
        self._stopping.set()
        if self._watching is None:
            return
        if patience_s <= 0 or not await self._ends_within(patience_s):
            self._signal(signal.SIGTERM)
            if not await self._ends_within(KILL_AFTER_S):
                self.kill()
        await self._watching

    def kill(self) -> None:
        """Kill the agent for good, and with it the workers."""
        self._stopping.set()
        self._signal(signal.SIGKILL)

    async def _spawn(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *self._command,
            env=child_environment(os.environ) | self._environment,
            stderr=asyncio.subprocess.DEVNULL if self._quiet else None,
            start_new_session=True,  # Ctrl-C is for this process, which then stops the agent
        )

    async def _watch(self) -> int:
        quick_deaths = 0
        while True:
            assert self._process is not None
            started = time.monotonic()
            status = await self._process.wait()
            if self._stopping.is_set() or status >= 0:
                return status
            logger.warning("signal %d killed the agent: it is started again", -status)
            await self._on_killed()
            quick_deaths = quick_deaths + 1 if time.monotonic() - started < QUICK_DEATH_S else 0
            if await self._stops_within(self._pause_s(quick_deaths)):
                return status
            self._process = await self._spawn()

    def _pause_s(self, quick_deaths: int) -> float:
        if quick_deaths < 2:  # once is an accident
            return 0.0
        return float(self._backoff_s * 2 ** min(quick_deaths - 2, BACKOFF_DOUBLINGS_MAX))

    async def _stops_within(self, pause_s: float) -> bool:
        try:
            await asyncio.wait_for(self._stopping.wait(), pause_s)
        except TimeoutError:
            return False
        return True

    async def _ends_within(self, timeout_s: float) -> bool:
        assert self._watching is not None
        done, _ = await asyncio.wait({self._watching}, timeout=timeout_s)
        return bool(done)

    def _signal(self, number: signal.Signals) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            process.send_signal(number)
