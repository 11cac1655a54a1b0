"""Runs the membership machine: turns what happens into events and carries out its instructions.

Everything runs on the rank loop's thread, inside `join`, `report`, `poll` and `leave`. The
engine's callbacks and the watch thread only put events into the inbox, and interrupt the engine
if a view change is certain to follow, so that a rank that waits inside a pass comes here.

An interrupt is taken back only at the end of a view change and with an empty inbox. So after an
`Interrupted` the next `poll()` always returns a newly installed view (or raises).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from configs.schema import ElasticConfig
from elastic.effects import Effects, GroupMember
from elastic.errors import (
    AgreementTimeout,
    Evicted,
    NoSurvivors,
    RecordInvalid,
    Stopped,
    StoreUnavailable,
)
from elastic.evidence import Evidence, EvidenceKind, Watch
from elastic.inbox import Inbox
from elastic.joining import GroupShape, Joining
from elastic.links import Links
from elastic.membership import Membership
from elastic.phase import Phase
from elastic.protocol import (
    Event,
    LeaveAsked,
    OwnStall,
    PassDropped,
    Suspected,
    Tick,
    Timing,
)
from elastic.store import MembershipStore
from elastic.view import Member, View
from transfer import TransferEngine

logger = logging.getLogger(__name__)

PAUSE_MAX_S = 1.0
LEAVE_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewChange:
    """When the last view change happened, on the coordinator's clock (seconds)."""

    epoch: int
    noticed_s: float
    committed_s: float
    installed_s: float


