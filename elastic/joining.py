"""How a process gets into the record: the first view, a running group, or a dead one.

    no record                 wait for the others, the lowest rank proposes epoch 1
    members live              connect to all of them, load our experts, then one compare-and-set
    all members are dead      like the first view, but from the record's epoch on
    some can't be reached     the living are told, they find out and evict; we try again

Loading comes before the compare-and-set, so a group never waits for a newcomer's weights.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from elastic import plan
from elastic.errors import JoinTimeout, StoreUnavailable
from elastic.links import Links
from elastic.messages import Abort
from elastic.protocol import ProposalAnswered, RecordRead
from elastic.store import MembershipStore
from elastic.view import Member, View

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.02
ACCUSE_INTERVAL_S = 1.0
TAKEOVER_AFTER_S = 2.0


class ExpertHolder(Protocol):
    """What joining needs of the group member."""

    def load(self, view: View) -> None:
        """Make this rank's experts of the view resident."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """What the first view is made from.

    Attributes:
        num_layers: Layers with experts.
        num_logical: Logical experts per layer.
        expected_workers: How many the first view waits for.
        weights_version: Which weights.
    """

    num_layers: int
    num_logical: int
    expected_workers: int
    weights_version: str = ""


@dataclass(frozen=True, slots=True)
class Reach:
    """Which members of a view a joiner can reach."""

    living: tuple[Member, ...]
    silent: tuple[Member, ...]
    dead: tuple[Member, ...]


class Joining:
    """One process's way into a view. Blocks the caller; every wait ends at the deadline.

    Args:
        identity: The process; its address is known.
        store: The record.
        links: Of the process; its engine is open.
        holder: Loads experts.
        shape: For the first view.
        timeout_s: How long the first view waits for everybody, and half of the deadline.
        clock: Monotonic seconds.
        check: Called between attempts; raises to give up.
    """

    def __init__(
        self,
        identity: Member,
        *,
        store: MembershipStore,
        links: Links,
        holder: ExpertHolder,
        shape: GroupShape,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._identity = identity
        self._store = store
        self._links = links
        self._holder = holder
        self._shape = shape
        self._timeout_s = timeout_s
        self._clock = clock
        self._check = check
        self._started = clock()
        self._cut_off_since: float | None = None
        self._accused_at = float("-inf")
        self._obstacle = "no view yet"

    def enter(self) -> RecordRead | ProposalAnswered:
        """Get into the record; return what the membership machine has to be told.

        Raises:
            JoinTimeout: It did not work before the deadline.
            StoreUnavailable: The store does not answer, then.
        """
        self._started = self._clock()
        registered = False
        while True:
            silence = None
            try:
                if not registered:
                    self._store.register(self._identity)
                    registered = True
                if (answer := self._attempt()) is not None:
                    return answer
            except StoreUnavailable as error:
                silence, self._obstacle = error, str(error)
            waited_s = self._clock() - self._started
            if waited_s > 2 * self._timeout_s:
                if silence is not None:
                    raise silence
                raise JoinTimeout(
                    rank=self._identity.rank, waited_s=waited_s, obstacle=self._obstacle
                )
            self._check()
            time.sleep(POLL_INTERVAL_S)

    def _attempt(self) -> RecordRead | ProposalAnswered | None:
        view = self._store.read()
        if view is not None and view.named(self._identity.incarnation) is not None:
            return RecordRead(view)
        return self._start_group() if view is None else self._enter(view)

    def _start_group(self) -> RecordRead | ProposalAnswered | None:
        candidates = self._candidates(frozenset())
        if not self._is_my_turn(candidates):
            return None
        view = plan.first_view(
            candidates.values(),
            num_layers=self._shape.num_layers,
            num_logical=self._shape.num_logical,
            weights_version=self._shape.weights_version,
        )
        return self._propose(view)

    def _enter(self, view: View) -> RecordRead | ProposalAnswered | None:
        reach = self._reach(view)
        dead = [member.incarnation for member in reach.dead]
        if reach.living and not reach.silent:
            self._cut_off_since = None
            target = plan.view_with(view, self._identity, dead)
            self._holder.load(target)
            return self._propose(target)
        if reach.living:
            self._tell_living(view, reach)
            return None
        return self._take_over(view, reach)

    def _take_over(self, view: View, reach: Reach) -> RecordRead | ProposalAnswered | None:
        now = self._clock()
        if self._cut_off_since is None:
            self._cut_off_since = now
        # Somebody whose end is not proven might only be out of our reach for a moment.
        if reach.silent and now - self._cut_off_since < TAKEOVER_AFTER_S:
            self._obstacle = f"no answer from ranks {[m.rank for m in reach.silent]}"
            return None
        candidates = self._candidates(view.incarnations)
        if not self._is_my_turn(candidates):
            return None
        target = plan.view_of(view, candidates.values(), dead=view.incarnations)
        logger.info("taking over from epoch %d: its members are gone", view.epoch)
        return self._propose(target)

    def _propose(self, target: View) -> RecordRead | ProposalAnswered | None:
        stored = self._store.compare_and_set(target.epoch - 1, target)
        if stored == target:
            return ProposalAnswered(target, stored)
        if stored.named(self._identity.incarnation) is not None:
            return RecordRead(stored)
        self._obstacle = f"epoch {stored.epoch} was committed by another"
        return None

    def _candidates(self, gone: frozenset[str]) -> dict[int, Member]:
        """Return the registered processes that may be alive."""
        registered = self._store.registrations()
        ended = self._store.exits(member.incarnation for member in registered.values())
        return {
            rank: member
            for rank, member in registered.items()
            if member.incarnation not in gone
            and member.incarnation not in ended
            and not self._links.has_ended(member)
        }

    def _is_my_turn(self, candidates: Mapping[int, Member]) -> bool:
        """Whether this process proposes now: the lowest rank, and the next ones if it does not."""
        waited_s = self._clock() - self._started
        present, expected = len(candidates), self._shape.expected_workers
        self._obstacle = f"{present} of {expected} workers are there"
        if present < expected and waited_s < self._timeout_s:
            return False
        position = sorted(candidates).index(self._identity.rank)
        self._obstacle = f"rank {min(candidates)} does not propose a view"
        # Each one waits longer than the one before: that one may have died after registering.
        return position == 0 or waited_s > self._timeout_s + position * POLL_INTERVAL_S * 10

    def _reach(self, view: View) -> Reach:
        registered = self._store.registrations()
        ended = self._store.exits(view.incarnations)
        living: list[Member] = []
        silent: list[Member] = []
        dead: list[Member] = []
        for member in view.members:
            newest = registered.get(member.rank, member)
            replaced = newest.incarnation != member.incarnation
            if replaced or member.incarnation in ended:
                dead.append(member)
            elif (problem := self._links.try_connect(member)) is None:
                living.append(member)
            elif self._links.has_ended(member):
                dead.append(member)
            else:
                self._obstacle = problem
                silent.append(member)
        return Reach(tuple(living), tuple(silent), tuple(dead))

    def _tell_living(self, view: View, reach: Reach) -> None:
        """Make the members look for themselves whether the silent ones are alive."""
        now = self._clock()
        if now - self._accused_at < ACCUSE_INTERVAL_S:
            return
        self._accused_at = now
        names = tuple(member.incarnation for member in reach.silent)
        detail = f"joiner of rank {self._identity.rank} (pid {os.getpid()}) can't connect"
        listeners = [member.incarnation for member in reach.living]
        self._links.send(listeners, Abort(view.epoch, names, detail))
