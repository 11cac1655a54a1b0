"""One operation over several rails: whoever waits for it moves the bytes of all of them.

The engine's thread is left alone then, and until a slice ends no thread of ours needs the
interpreter, however many connections carry them: small transfers do need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from transfer.handle import Transfer
from transfer.rails.rail import LaneLink, RailLink


class SeveralLinks:
    """The links to a peer, as one that a waiting thread can drive. Thread-safe.

    Args:
        links: those over each rail, None where there is none; changed by their owner. All of
            them are made of lanes.
    """

    def __init__(self, links: Sequence[RailLink | None]) -> None:
        self._links = links

    def progress(self, handle: Transfer, timeout_s: float) -> bool:
        """Lead the lanes that carry a transfer, until something ended."""
        led = [(link, link.claim(handle)) for link in self._standing()]
        lanes = [lane for _, own in led for lane in own]
        if not lanes:
            return False
        finished = led[0][0].move(lanes, timeout_s)
        for link, own in led:
            link.report([outcome for outcome in finished if link.carries(outcome[0])], own)
        return True

    def leave(self) -> None:
        """End the leads of the calling thread."""
        for link in self._standing():
            link.leave()

    def attend(self) -> None:
        """Let the engine's thread move the bytes of lanes that nobody leads."""
        for link in self._standing():
            link.attend()

    def _standing(self) -> list[LaneLink]:
        return [cast("LaneLink", link) for link in self._links if link is not None]
