"""What is in hand of the epoch being installed, and what came too early for it. Pure."""

from __future__ import annotations

from elastic.messages import Message, Offer, Ready
from elastic.view import View

EARLY_EPOCHS_MAX = 16


class Installation:
    """Progress of one epoch: complete once all others' offers and readies and our own load are in.

    Args:
        view: The epoch's view; it contains `incarnation`.
        incarnation: This process.
        deadline: When the silent ones become suspects.
    """

    __slots__ = ("deadline", "incarnation", "loaded", "offers", "outgoing", "ready", "view")

    def __init__(self, view: View, incarnation: str, deadline: float) -> None:
        self.view = view
        self.incarnation = incarnation
        self.deadline = deadline
        self.loaded = False
        self.outgoing: dict[int, bytes] | None = None  # prepared but not sent yet
        self.offers: dict[str, bytes] = {}
        self.ready: set[str] = set()

    def note(self, sender: str, message: Message) -> None:
        """Take in an offer or a ready of a member; the last one of a kind counts."""
        if isinstance(message, Offer):
            self.offers[sender] = message.payload
        if isinstance(message, Ready) or (isinstance(message, Offer) and message.ready):
            self.ready.add(sender)

    @property
    def waiting_for(self) -> tuple[str, ...]:
        """The others whose offer or ready is missing."""
        in_hand = self.offers.keys() & self.ready
        others = self.view.others(self.incarnation)
        return tuple(m.incarnation for m in others if m.incarnation not in in_hand)

    @property
    def complete(self) -> bool:
        """Whether passes of the epoch may start."""
        return self.loaded and not self.waiting_for

    def offers_by_rank(self) -> dict[int, bytes]:
        """Return the others' offers; only of a complete installation."""
        assert self.complete
        return {m.rank: self.offers[m.incarnation] for m in self.view.others(self.incarnation)}


class EarlyMessages:
    """Offers and readies that overtook the announcement of their view; bounded."""

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        self._kept: dict[int, dict[tuple[str, type], Offer | Ready]] = {}

    def keep(self, sender: str, message: Offer | Ready) -> None:
        """Keep the newest of each kind per sender, of the highest epochs only."""
        self._kept.setdefault(message.epoch, {})[sender, type(message)] = message
        if len(self._kept) > EARLY_EPOCHS_MAX:
            del self._kept[min(self._kept)]

    def take(self, epoch: int) -> list[tuple[str, Offer | Ready]]:
        """Return what was kept for `epoch`, and forget it and everything older."""
        taken = self._kept.get(epoch, {})
        self._kept = {e: kept for e, kept in self._kept.items() if e > epoch}
        return [(sender, message) for (sender, _), message in taken.items()]
