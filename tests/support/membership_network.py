"""Membership machines on a fake network: seeded delays, kills, stalls, cut links and joins.

Virtual time only. Each process runs its machine as the coordinator does: events are taken in one
after the other, instructions are carried out in order, and while one of them takes time (the
store, loading) what arrives waits in the inbox. Rules that must always hold are checked at every
step; a violation names the seed and ends with the transcript.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from elastic import plan
from elastic.evidence import Evidence, EvidenceKind
from elastic.membership import Membership
from elastic.messages import Alive, Probe
from elastic.phase import Phase
from elastic.protocol import (
    Adopt,
    Depart,
    Event,
    Fence,
    Install,
    Instruction,
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
    Send,
    Suspected,
    Tick,
    Timing,
)
from elastic.view import Member, Role, View

PASS_TIMEOUT_S = 2.0
STALL_THRESHOLD_S = 1.0
LOOK_INTERVAL_S = 0.5


def member(rank: int, life: int = 0) -> Member:
    return Member(
        rank=rank,
        incarnation=f"{rank:08x}{life:08x}",
        role=Role.BOTH,
        node="node",
        address=f"127.0.0.1:{10_000 + rank}",
        pid=1_000 + rank,
    )


@dataclass
class Process:
    me: Member
    machine: Membership
    alive: bool = True
    stalled: bool = False
    busy: bool = False
    inbox: deque[Event] = field(default_factory=deque)
    work: deque[Event | Instruction] = field(default_factory=deque)
    installed: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.me.incarnation


class Network:
    def __init__(self, seed: int, *, layers: int = 3, experts: int = 8) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.layers, self.experts = layers, experts
        self.now = 0.0
        self.die_after_commit = 0.0  # probability that a winner dies before it tells anybody
        self.timing = Timing(install_s=5.0, first_install_s=5.0, quiet_s=STALL_THRESHOLD_S)
        self.processes: dict[str, Process] = {}
        self.record: View | None = None
        self.committed: dict[int, View] = {}
        self.loaded: set[tuple[int, str]] = set()
        self.cut: set[frozenset[str]] = set()
        self.transcript: deque[str] = deque(maxlen=400)
        self.last_arrival: dict[tuple[str, str], float] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0

    # --- running --------------------------------------------------------------------------------

    def at(self, delay_s: float, action: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._events, (self.now + delay_s, self._sequence, action))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, action = heapq.heappop(self._events)
            action()
        self.now = until

    def check(self, condition: bool, what: str) -> None:
        if not condition:
            lines = "\n".join(self.transcript)
            raise AssertionError(f"seed {self.seed}, t={self.now:.4f}: {what}\n{lines}")

    def say(self, process: Process, what: str) -> None:
        self.transcript.append(
            f"{self.now:9.4f} r{process.me.rank} {process.name[-4:]} "
            f"{process.machine.phase:10} e{process.machine.epoch} {what}"
        )

    # --- what happens to processes --------------------------------------------------------------

    def spawn(self, rank: int, life: int = 0) -> Process:
        me = member(rank, life)
        machine = Membership(rank=rank, incarnation=me.incarnation, timing=self.timing)
        process = self.processes[me.incarnation] = Process(me, machine)
        self.at(LOOK_INTERVAL_S, lambda: self.look(process))
        return process

    def look(self, process: Process) -> None:
        """The watch thread: reads the record now and then."""
        if not process.alive:
            return
        view = self.record
        if not process.stalled and view is not None and view.epoch > process.machine.epoch > 0:
            self.give(process, RecordRead(view))
        self.at(LOOK_INTERVAL_S, lambda: self.look(process))

    def start_group(self, ranks: Iterable[int]) -> None:
        members = [self.spawn(rank).me for rank in ranks]
        view = plan.first_view(members, num_layers=self.layers, num_logical=self.experts)
        self.compare_and_set(view)
        for process in list(self.processes.values()):
            self.at(self.random.uniform(0, 0.05), lambda p=process: self.give(p, RecordRead(view)))

    def kill(self, process: Process) -> None:
        self.say(process, "KILLED")
        process.alive = False
        proof = self.random.random() < 0.7
        kind = EvidenceKind.PROCESS_EXIT if proof else EvidenceKind.CONNECTION_LOST
        for other in self.processes.values():
            self.lose(other, process.name, kind)

    def lose(self, process: Process, name: str, kind: EvidenceKind) -> None:
        event = Suspected((name,), Evidence(kind=kind, detail="end of file"))
        self.at(self.random.uniform(0.0005, 0.02), lambda: self.give(process, event))

    def cut_link(self, a: str, b: str) -> None:
        pair = frozenset((a, b))
        if pair in self.cut or a == b:
            return
        self.cut.add(pair)
        for mine, other in ((a, b), (b, a)):
            self.lose(self.processes[mine], other, EvidenceKind.CONNECTION_LOST)

    def stall(self, process: Process, duration_s: float) -> None:
        self.say(process, f"STALLED for {duration_s:.2f} s")
        process.stalled = True
        self.at(duration_s, lambda: self.wake(process, duration_s))
        if duration_s > PASS_TIMEOUT_S:
            for other in self.processes.values():
                delay_s = PASS_TIMEOUT_S + self.random.uniform(0, 0.05)
                self.at(delay_s, lambda o=other: self.miss_deadline(o, process))

    def miss_deadline(self, process: Process, missing: Process) -> None:
        view = process.machine.view
        if view is None or process.machine.phase is not Phase.SERVING or not missing.stalled:
            return
        if missing.name not in view.incarnations:
            return
        names = [missing.name]
        if self.random.random() < 0.3:  # a healthy one that waits for the same member, too
            names.append(self.random.choice(view.others(process.name)).incarnation)
        evidence = Evidence(kind=EvidenceKind.DEADLINE, detail="pass")
        self.give(process, Suspected(tuple(names), evidence))
        self.give(process, PassDropped())

    def wake(self, process: Process, duration_s: float) -> None:
        process.stalled = False
        if duration_s > STALL_THRESHOLD_S:
            process.inbox.appendleft(OwnStall())
        view = process.machine.view
        if view is not None and process.machine.phase is Phase.SERVING and duration_s > 2:
            others = tuple(m.incarnation for m in view.others(process.name))
            evidence = Evidence(kind=EvidenceKind.DEADLINE, detail="own pass")
            process.inbox.extend([Suspected(others, evidence), PassDropped()])
        self.turn(process)

    # --- joining --------------------------------------------------------------------------------

    def join(self, process: Process) -> None:
        """One attempt: reach everybody, load, compare-and-set; again later if it does not work."""
        view = self.record
        if not process.alive or process.machine.phase is not Phase.OUTSIDE or view is None:
            return
        others = [self.processes[m.incarnation] for m in view.members]
        dead = [p.name for p in others if not p.alive]
        again_s = self.random.uniform(0.02, 0.05)
        if any(frozenset((process.name, p.name)) in self.cut for p in others if p.alive):
            return  # fenced: this incarnation can't come back
        target = plan.view_with(view, process.me, dead)

        def finish() -> None:
            if not process.alive:
                return
            stored = self.compare_and_set(target)
            if stored == target and self.random.random() < self.die_after_commit:
                self.kill(process)
            elif stored == target:
                self.give(process, ProposalAnswered(target, stored))
            else:
                self.at(again_s, lambda: self.join(process))

        self.at(self.random.uniform(0.001, 0.2), finish)

    # --- the shell ------------------------------------------------------------------------------

    def give(self, process: Process, event: Event) -> None:
        if process.alive:
            process.inbox.append(event)
            self.turn(process)

    def turn(self, process: Process) -> None:
        while process.alive and not process.stalled and not process.busy:
            if process.work:
                self.advance(process, process.work.popleft())
            elif process.inbox:
                self.advance(process, process.inbox.popleft())
            else:
                wake_at = process.machine.wake_at
                if wake_at is None:
                    return
                if wake_at > self.now:
                    self.at(wake_at - self.now, lambda: self.turn(process))
                    return
                self.advance(process, Tick())

    def advance(self, process: Process, item: Event | Instruction) -> None:
        if isinstance(item, Instruction):
            self.perform(process, item)
            return
        if not isinstance(item, Tick):
            self.say(process, f"<- {_short(item)}")
        instructions = process.machine.step(item, self.now)
        # Answers come after the instructions of the same step, as in the coordinator.
        process.work.extend(instructions)

    def take_time(self, process: Process, delay_s: float, then: Callable[[], None]) -> None:
        process.busy = True

        def finish() -> None:
            process.busy = False
            if process.alive:
                then()
                self.turn(process)

        self.at(delay_s, finish)

    def perform(self, process: Process, instruction: Instruction) -> None:
        self.say(process, f"-> {_short(instruction)}")
        match instruction:
            case Send(to, message):
                for name in to:
                    self.send(process.name, name, message)
            case ReadRecord():
                delay_s = self.random.uniform(0.0001, 0.005)
                self.take_time(
                    process, delay_s, lambda: process.work.append(RecordRead(self.record))
                )
            case Propose(view):
                self.take_time(
                    process, self.random.uniform(0.0001, 0.01), lambda: self.propose(process, view)
                )
            case Fence(incarnations):
                for name in incarnations:
                    self.check(name != process.name, "fences itself")
                    self.cut_link(process.name, name)
            case Adopt(view):
                for other in view.others(process.name):
                    pair = frozenset((process.name, other.incarnation))
                    if pair in self.cut or not self.processes[other.incarnation].alive:
                        self.lose(process, other.incarnation, EvidenceKind.CONNECTION_LOST)
            case Prepare(view):
                offers = {m.rank: b"%d" % view.epoch for m in view.others(process.name)}
                process.work.append(Prepared(view.epoch, offers))
            case Load(view):
                delay_s = self.random.choice((0.0001, 0.001, 0.05))
                self.take_time(process, delay_s, lambda: self.finish_load(process, view))
            case Install(view, offers):
                self.install(process, view, offers)
            case Depart():
                pass

    def send(self, source: str, target: str, message: object) -> None:
        pair = (source, target)
        delay_s = self.random.choice((0.0002, 0.001, 0.005, 0.03))
        # Ordered per pair while the connection lives.
        arrival = max(self.now + delay_s, self.last_arrival.get(pair, 0.0) + 1e-6)
        self.last_arrival[pair] = arrival

        def arrive() -> None:
            process = self.processes[target]
            if frozenset(pair) in self.cut or not process.alive:
                return
            if isinstance(message, Probe):
                if not process.stalled:  # the engine's thread answers, busy or not
                    self.send(target, source, Alive(message.epoch))
                return
            self.give(process, Received(source, message))

        self.at(arrival - self.now, arrive)

    def propose(self, process: Process, view: View) -> None:
        self.check(process.name in view.incarnations, "proposes a view without itself")
        stored = self.compare_and_set(view)
        not_alone = sum(self.processes[m.incarnation].alive for m in view.members) > 1
        if stored == view and not_alone and self.random.random() < self.die_after_commit:
            self.kill(process)
            return
        process.work.append(ProposalAnswered(view, stored))

    def finish_load(self, process: Process, view: View) -> None:
        self.loaded.add((view.epoch, process.name))
        process.work.append(Loaded(view.epoch))

    # --- rules ----------------------------------------------------------------------------------

    def compare_and_set(self, view: View) -> View:
        epoch = 0 if self.record is None else self.record.epoch
        if view.epoch == epoch + 1:
            self.check(view.epoch not in self.committed, "two views of one epoch")
            self.check(not view.expert_map.missing(), "an expert belongs to nobody")
            self.committed[view.epoch] = self.record = view
            self.transcript.append(f"{self.now:9.4f} COMMITTED e{view.epoch} {view.ranks}")
        assert self.record is not None
        return View.decode(self.record.encode())

    def install(self, process: Process, view: View, offers: object) -> None:
        self.check(view == self.committed[view.epoch], "installs what was not committed")
        self.check(process.installed[-1:] < [view.epoch], "installs an old epoch")
        late = [m.rank for m in view.members if (view.epoch, m.incarnation) not in self.loaded]
        self.check(not late, f"epoch {view.epoch} starts before ranks {late} are ready")
        expected = {m.rank: b"%d" % view.epoch for m in view.others(process.name)}
        self.check(offers == expected, f"installs offers {offers}")
        process.installed.append(view.epoch)

    def check_settled(self) -> None:
        """All that live and were not evicted serve the committed view, and it is theirs alone."""
        assert self.record is not None
        serving = [
            p for p in self.processes.values() if p.alive and p.machine.phase is Phase.SERVING
        ]
        waiting = [
            p
            for p in self.processes.values()
            if p.alive and p.machine.phase in (Phase.AGREEING, Phase.INSTALLING)
        ]
        self.check(not waiting, f"still under way: {[p.me.rank for p in waiting]}")
        self.check(bool(serving), "nobody serves")
        for process in serving:
            self.check(process.machine.view == self.record, f"r{process.me.rank} has another view")
        names = {process.name for process in serving}
        self.check(names == self.record.incarnations, "members that don't serve")


def _short(item: object) -> str:
    text = repr(item)
    return text if len(text) < 160 else text[:157] + "..."
