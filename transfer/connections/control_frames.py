"""What the frames of a control connection say, and who is told. On the engine's thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from transfer.connections.early_frames import AT_ONCE
from transfer.connections.handshake import shown
from transfer.errors import ProtocolViolation
from transfer.handlers import Handlers
from transfer.memory.region import TOKEN_BYTES, OfferTable
from transfer.memory.told_addresses import ToldAddresses
from transfer.peer import LinkState, PeerLink
from transfer.statistics import Tally
from transfer.wire import ControlKind, encode_control

if TYPE_CHECKING:
    from transfer.storage.staging import Staging


class ControlFrames:
    """Hands the frames of all links to what they are for.

    Args:
        offers: What peers may ask the address of.
        tally: Counts nonsense.
        fenced: Name -> why nothing is taken from it any more, or None.
        handlers: Of notifies.
        told: Who knows addresses of ours.
        lose: Ends a link, with evidence.

    Attributes:
        staging: answers peers that ask for storages; set before the first frame.
    """

    staging: Staging

    def __init__(
        self,
        offers: OfferTable,
        tally: Tally,
        *,
        fenced: Callable[[str], str | None],
        handlers: Handlers,
        told: ToldAddresses,
        lose: Callable[[PeerLink, str], None],
    ) -> None:
        self._offers = offers
        self._tally = tally
        self._fenced = fenced
        self._handlers = handlers
        self._told = told
        self._lose = lose

    def take(self, link: PeerLink, kind: ControlKind, content: bytes) -> None:
        """Act on one frame of a link that stands."""
        if self._fenced(link.name) is not None:
            return  # a handler has fenced it between two frames
        if link.state is LinkState.CONNECTING and kind not in AT_ONCE:
            if not link.early.keep(kind, content):
                self.end_nonsense(link, "more than can be kept until the link is ready")
            return
        if kind is ControlKind.NOTIFY:
            self._handlers.deliver(link.name, content)
        elif kind is ControlKind.WITHDRAWN:
            link.windows.drop(content)
            link.locations.drop(content)
            self.staging.drop(link.name, content)
            if link.rdma is not None:
                link.rdma.drop_key(content)
        elif kind is ControlKind.LOCATE:
            self._tell_address(link, content)
        elif kind is ControlKind.LOCATED:
            self._parse(link, lambda: link.locations.on_located(content))
        elif kind is ControlKind.VERBS:
            self._parse(link, lambda: _on_verbs(link, content))
        elif kind is ControlKind.RETIRED:
            self._told.on_retired(content, by=link.name)
        elif kind is ControlKind.STORAGE_ASK or kind is ControlKind.STORAGE_ANSWER:
            self._parse(link, lambda: self.staging.on_frame(link, kind, content))
        else:
            link.farewell = f"closed by the peer: {shown(content.decode(errors='replace'))}"
            self._lose(link, link.farewell)

    def take_early(self, link: PeerLink) -> None:
        """Act on the frames that came before the link was ready, which it is now."""
        for kind, content in link.early.take_all():
            if link.state is LinkState.READY:  # nor has one of them ended it
                self.take(link, kind, content)

    def _tell_address(self, link: PeerLink, token: bytes) -> None:
        if len(token) != TOKEN_BYTES or link.control.flooded:
            self.end_nonsense(link, "asked for nonsense, or read no answers")
            return
        try:
            process = link.find_process()
        except OSError:
            process = None
        # Before any WITHDRAWN of the same token.
        with self._offers.landing:
            located = self._told.tell(token, to=link.name, process=process)
            link.control.send(encode_control(ControlKind.LOCATED, located.encode()))

    def _parse(self, link: PeerLink, parse: Callable[[], None]) -> None:
        try:
            parse()
        except ProtocolViolation as error:
            self._tally.count("malformed")
            self.end_nonsense(link, error.problem)

    def end_nonsense(self, link: PeerLink, problem: str) -> None:
        """End a link that sends what nobody can understand."""
        self._lose(link, f"control connection carried nonsense: {problem}")


def _on_verbs(link: PeerLink, content: bytes) -> None:
    if link.rdma is None:
        raise ProtocolViolation("about queue pairs, where there are none")
    link.rdma.on_message(content)
