"""The transfer engine as membership uses it: connect, notify, fence, and judge a lost connection.

Failing to reach a member is never an error here. It is evidence, or the engine will report the
loss by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

from elastic import messages
from elastic.evidence import Evidence, EvidenceKind, process_ended
from elastic.messages import Message
from elastic.protocol import Event, Suspected
from elastic.view import Member, View
from transfer import TransferEngine, TransferError

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 2.0


class Links:
    """Connections of one process to the other members. Used on the rank loop's thread.

    Args:
        engine: Opened before the first call.
        identity: This process.
    """

    def __init__(self, engine: TransferEngine, identity: Member) -> None:
        self._engine = engine
        self._identity = identity

    def connect_members(self, view: View) -> list[Suspected]:
        """Connect to all members not connected yet; return the evidence of those that failed."""
        known = {peer.name for peer in self._engine.peers() if peer.alive}
        others = view.others(self._identity.incarnation)
        size = max(view.ranks) + 1
        failed = []
        # Everybody starts with the next rank up, so that not all call the first one at once.
        for member in sorted(others, key=lambda m: (m.rank - self._identity.rank) % size):
            problem = None if member.incarnation in known else self.try_connect(member)
            if problem:
                evidence = Evidence(kind=EvidenceKind.CONNECTION_LOST, detail=problem)
                failed.append(Suspected((member.incarnation,), evidence))
        return failed

    def try_connect(self, member: Member) -> str | None:
        """Connect to a member; return what went wrong, None if nothing did."""
        try:
            peer = self._engine.connect(member.address, timeout_s=CONNECT_TIMEOUT_S)
        except (TransferError, OSError) as error:
            return f"rank {member.rank} at {member.address}: {error}"
        if peer.name != member.incarnation:  # another process listens where it did
            return f"rank {member.rank} at {member.address}: {peer.name} answers there"
        return None if peer.alive else f"rank {member.rank}: connection lost at once"

    def send(self, names: Iterable[str], message: Message) -> None:
        """Notify each of `names`; one that can't be reached is skipped."""
        payload = messages.encode(message)
        for name in names:
            try:
                self._engine.notify(self._engine.peer(name), payload)
            except TransferError as error:
                logger.debug("peer %s can't be notified: %s", name, error)

    def fence(self, names: Iterable[str], reason: str) -> None:
        """Cut each of `names` off for good."""
        for name in names:
            try:
                self._engine.disconnect(name, reason=reason)
            except TransferError as error:
                logger.debug("peer %s can't be disconnected: %s", name, error)

    def is_connected(self, member: Member) -> bool:
        """Whether the connection to this member lives."""
        try:
            return self._engine.peer(member.incarnation).alive
        except TransferError:
            return False

    def refined(self, event: Event, view: View | None) -> Event:
        """Turn a lost connection into proof if the process can be looked at and has ended."""
        if not isinstance(event, Suspected) or view is None:
            return event
        if event.evidence.kind is not EvidenceKind.CONNECTION_LOST:
            return event
        members = [m for name in event.incarnations if (m := view.named(name)) is not None]
        if not members or not all(self.has_ended(member) for member in members):
            return event
        proof = replace(event.evidence, kind=EvidenceKind.PROCESS_EXIT)
        return Suspected(event.incarnations, proof)

    def has_ended(self, member: Member) -> bool:
        """Whether an unreachable member's process is on this node and known to have ended."""
        return member.node == self._identity.node and process_ended(member.pid)