class Coordinator:
    """One process's membership. Not thread-safe: the rank loop's thread only.

    Construct it before the engine is opened (it registers handlers), call `join` after.

    Args:
        config: Deadlines.
        store: The view record.
        engine: The process's transfer engine; its name is the identity's incarnation.
        member: Does the work of a view change.
        identity: This process; the address is taken from the engine if it is empty.
        num_layers: Layers with experts, for the first view.
        num_logical: Logical experts per layer, for the first view.
        expected_workers: How many the first view waits for.
        clock: Monotonic seconds.
        timing: Intervals; default: from the config.
    """

    def __init__(
        self,
        config: ElasticConfig,
        *,
        store: MembershipStore,
        engine: TransferEngine,
        member: GroupMember,
        identity: Member,
        num_layers: int,
        num_logical: int,
        expected_workers: int,
        clock: Callable[[], float] = time.monotonic,
        timing: Timing | None = None,
    ) -> None:
        self._config = config
        self._store = store
        self._engine = engine
        self._member = member
        self._identity = identity
        self._shape = GroupShape(
            num_layers=num_layers, num_logical=num_logical, expected_workers=expected_workers
        )
        self._clock = clock
        self._machine = Membership(
            rank=identity.rank,
            incarnation=identity.incarnation,
            timing=timing or _timing(config),
        )
        self._inbox = Inbox(engine, clock)
        self._links = Links(engine, identity)
        self._effects = Effects(
            identity.incarnation,
            store=store,
            links=self._links,
            inbox=self._inbox,
            member=member,
            clock=clock,
        )
        self._told: View | None = None  # the view that was last returned to the caller
        self._stall_told_at = float("-inf")
        self._stopping = False
        self.last_change: ViewChange | None = None
        self._watch = Watch(
            threshold_s=config.stall_threshold_s,
            look=self._look_at_record,
            look_interval_s=config.watch_interval_s,
            clock=clock,
        )

    @property
    def view(self) -> View | None:
        """The view installed last."""
        return self._effects.installed

    def join(self) -> View:
        """Become a member; return the installed view.

        Raises:
            JoinTimeout: No view with this process could be committed.
            StoreUnavailable: The store did not answer all the while (retryable).
            Evicted: It was committed, and another removed this process again.
        """
        if not self._identity.address:
            self._identity = replace(self._identity, address=self._engine.address)
        self._watch.start()
        joining = Joining(
            self._identity,
            store=self._store,
            links=self._links,
            holder=self._member,
            shape=self._shape,
            timeout_s=self._config.bootstrap_timeout_s,
            clock=self._clock,
            check=self._check_not_stopped,
        )
        self._step(joining.enter())
        return self._settle()

    def report(self, suspects: Iterable[int], evidence: str) -> View:
        """Give up the pass under way, and return the view that follows.

        Args:
            suspects: Ranks of the installed view that failed to do their part; may be empty.
            evidence: What was seen, for people.

        Raises:
            Evicted: The next view does not contain this process.
            AgreementTimeout: No view could be agreed on or installed.
            StoreUnavailable: The store did not answer in all the time that a view change may take.
                The call may be repeated.
        """
        view = self._machine.view
        assert view is not None, "join() first"
        self._tell_stall()
        self._drain()
        if self._machine.epoch == view.epoch and self._machine.phase is not Phase.EVICTED:
            for rank in suspects:
                if (member := view.member(rank)) is not None:
                    connected = self._links.is_connected(member)
                    kind = EvidenceKind.DEADLINE if connected else EvidenceKind.CONNECTION_LOST
                    seen = Evidence(kind=kind, detail=evidence)
                    self._step(Suspected((member.incarnation,), seen))
            self._step(PassDropped())
        return self._settle()

    def poll(self) -> View | None:
        """Handle what has come in; return a view if a new one was installed.

        To be called between passes and after `transfer.Interrupted`. Costs next to nothing when
        nothing happened.

        Raises:
            Evicted, AgreementTimeout, StoreUnavailable: See `report`.
        """
        self._tell_stall()
        machine, inbox = self._machine, self._inbox
        idle = machine.phase is Phase.SERVING and machine.wake_at is None
        if idle and inbox.empty and inbox.interrupted_at is None:
            return None
        before = self._told
        after = self._settle()
        return None if after is before else after

    def leave(self) -> None:
        """Leave as planned: the others take over this rank's experts, reading them from it.

        Returns once they have cut the connection, or after `install_timeout_s`; at once if nobody
        else is left, or all others leave too.
        """
        assert self._effects.installed is not None, "join() first"
        try:
            self._step(LeaveAsked())
            self._settle()
        except NoSurvivors:
            logger.info("the last member leaves: nobody to hand over to")
            return
        # Those of the first view without us: of several that leave at once, each waits only for
        # those that left later.
        after = self._machine.view
        others = after.members if after is not None else ()
        deadline = self._clock() + self._config.install_timeout_s
        while any(map(self._links.is_connected, others)) and self._clock() < deadline:
            self._inbox.take(LEAVE_POLL_S)
            self._check_not_stopped()
        # Its registration remains; nobody may count on it for a new group.
        self._store.report_exit(self._identity.incarnation, "left")

    def stop(self) -> None:
        """Make the call in progress, and every later one that would wait, raise `Stopped`.

        For a process that ends without regard to the group: others that end at the same moment
        would otherwise be waited for. Any thread, or a signal handler.
        """
        self._stopping = True
        self._inbox.nudge()

    def close(self) -> None:
        """End the watch thread. The engine and the store belong to the caller."""
        self._watch.stop()

    def _look_at_record(self) -> None:
        """Run by the watch, on its thread."""
        try:
            view = self._store.read()
            ended = self._store.exits(sorted(self._inbox.members))
        except StoreUnavailable as error:
            logger.debug("the record can't be read: %s", error)
            return
        except RecordInvalid as error:
            # The watch goes on: this process must still know of its own stalls.
            logger.warning("the record can't be understood: %s", error)
            return
        if view is not None:
            self._inbox.put_record(view)
        self._inbox.put_ended(ended)

    def _settle(self) -> View:
        """Step until nothing is under way; return the installed view."""
        started = self._clock()
        limit_s = 4 * self._config.install_timeout_s + self._config.bootstrap_timeout_s
        # Not that of the view installed last: taking in what was there may have installed one.
        epoch = 0 if self._told is None else self._told.epoch
        noticed = self._inbox.interrupted_at or started
        while not self._try_finish(epoch):
            self._check_not_stopped()
            if self._clock() - started > limit_s:
                if self._effects.silence is not None:
                    raise self._effects.silence
                raise AgreementTimeout(
                    epoch=self._machine.epoch,
                    phase=str(self._machine.phase),
                    waited_s=limit_s,
                    waiting_for=self._machine.waiting_for,
                    story="; ".join(self._machine.story),
                )
        if self._machine.phase is Phase.EVICTED:
            raise self._evicted()
        view = self._effects.installed
        assert view is not None
        if view.epoch != epoch:
            self._note_change(view, noticed)
        self._told = view
        return view

    def _try_finish(self, epoch: int) -> bool:
        """Take in what is there, or wait for more; whether everything is done."""
        self._drain()
        self._step(Tick())
        machine = self._machine
        if machine.settled and machine.wake_at is None:
            serving, unchanged = machine.phase is Phase.SERVING, machine.epoch == epoch
            if not (serving and unchanged and self._inbox.interrupted_at is not None):
                return self._inbox.calm()
            if self._inbox.empty:
                # Interrupted for something that came to nothing; the pass is lost all the same.
                self._step(PassDropped())
            return False
        pause_s = PAUSE_MAX_S if machine.wake_at is None else machine.wake_at - self._clock()
        if pause_s > 0:
            event = self._inbox.take(min(pause_s, PAUSE_MAX_S))
            if event is None:
                self._tell_stall()
            else:
                self._step(event)
        return False

    def _check_not_stopped(self) -> None:
        if self._stopping:
            raise Stopped(rank=self._identity.rank)

    def _drain(self) -> None:
        while (event := self._inbox.take()) is not None:
            self._step(event)

    def _tell_stall(self) -> None:
        now = self._clock()
        if now - self._stall_told_at > self._config.stall_threshold_s and self._watch.stalled():
            self._stall_told_at = now
            logger.warning("this process was stalled: it accuses nobody now")
            self._step(OwnStall())

    def _step(self, event: Event) -> None:
        pending = deque([event])
        while pending:
            current = self._links.refined(pending.popleft(), self._machine.view)
            for instruction in self._machine.step(current, self._clock()):
                answer = self._effects.perform(instruction)
                if answer is not None:
                    pending.append(answer)

    def _evicted(self) -> Evicted:
        return Evicted(
            epoch=self._machine.epoch,
            rank=self._identity.rank,
            incarnation=self._identity.incarnation,
        )

    def _note_change(self, view: View, noticed: float) -> None:
        now = self._clock()
        committed = self._effects.committed_at
        noticed = min(noticed, committed)  # a joiner hears of what is agreed already
        self.last_change = ViewChange(
            epoch=view.epoch,
            noticed_s=noticed,
            committed_s=committed,
            installed_s=now,
        )
        logger.info(
            "epoch %d with ranks %s: agreed after %.1f ms, installed after %.1f ms",
            view.epoch,
            view.ranks,
            (committed - noticed) * 1e3,
            (now - noticed) * 1e3,
        )


def _timing(config: ElasticConfig) -> Timing:
    return Timing(
        install_s=config.install_timeout_s,
        first_install_s=max(config.bootstrap_timeout_s, config.install_timeout_s),
        quiet_s=config.stall_threshold_s,
    )
