"""The membership machine of one process: `step(event, now) -> [instruction]`. Pure.

Where a process stands, and what leads from there to where, is drawn in `elastic.phase`.

What it keeps:

- Only a committed view changes the membership. Evidence leads to a proposal, nothing more.
- `Install` comes only when every member's offer and ready of this very epoch are in hand.
- A member lost in the middle makes the next view from here: nothing is rolled back, because
  nothing of an epoch has an effect before all are ready for it.
- Own evidence alone removes somebody. An accusation by another makes the accused be probed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from dispatch import ExpertMap
from elastic import plan
from elastic.errors import RecordInvalid
from elastic.evidence import Evidence, EvidenceKind
from elastic.installation import EarlyMessages, Installation
from elastic.messages import Abort, Alive, Committed, Message, Offer, Probe, Ready
from elastic.phase import INSIDE, Phase
from elastic.protocol import (
    Adopt,
    Depart,
    Event,
    Fence,
    Install,
    Instruction,
    LeaveAsked,
    Load,
    Loaded,
    OwnStall,
    PassDropped,
    Prepare,
    Prepared,
    ProposalAnswered,
    Propose,
    ReadRecord,
    Received,
    RecordRead,
    RecordUnread,
    Send,
    Suspected,
    Tick,
    Timing,
)
from elastic.suspicion import Suspicions
from elastic.view import View

STORY_MAX = 64


class Membership:
    """One process's part in agreeing on views and installing them. Not thread-safe.

    Args:
        rank: The process's slot.
        incarnation: Its name.
        timing: Intervals.
    """

    def __init__(self, *, rank: int, incarnation: str, timing: Timing) -> None:
        self.rank = rank
        self.incarnation = incarnation
        self.timing = timing
        self.phase = Phase.OUTSIDE
        self.view: View | None = None
        self.story: deque[str] = deque(maxlen=STORY_MAX)
        self._suspicions = Suspicions()
        self._leaving = False
        self._quiet_until = float("-inf")
        self._propose_at: float | None = None
        self._read_at: float | None = None
        self._grace_until: float | None = None
        self._installation: Installation | None = None  # of the current view
        self._limit_s = timing.first_install_s  # its deadline, as an interval
        self._early = EarlyMessages()
        self._fence_later: set[str] = set()
        self._resident: ExpertMap | None = None  # the map whose experts were last loaded

    # --- what the shell asks ------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Epoch of the view adopted last; 0 before the first."""
        return 0 if self.view is None else self.view.epoch

    @property
    def settled(self) -> bool:
        """Whether nothing is under way."""
        return self.phase in (Phase.SERVING, Phase.EVICTED, Phase.LEFT)

    @property
    def wake_at(self) -> float | None:
        """When the next `Tick` has something to do; None: never without another event."""
        times = [self._read_at, *self._suspicions.probes.values()]
        if self.phase is Phase.AGREEING and not self._suspicions.probes:
            times.append(self._propose_at)
        if self.phase is Phase.INSTALLING and self._installation is not None:
            times.append(self._installation.deadline)
        return min((time for time in times if time is not None), default=None)

    @property
    def waiting_for(self) -> tuple[int, ...]:
        """Ranks whose offer or ready of the newest view is still missing."""
        missing = () if self._installation is None else self._installation.waiting_for
        members = () if self.view is None else self.view.members
        return tuple(m.rank for m in members if m.incarnation in missing)

    def step(self, event: Event, now: float) -> list[Instruction]:
        """Take in one event at time `now` (seconds, never going back)."""
        if not isinstance(event, Tick):
            self.story.append(f"{now:.4f} {self.phase} {self.epoch} <- {type(event).__name__}")
        instructions = self._HANDLERS[type(event)](self, event, now)
        self.check_invariants()
        return instructions

    def check_invariants(self) -> None:
        """Assert what must hold between steps."""
        view = self.view
        members = frozenset[str]() if view is None else view.incarnations
        suspicions = self._suspicions
        assert (view is None) == (self.phase is Phase.OUTSIDE)
        assert suspicions.own.keys() | suspicions.probes.keys() <= members - {self.incarnation}
        assert not suspicions.own or self.phase is Phase.AGREEING
        assert (self.incarnation in members) == (self.phase in INSIDE)
        installed = self._installation is not None and self._installation.complete
        assert self.phase is not Phase.SERVING or installed
        assert self.phase is not Phase.AGREEING or self.wake_at is not None

    # --- evidence -----------------------------------------------------------------------------

    def _on_suspected(self, event: Suspected, now: float) -> list[Instruction]:
        fresh = [name for name in event.incarnations if self._is_other_member(name)]
        if not fresh:
            return []
        if event.evidence.kind is EvidenceKind.DEADLINE:
            return self._probe(fresh, now)
        return self._accuse(fresh, event.evidence, now)

    def _probe(self, names: Iterable[str], now: float) -> list[Instruction]:
        # Who waits for a rank that waits for the dead one misses its deadline too: the answer to
        # a probe tells the two apart.
        self._become_agreeing(now)
        if now < self._quiet_until:
            return []
        asked = self._suspicions.probe(names, now + self.timing.probe_s)
        return [Send(asked, Probe(self.epoch))] if asked else []

    def _accuse(self, names: Iterable[str], evidence: Evidence, now: float) -> list[Instruction]:
        assert self.view is not None
        news = self._suspicions.add(names, evidence)
        self._become_agreeing(now + self.timing.gather_s)
        others = self.view.incarnations - self._suspicions.own.keys() - {self.incarnation}
        if not news or not others:
            return []
        return [Send(tuple(sorted(others)), Abort(self.epoch, news, str(evidence)))]

    def _on_pass_dropped(self, event: PassDropped, now: float) -> list[Instruction]:
        if self.phase is Phase.SERVING:
            self._become_agreeing(now)
        return []

    def _on_own_stall(self, event: OwnStall, now: float) -> list[Instruction]:
        if self.phase not in INSIDE:
            return []
        self._quiet_until = now + self.timing.quiet_s
        self._suspicions.forget_deadlines()
        # They had no chance to be heard: the deadline starts anew.
        if self._installation is not None:
            later = max(self._installation.deadline, now + self.timing.install_s)
            self._installation.deadline = later
        return [ReadRecord()]

    # --- messages -----------------------------------------------------------------------------

    def _on_received(self, event: Received, now: float) -> list[Instruction]:
        message, sender = event.message, event.sender
        if self.phase in (Phase.EVICTED, Phase.LEFT):
            return []
        if isinstance(message, Committed):
            try:
                view = View.decode(message.view)
            except RecordInvalid as error:
                self.story.append(f"{now:.4f} {sender} announced no view: {error}")
                return [ReadRecord()]  # which is the truth, whatever its announcement says
            # Outside, only a first view with us in it concerns us; joining reads the record.
            if self.phase is Phase.OUTSIDE and view.named(self.incarnation) is None:
                return []
            return self._adopt(view, now)
        if message.epoch > self.epoch:
            return self._keep_early(sender, message, now)
        if message.epoch < self.epoch or self.view is None:
            return []
        if isinstance(message, Abort):  # from a joiner too: it leads to a probe, not to a removal
            self._suspicions.accused.update(filter(self._is_other_member, message.suspects))
            self._become_agreeing(now + self.timing.follow_s)
            return []
        if not self._is_other_member(sender):
            return []
        if isinstance(message, Alive):
            probes = self._suspicions.probes
            if probes.pop(sender, None) is not None and not probes:
                self._propose_at = now
            return []
        if self._installation is not None:
            self._installation.note(sender, message)
        return self._install_if_complete()

    def _keep_early(self, sender: str, message: Message, now: float) -> list[Instruction]:
        if self.phase is not Phase.OUTSIDE and self._read_at is None:
            self._read_at = now + self.timing.overtaken_s
        if isinstance(message, Offer | Ready):
            self._early.keep(sender, message)
        return []

    # --- agreeing -----------------------------------------------------------------------------

    def _become_agreeing(self, propose_at: float) -> None:
        sooner = self._propose_at is None or propose_at < self._propose_at
        self._propose_at = propose_at if sooner else self._propose_at
        self.phase = Phase.AGREEING

    def _on_tick(self, event: Tick, now: float) -> list[Instruction]:
        out: list[Instruction] = []
        if self._read_at is not None and self._read_at <= now:
            self._read_at = None
            out.append(ReadRecord())
        if silent := self._suspicions.overdue(now):
            evidence = Evidence(kind=EvidenceKind.DEADLINE, detail="did not answer a probe")
            out += self._accuse(silent, evidence, now)
        if self.phase is Phase.INSTALLING:
            out += self._accuse_late(now)
        due = self._propose_at is not None and self._propose_at <= now
        if self.phase is Phase.AGREEING and due and not self._suspicions.probes:
            out += self._propose(now)
        return out

    def _accuse_late(self, now: float) -> list[Instruction]:
        assert self._installation is not None
        if now < self._installation.deadline or not self._installation.waiting_for:
            return []
        detail = f"not ready for epoch {self.epoch} within {self._limit_s:.3g} s"
        evidence = Evidence(kind=EvidenceKind.DEADLINE, detail=detail)
        return self._accuse(self._installation.waiting_for, evidence, now)

    def _propose(self, now: float) -> list[Instruction]:
        assert self.view is not None
        suspicions = self._suspicions
        if not suspicions.own and suspicions.unproven() and now >= self._quiet_until:
            unproven = suspicions.unproven()
            suspicions.accused.clear()
            return self._probe(unproven, now)
        if suspicions.leave_weak_minority(self.view):
            if self._grace_until is None:
                self._grace_until = now + self.timing.minority_s
            if now < self._grace_until:
                self._propose_at = self._grace_until
                return []
        removed = {*suspicions.own, *({self.incarnation} if self._leaving else ())}
        self._propose_at = now + self.timing.retry_s  # should the store not answer
        return [Propose(plan.view_without(self.view, removed))]

    def _on_proposal_answered(self, event: ProposalAnswered, now: float) -> list[Instruction]:
        if event.stored != event.proposed:
            return self._adopt(event.stored, now)
        before = self.view
        concerned = set(event.stored.incarnations)
        if before is not None:
            concerned |= before.incarnations
        unreachable = self._suspicions.unreachable() | {self.incarnation}
        listeners = tuple(sorted(concerned - unreachable))
        news = Committed(event.stored.epoch, event.stored.encode())
        announce: list[Instruction] = [Send(listeners, news)] if listeners else []
        return announce + self._adopt(event.stored, now)

    def _on_record_read(self, event: RecordRead, now: float) -> list[Instruction]:
        return [] if event.view is None else self._adopt(event.view, now)

    def _on_record_unread(self, event: RecordUnread, now: float) -> list[Instruction]:
        if self.phase in INSIDE:
            self._read_at = now + self.timing.retry_s
        return []

    def _on_leave_asked(self, event: LeaveAsked, now: float) -> list[Instruction]:
        assert self.view is not None
        self._leaving = True
        self._become_agreeing(now)
        return []

    # --- installing ---------------------------------------------------------------------------

    def _adopt(self, view: View, now: float) -> list[Instruction]:
        if view.epoch <= self.epoch:
            return []
        before, self.view = self.view, view
        removed = frozenset[str]() if before is None else before.incarnations - view.incarnations
        dead = removed & self._suspicions.own.keys()
        self._fence_later = (self._fence_later | removed) - dead
        members = view.incarnations - {self.incarnation}
        self._suspicions.keep_members(members)
        self._propose_at = self._read_at = self._grace_until = None
        early = self._early.take(view.epoch)
        fence: list[Instruction] = []
        if dead:
            fence.append(Fence(tuple(sorted(dead)), f"not in the view of epoch {view.epoch}"))
        if view.named(self.incarnation) is None:
            self.phase = Phase.LEFT if self._leaving else Phase.EVICTED
            self._suspicions, self._installation = Suspicions(), None
            return [*fence, Depart(view, self._leaving)]
        # In their first view, members of a group that starts load everything.
        self._limit_s = self.timing.install_s if before else self.timing.first_install_s
        self._installation = Installation(view, self.incarnation, now + self._limit_s)
        for sender, message in early:
            if sender in members:
                self._installation.note(sender, message)
        self.phase = Phase.INSTALLING
        if self._suspicions.own or self._leaving:  # somebody is still in it who has to go
            self._become_agreeing(now)
            return [*fence, Adopt(view)]
        return [*fence, Adopt(view), Prepare(view)]

    def _on_prepared(self, event: Prepared, now: float) -> list[Instruction]:
        if self.phase is not Phase.INSTALLING or event.epoch != self.epoch:
            return []
        assert self.view is not None
        assert self._installation is not None
        self._installation.outgoing = dict(event.offers)
        load: list[Instruction] = [Load(self.view)]
        if not plan.gained(self._resident, self.view.expert_map, self.rank):
            return load  # at once: offer and ready travel as one message
        return self._send_offers(ready=False) + load

    def _on_loaded(self, event: Loaded, now: float) -> list[Instruction]:
        if self.phase is not Phase.INSTALLING or event.epoch != self.epoch:
            return []
        assert self.view is not None
        assert self._installation is not None
        self._installation.loaded = True
        self._resident = self.view.expert_map
        if self._installation.outgoing is not None:
            out = self._send_offers(ready=True)
        else:
            others = tuple(m.incarnation for m in self.view.others(self.incarnation))
            out = [Send(others, Ready(self.epoch))] if others else []
        return out + self._install_if_complete()

    def _send_offers(self, *, ready: bool) -> list[Instruction]:
        assert self._installation is not None
        outgoing, self._installation.outgoing = self._installation.outgoing or {}, None
        return [
            Send((m.incarnation,), Offer(self.epoch, outgoing.get(m.rank, b""), ready))
            for m in self._installation.view.others(self.incarnation)
        ]

    def _install_if_complete(self) -> list[Instruction]:
        installation = self._installation
        if self.phase is not Phase.INSTALLING or installation is None or not installation.complete:
            return []
        self.phase = Phase.SERVING
        install = Install(installation.view, installation.offers_by_rank())
        if not self._fence_later:
            return [install]
        # Alive when they were removed: until now they could still be read from.
        names, self._fence_later = tuple(sorted(self._fence_later)), set()
        return [Fence(names, f"not in the view of epoch {self.epoch}"), install]

    def _is_other_member(self, name: str) -> bool:
        inside = self.view is not None and self.phase in INSIDE and name != self.incarnation
        return inside and self.view is not None and name in self.view.incarnations

    _HANDLERS: ClassVar[dict[type, Callable[[Membership, Any, float], list[Instruction]]]] = {
        Suspected: _on_suspected,
        PassDropped: _on_pass_dropped,
        OwnStall: _on_own_stall,
        Received: _on_received,
        RecordRead: _on_record_read,
        RecordUnread: _on_record_unread,
        ProposalAnswered: _on_proposal_answered,
        Prepared: _on_prepared,
        Loaded: _on_loaded,
        LeaveAsked: _on_leave_asked,
        Tick: _on_tick,
    }
