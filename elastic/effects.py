"""What the machine's instructions do: to the record, to the peers, and to the worker."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from elastic.inbox import Inbox
from elastic.links import Links
from elastic.protocol import (
    Adopt,
    Depart,
    Event,
    Fence,
    Install,
    Instruction,
    Load,
    Loaded,
    Prepare,
    Prepared,
    ProposalAnswered,
    Propose,
    ReadRecord,
    RecordRead,
    Send,
)
from elastic.store import MembershipStore
from elastic.view import View

logger = logging.getLogger(__name__)


class GroupMember(Protocol):
    """What the worker does when views change. Called on the rank loop's thread only."""

    def committed(self, view: View) -> None:
        """A view was committed; may come before `prepare`, and more than once before an install."""

    def prepare(self, view: View) -> Mapping[int, bytes]:
        """Stop using old windows; return a receive-window offer for each other member's rank."""

    def load(self, view: View) -> None:
        """Make this rank's experts resident. Also called by `join` for views not committed yet."""

    def install(self, view: View, offers: Mapping[int, bytes]) -> None:
        """All members are ready; passes of this epoch may start with these windows."""


class Effects:
    """Carries out one instruction at a time. Used on the rank loop's thread.

    Args:
        incarnation: This process.
        store: The view record.
        links: To the other members.
        inbox: What comes in is judged by the view that was adopted last.
        member: Does the work of a view change.
        clock: Monotonic seconds.

    Attributes:
        installed: The view installed last.
        committed_at: When this process learned of the view adopted last.
    """

    def __init__(
        self,
        incarnation: str,
        *,
        store: MembershipStore,
        links: Links,
        inbox: Inbox,
        member: GroupMember,
        clock: Callable[[], float],
    ) -> None:
        self._incarnation = incarnation
        self._store = store
        self._links = links
        self._inbox = inbox
        self._member = member
        self._clock = clock
        self.installed: View | None = None
        self.committed_at = 0.0

    def perform(self, instruction: Instruction) -> Event | None:
        """Do it; return the event that answers it, if one does.

        Raises:
            StoreUnavailable: The store does not answer.
            Whatever the member raises.
        """
        match instruction:
            case Send(to, message):
                self._links.send(to, message)
            case ReadRecord():
                return RecordRead(self._store.read())
            case Propose(view):
                stored = self._store.compare_and_set(view.epoch - 1, view)
                return ProposalAnswered(view, stored)
            case Fence(incarnations, reason):
                self._links.fence(incarnations, reason)
            case Adopt(view):
                self._adopt(view)
            case Prepare(view):
                return Prepared(view.epoch, self._member.prepare(view))
            case Load(view):
                self._member.load(view)
                return Loaded(view.epoch)
            case Install(view, offers):
                self._member.install(view, offers)
                self.installed = view
            case Depart(view, asked):
                self._inbox.follow(view, self._incarnation)
                logger.info("%s by epoch %d", "left" if asked else "evicted", view.epoch)
        return None

    def _adopt(self, view: View) -> None:
        self._inbox.follow(view, self._incarnation)
        self.committed_at = self._clock()
        self._member.committed(view)
        for failure in self._links.connect_members(view):
            self._inbox.put(failure)
