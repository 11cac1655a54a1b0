"""Keeps the KV pool's idea of who may write in step with the views.

Who is no longer in the view is shut out of the pool at once, but may still run and write: what it
was writing to is set aside. Only when the agent that reaped the process has said so, is it dead
for certain, and the memory can be used again.

A master of its own that is replaced knows nothing of that: its successor would wait for writers
that have ended, and listen to those that are out. So masters elsewhere are told again and again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol

from elastic import ElasticError
from kvstore import KVStoreError
from kvstore.client.master_map import MasterMap
from kvstore.discovery.finding import directory_of, followed
from kvstore.wire import messages as m

if TYPE_CHECKING:
    from configs.schema import KVStoreConfig
    from elastic import MembershipStore, View

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 1.0
TELL_AGAIN_S = 5.0
DEAD_MAX = 1024  # ends that are told again


class Fences(Protocol):
    """The store master of this process, or those that run elsewhere."""

    def fence(self, incarnations: Sequence[str]) -> None:
        """Shut these out."""

    def confirm_dead(self, incarnations: Sequence[str]) -> None:
        """These are dead for certain."""


class RemoteMasters:
    """Fencing at masters that are processes of their own. Thread-safe.

    Args:
        config: Says where they are.
        secret: The cluster secret.
    """

    def __init__(self, config: KVStoreConfig, *, secret: bytes) -> None:
        self._config = config
        self._secret = secret
        self._stack = ExitStack()
        self._map: MasterMap | None = None

    @property
    def address(self) -> str:
        """None of its own."""
        return ""

    def open(self) -> None:
        """Learn where they are."""
        directory = directory_of(self._config.masters)
        self._stack.enter_context(followed(directory))
        identity = f"front-{os.getpid()}"
        self._map = MasterMap(directory, self._config, secret=self._secret, identity=identity)
        self._stack.callback(self._map.close)

    def close(self) -> None:
        """Ask no more."""
        self._stack.close()

    def fence(self, incarnations: Sequence[str]) -> None:
        """Shut these out. Raises KVStoreError if not all masters have heard of it."""
        self._tell(m.Fence(list(incarnations), dead=False))

    def confirm_dead(self, incarnations: Sequence[str]) -> None:
        """These are dead for certain. Raises as `fence`."""
        self._tell(m.Fence(list(incarnations), dead=True))

    def _tell(self, request: m.Fence) -> None:
        assert self._map is not None
        self._map.ask(request, m.Done)


class PoolFencing:
    """Tells the store masters who is out and who is dead. Belongs to the front's event loop."""

    def __init__(self, master: Fences, membership: MembershipStore) -> None:
        self._master = master
        # Other processes are waited for, which an event loop must not.
        self._waits = isinstance(master, RemoteMasters)
        self._membership = membership
        self._current: frozenset[str] = frozenset()
        #: out of the view, and not known to be dead
        self._fenced: set[str] = set()
        #: to be fenced still: masters elsewhere have not heard of it
        self._untold: set[str] = set()
        #: dead for certain, and so told; the oldest first
        self._dead: dict[str, None] = {}
        self._tell_again_at = 0.0
        self._looking: asyncio.Task[None] | None = None

    def on_view(self, view: View) -> None:
        """Fence those that the new view no longer has."""
        removed = self._current - view.incarnations
        self._current = view.incarnations
        if not removed:
            return
        if self._waits:
            self._untold |= removed
        else:
            self._master.fence(sorted(removed))
            self._fenced |= removed
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look(), name="pool-fencing")

    async def close(self) -> None:
        """Stop looking for ends."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    async def _look(self) -> None:
        self._tell_again_at = time.monotonic() + TELL_AGAIN_S
        while self._fenced or self._untold or (self._waits and self._dead):
            await self._tell()
            await self._tell_again()
            try:
                dead = await asyncio.to_thread(self._membership.exits, sorted(self._fenced))
            except ElasticError as error:
                logger.warning("ends of processes can't be read: %s", error)
                dead = {}
            if dead and await self._do(self._master.confirm_dead, sorted(dead)):
                self._fenced -= dead.keys()
                self._remember(dead)
            await asyncio.sleep(LOOK_INTERVAL_S)

    async def _tell(self) -> None:
        untold = frozenset(self._untold)
        if untold and await self._do(self._master.fence, sorted(untold)):
            self._untold -= untold
            self._fenced |= untold

    def _remember(self, dead: Iterable[str]) -> None:
        self._dead.update(dict.fromkeys(dead))
        while len(self._dead) > DEAD_MAX:
            del self._dead[next(iter(self._dead))]

    async def _tell_again(self) -> None:
        """Whoever leads now may have begun to after the last time."""
        if not self._waits or time.monotonic() < self._tell_again_at:
            return
        self._tell_again_at = time.monotonic() + TELL_AGAIN_S
        if self._fenced:
            await self._do(self._master.fence, sorted(self._fenced))
        if self._dead:
            await self._do(self._master.confirm_dead, sorted(self._dead))

    async def _do(self, act: Callable[[Sequence[str]], None], incarnations: list[str]) -> bool:
        try:
            if self._waits:
                await asyncio.to_thread(act, incarnations)
            else:
                act(incarnations)
        except KVStoreError as error:
            logger.warning("the store masters are not told of %s yet: %s", incarnations, error)
            return False
        return True
