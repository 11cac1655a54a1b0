"""What the machine's instructions do: to the record, to the peers, and to the worker."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from elastic.errors import StoreUnavailable
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
    RecordUnread,
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
        silence: Why the store did not answer when it was asked last; None: it did.
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
        self.silence: StoreUnavailable | None = None

    def perform(self, instruction: Instruction) -> Event | None:
        """Do it; return the event that answers it, if one does.

        A store that does not answer is no error here: the machine asks again.

        Raises:
            Whatever the member raises.
        """
        match instruction:
            case Send(to, message):
                self._links.send(to, message)
            case ReadRecord() | Propose():
                return self._ask_store(instruction)
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

    def _ask_store(self, instruction: ReadRecord | Propose) -> Event | None:
        try:
            answer: Event = (
                RecordRead(self._store.read())
                if isinstance(instruction, ReadRecord)
                else ProposalAnswered(
                    instruction.view,
                    self._store.compare_and_set(instruction.view.epoch - 1, instruction.view),
                )
            )
        except StoreUnavailable as error:
            if self.silence is None:
                logger.warning("no view can change until the store answers: %s", error)
            self.silence = error
            # A proposal is made again anyway.
            return RecordUnread() if isinstance(instruction, ReadRecord) else None
        if self.silence is not None:
            logger.info("the store answers again")
        self.silence = None
        return answer

    def _adopt(self, view: View) -> None:
        self._inbox.follow(view, self._incarnation)
        self.committed_at = self._clock()
        self._member.committed(view)
        for failure in self._links.connect_members(view):
            self._inbox.put(failure)
