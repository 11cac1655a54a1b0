"""Keeps the KV pool's idea of who may write in step with the views.

Who is no longer in the view is shut out of the pool at once, but may still run and write: what it
was writing to is set aside. Only when the agent that reaped the process has said so, is it dead
for certain, and the memory can be used again.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from elastic import ElasticError

if TYPE_CHECKING:
    from elastic import MembershipStore, View
    from kvstore import MasterServer

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 1.0


class PoolFencing:
    """Tells the store master who is out and who is dead. Belongs to the front's event loop."""

    def __init__(self, master: MasterServer, membership: MembershipStore) -> None:
        self._master = master
        self._membership = membership
        self._current: frozenset[str] = frozenset()
        #: out of the view, and not known to be dead
        self._fenced: set[str] = set()
        self._looking: asyncio.Task[None] | None = None

    def on_view(self, view: View) -> None:
        """Fence those that the new view no longer has."""
        removed = self._current - view.incarnations
        self._current = view.incarnations
        if not removed:
            return
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
        while self._fenced:
            try:
                dead = await asyncio.to_thread(self._membership.exits, sorted(self._fenced))
            except ElasticError as error:
                logger.warning("ends of processes can't be read: %s", error)
                dead = {}
            if dead:
                self._master.confirm_dead(sorted(dead))
                self._fenced -= dead.keys()
            await asyncio.sleep(LOOK_INTERVAL_S)
