"""Connections of the administration service: who calls and says nothing is hung up on.

Uvicorn closes connections that are kept alive in vain, but waits for ever for a first request,
and for the rest of one; and it refuses everybody while too many are connected, probes too.
"""

from __future__ import annotations

import asyncio
from typing import Final

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

SILENCE_S: Final = 5.0


class PatientProtocol(H11Protocol):
    """Closes a connection if no whole head of a request came for `SILENCE_S` to twice that."""

    _seen: RequestResponseCycle | None = None
    _look: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, and look at it from time to time."""
        super().connection_made(transport)
        self._look_later()

    def connection_lost(self, exc: Exception | None) -> None:
        """Look no more."""
        if self._look is not None:
            self._look.cancel()
        super().connection_lost(exc)

    def _look_later(self) -> None:
        self._seen = self.cycle
        self._look = self.loop.call_later(SILENCE_S, self._hang_up_on_the_silent)

    def _hang_up_on_the_silent(self) -> None:
        idle = self.cycle is None or self.cycle.response_complete
        if idle and self.cycle is self._seen:
            self.transport.close()
        else:
            self._look_later()
