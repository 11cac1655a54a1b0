"""Which addresses of ours same-host peers know, and which of them must not be reused yet.

Who was told an address may be copying to it at any time, and cannot be stopped from outside. So a
withdrawn window is free only once the peer has said that it is done, or its process has ended.
Until then it is quarantined: we keep its memory alive, and `withdraw` tells the caller.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from transfer.backends.process_memory import Answer, Located, PeerProcess, Probe
from transfer.memory.region import Offer, OfferTable


@dataclass(slots=True, kw_only=True)
class _Told:
    offer: Offer  # keeps the memory alive
    process: PeerProcess


# What engines that were closed have left: never written to again by us, never reused.
_orphans: Final[list[_Told]] = []


class ToldAddresses:
    """The owner's half of `transfer.backends.process_memory`. Thread-safe.

    Args:
        enabled: whether addresses are told at all.
    """

    def __init__(self, offers: OfferTable, *, enabled: bool) -> None:
        self._offers = offers
        self._enabled = enabled
        self._probe = Probe()
        self._changed = threading.Condition()
        self._told: dict[bytes, _Told] = {}

    def tokens(self) -> list[bytes]:
        """Return the keys whose addresses are known to somebody."""
        with self._changed:
            return list(self._told)

    @property
    def num_quarantined(self) -> int:
        """Windows that were withdrawn, and that a peer may still be copying to or from."""
        with self._changed:
            return sum(not told.offer.live for told in self._told.values())

    def tell(self, token: bytes, *, to: str, process: PeerProcess | None) -> Located:
        """Answer a peer's question. Hold `OfferTable.landing` until the answer is on its way."""
        if not self._enabled or process is None:
            return Located(token=token, answer=Answer.NEVER)
        offer = self._offers.find(token, to=to)
        if (
            offer is None
            or offer.region.shareable
            or offer.region.kind != "host"
            or not offer.nbytes
        ):
            return Located(token=token, answer=Answer.NOT_THIS)
        with self._changed:
            self._told[token] = _Told(offer=offer, process=process)
        return Located(
            token=token,
            answer=Answer.TOLD,
            rights=offer.access.value,
            address=offer.region.start + offer.offset,
            nbytes=offer.nbytes,
            probe=self._probe.address,
            nonce=self._probe.nonce,
        )

    def on_retired(self, token: bytes, *, by: str) -> None:
        """A peer is done with a window; the word of others does not count."""
        with self._changed:
            told = self._told.get(token)
            if told is not None and told.offer.to == by:
                del self._told[token]
                self._changed.notify_all()

    def wait(self, tokens: Iterable[bytes], timeout_s: float) -> bool:
        """Wait until nobody copies to or from withdrawn windows any more.

        Returns:
            False if somebody may, even after `timeout_s`.
        """
        waiting = set(tokens)
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                waiting &= self._told.keys()
                for token in [t for t in waiting if self._told[t].process.exited]:
                    del self._told[token]
                    waiting.discard(token)
                remaining = deadline - time.monotonic()
                if not waiting or remaining <= 0:
                    return not waiting
                self._changed.wait(remaining)

    def expire(self) -> None:
        """Free what only processes that have ended knew. At every tick."""
        with self._changed:
            for token, told in list(self._told.items()):
                if not told.offer.live and told.process.exited:
                    del self._told[token]
                    self._changed.notify_all()

    def outlive(self) -> None:
        """Hand what is still quarantined to the process, at the end of the engine."""
        with self._changed:
            _orphans.extend(self._told.values())
            self._told.clear()
            _orphans[:] = [told for told in _orphans if not told.process.exited]
