"""Carries out the steps of operations in an event loop, without a thread per call.

    Ask          by the loop itself to a master of this host, else one thread for all requests
    Reach        one thread for all first contacts; they take turns anyway
    Move         awaited: the engine's own thread tells when it has ended
    Pause        asyncio.sleep
    Work         large copies and checksums go to a thread, lest they hold up the loop

A small copy within a host is over sooner than a thread would have started it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kvstore.client.loop_requests import LoopRequests
from kvstore.client.steps import Ask, Effect, Move, Reach, Steps, Work
from kvstore.errors import KVStoreError
from transfer import TransferError

if TYPE_CHECKING:
    from kvstore.client.driver import Driver

T = TypeVar("T")

INLINE_BYTES_MAX: Final = 256 << 10
WORKERS: Final = 2


class AsyncDriver:
    """Runs operations of one event loop. Any number may be under way at once.

    Args:
        driver: What the threads do.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._requests = ThreadPoolExecutor(1, thread_name_prefix="store-requests")
        self._asking = LoopRequests(driver.link, self._requests)
        self._contacts = ThreadPoolExecutor(1, thread_name_prefix="store-contacts")
        self._done_here = 0  # bytes since the loop was given up
        self._work = ThreadPoolExecutor(WORKERS, thread_name_prefix="store-work")

    def close(self) -> None:
        """End the threads, after what they are doing."""
        self._asking.close()
        for threads in (self._requests, self._contacts, self._work):
            threads.shutdown(wait=True, cancel_futures=True)

    async def run(self, steps: Steps[T]) -> T:
        """Run an operation to its end; return its result or raise its error.

        A caller that is cancelled waits until the operation has ended (its deadline bounds that)
        before CancelledError is raised: nothing touches the caller's memory afterwards, and no
        put is left open.
        """
        return await _to_its_end(asyncio.ensure_future(self._run(steps, None)))

    async def run_here(self, steps: Steps[T]) -> T:
        """As `run`; what has nothing to wait for is done at once, without giving up the loop.

        Call `give_way` afterwards.
        """
        effect: Effect | _Ended = _Advance(steps, None, None)()
        while isinstance(effect, Work) and effect.nbytes <= INLINE_BYTES_MAX:
            self._done_here += effect.nbytes
            effect = _Advance(steps, None, None)()
        if not isinstance(effect, _Ended):
            return await _to_its_end(asyncio.ensure_future(self._run(steps, effect)))
        final: T = effect.value
        return final

    async def give_way(self) -> None:
        """Let other tasks have their turn, after each `INLINE_BYTES_MAX` of work by `run_here`."""
        if self._done_here >= INLINE_BYTES_MAX:
            self._done_here = 0
            await asyncio.sleep(0)

    async def call(self, function: Callable[[], T]) -> T:
        """Call what asks the master, in the thread of requests; else as `run`."""
        loop = asyncio.get_running_loop()
        return await _to_its_end(loop.run_in_executor(self._requests, function))

    async def _run(self, steps: Steps[T], effect: Effect | _Ended | None) -> T:
        """Carry steps out, of which the first effect may be known already."""
        loop = asyncio.get_running_loop()
        result: object = None
        error: Exception | None = None
        large = False
        while True:
            if effect is None:
                advance = _Advance(steps, result, error)
                effect = await loop.run_in_executor(self._work, advance) if large else advance()
            if isinstance(effect, _Ended):
                final: T = effect.value
                return final
            large = isinstance(effect, Work) and effect.nbytes > INLINE_BYTES_MAX
            try:
                result, error = await self._perform(effect), None
            except (KVStoreError, TransferError) as failure:
                result, error = None, failure
            effect = None

    async def _perform(self, effect: Effect) -> object:
        loop = asyncio.get_running_loop()
        if isinstance(effect, Ask):
            return await self._asking.ask(effect)
        if isinstance(effect, Reach):
            return await loop.run_in_executor(self._contacts, self._driver.perform, effect)
        if isinstance(effect, Move):
            await effect.transfer
        elif not isinstance(effect, Work):
            await asyncio.sleep(effect.seconds)
        return None


async def _to_its_end(task: asyncio.Future[T]) -> T:
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # looked at, or asyncio complains
        raise


@dataclass(frozen=True, slots=True)
class _Ended:
    value: Any


class _Advance:
    """One step of a generator, as a call: StopIteration cannot pass through a future."""

    def __init__(self, steps: Steps[Any], result: object, error: Exception | None) -> None:
        self._steps = steps
        self._result = result
        self._error = error

    def __call__(self) -> Effect | _Ended:
        try:
            if self._error is None:
                return self._steps.send(self._result)
            return self._steps.throw(self._error)
        except StopIteration as end:
            return _Ended(end.value)
