"""`connect`: call until a link stands, whichever side's call it came from."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Final

from transfer.connections.links import Links
from transfer.connections.negotiation import Outcome
from transfer.connections.rendezvous import DUPLICATE
from transfer.errors import HandshakeRefused, PeerUnreachable
from transfer.event_loop import EventLoop
from transfer.host import resolve
from transfer.peer import PeerLink, PeerTable

# How long the connection of a simultaneous call may take before we call again.
OTHER_CALL_S: Final = 0.2
LOOK_S: Final = 0.002
ANSWERS: Final = "it answers, but was not connected in time (does another engine have our name?)"


class Caller:
    """Connects from any thread but the engine's."""

    def __init__(self, loop: EventLoop, table: PeerTable, links: Links) -> None:
        self._loop = loop
        self._table = table
        self._links = links

    def connect(self, address: str, deadline: float) -> PeerLink:
        """Return the ready link with the engine at `address`, made if there is none.

        Raises:
            PeerUnreachable, HandshakeRefused: as of `TransferEngine.connect`.
        """
        target = resolve(address)
        while True:
            for link in self._table.links():
                if link.alive and link.facts.address in (address, target):
                    return link
            name = self._call(target, deadline)
            found = self._await_link(name, deadline)
            if found is not None:
                return found
            if time.monotonic() >= deadline:
                raise PeerUnreachable(address, ANSWERS, name)

    def _call(self, target: str, deadline: float) -> str:
        """Call once; return the name of who is connected, or is about to be by its own call."""
        future: Future[Outcome] = Future()
        self._loop.call(lambda: self._links.dial(target, future.set_result))
        try:
            outcome = future.result(max(deadline - time.monotonic(), 0.0))
        except TimeoutError:
            raise PeerUnreachable(target, "not connected in time") from None
        if not isinstance(outcome, HandshakeRefused):
            return outcome.name
        if outcome.reason != DUPLICATE:
            raise outcome
        return outcome.peer

    def _await_link(self, name: str, deadline: float) -> PeerLink | None:
        limit = min(deadline, time.monotonic() + OTHER_CALL_S)
        while time.monotonic() < limit:
            link = self._table.get(name)
            if link is None:
                time.sleep(LOOK_S)
            elif link.settled.wait(max(deadline - time.monotonic(), 0.0)):
                return link if link.alive else None
        return None
