"""Keeps the KV pool's idea of who may write in step with the views.

Who is no longer in the view is shut out of the pool at once, but may still run and write: what it
was writing to is set aside. Only when the agent that reaped the process has said so, is it dead
for certain, and the memory can be used again.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
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
        while self._fenced or self._untold:
            await self._tell()
            try:
                dead = await asyncio.to_thread(self._membership.exits, sorted(self._fenced))
            except ElasticError as error:
                logger.warning("ends of processes can't be read: %s", error)
                dead = {}
            if dead and await self._do(self._master.confirm_dead, sorted(dead)):
                self._fenced -= dead.keys()
            await asyncio.sleep(LOOK_INTERVAL_S)

    async def _tell(self) -> None:
        untold = frozenset(self._untold)
        if untold and await self._do(self._master.fence, sorted(untold)):
            self._untold -= untold
            self._fenced |= untold

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
