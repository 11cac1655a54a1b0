"""Masters come and go, notes are late or lost: nobody is placed where an old grant is used."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.client.writes_under_way import WritesUnderWay, WriteUnderWay
from kvstore.master.store_master import MasterTiming, StoreMaster
from kvstore.node.rest_questions import RestQuestions, Role, Writer
from kvstore.wire import messages as m

PUT_S = 100.0
TARGET = ("n", 0)
NAMES = ["a", "b", "c"]
names = st.sampled_from(NAMES)
TIMING = MasterTiming(lease_s=1.0, silence_s=1e6, put_s=PUT_S)


@dataclass(eq=False)
class Put:
    """`granted_by` counts masters; None while they are asked. `started`: its bytes move."""

    write: WriteUnderWay
    since: int
    granted_by: int | None = None
    started: bool = False


@dataclass
class Client:
    books: WritesUnderWay
    has_key: bool = False
    dead: bool = False
    puts: list[Put] = field(default_factory=list)


class SettlingMachine(RuleBasedStateMachine):
    """One node with one segment, three clients, one master after the other."""

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.clients = {name: Client(WritesUnderWay(lambda: self.now)) for name in NAMES}
        self.questions = RestQuestions(PUT_S)
        self.notes: list = []  # on their way, in any order: calls
        self.number = 0
        self.batch = 0
        self.start_master()

    def start_master(self):
        """The node registers; who has a key may have been writing for the one before."""
        self.number += 1
        self.master = StoreMaster(TIMING)
        writers = [Writer(name, Role.CLIENT) for name, c in self.clients.items() if c.has_key]
        if self.number > 1:
            self.questions.renew(self.now)
        register = m.Register("n", "n:1", 1 << 20, not writers, m.HeldBlocks())
        assert isinstance(self.master.step(register, self.now), m.Registered)
        if writers:
            self.questions.registered(0, {0: writers}, self.now)

    def places(self) -> bool:
        self.batch += 1
        request = m.Allocate("probe", self.batch, [self.batch.to_bytes(16, "big")], [64], [0])
        reply = self.master.step(request, self.now)
        if reply.outcomes != [m.PutOutcome.GRANTED]:
            return False
        self.master.step(m.Finish("probe", self.batch, [], aborted=[0]), self.now)
        return True

    @rule()
    def another_master(self):
        self.start_master()

    @rule(name=names)
    def begin(self, name):
        client = self.clients[name]
        if not client.dead:
            client.puts.append(Put(client.books.begin(), self.number))

    @rule(name=names, data=st.data())
    def reply_comes(self, name, data):
        """Of any master that led since the request was sent."""
        client = self.clients[name]
        asking = [put for put in client.puts if put.granted_by is None]
        if client.dead or not asking:
            return
        put = data.draw(st.sampled_from(asking))
        by = data.draw(st.integers(put.since, self.number))
        if by == self.number and not self.places():
            client.puts.remove(put)
            put.write.end()
            return
        put.granted_by = by
        put.write.granted([TARGET], put_s=PUT_S)

    @rule(name=names, data=st.data())
    def start(self, name, data):
        """Get a key if there is none yet; start if that is allowed."""
        client = self.clients[name]
        granted = [put for put in client.puts if put.granted_by is not None and not put.started]
        if client.dead or not granted:
            return
        put = data.draw(st.sampled_from(granted))
        if not client.has_key:
            client.has_key = True
            if self.questions.is_anew(self.now):
                client.books.void(TARGET)
        put.started = put.write.may_start(TARGET)
        if not put.started:
            client.puts.remove(put)
            put.write.end()

    @rule(name=names, data=st.data())
    def end(self, name, data):
        client = self.clients[name]
        started = [put for put in client.puts if put.started]
        if not client.dead and started:
            put = data.draw(st.sampled_from(started))
            client.puts.remove(put)
            put.write.end()

    @rule(name=names)
    def dies(self, name):
        """Its bytes may still be under way until somebody says that it is certainly dead."""
        self.clients[name].dead = True

    @precondition(lambda self: any(client.dead for client in self.clients.values()))
    @rule()
    def confirmed_dead(self):
        dead = [name for name, client in self.clients.items() if client.dead]
        self.master.step(m.Fence(dead, dead=True), self.now)
        for name in dead:
            self.clients[name].puts.clear()

    @rule()
    def beat(self):
        for question in self.questions.due(self.now):
            self.notes.append(lambda question=question: self.asked(question))
        for news in self.questions.news():
            self.master.step(m.Settled("n", 0, list(news.waiting)), self.now)
            self.questions.told(news)

    def asked(self, question):
        client = self.clients[question.writer.name]
        if not client.dead:
            client.books.when_at_rest(TARGET, question.number, lambda: self.answers(question))

    def answers(self, question):
        self.notes.append(lambda: self.questions.at_rest(*question))

    @precondition(lambda self: self.notes)
    @rule(data=st.data(), kept=st.booleans(), arrives=st.integers(0, 9))
    def note_arrives(self, data, kept, arrives):
        note = data.draw(st.sampled_from(self.notes))
        if not kept:
            self.notes.remove(note)
        if arrives:  # else it is lost
            note()

    @rule(seconds=st.floats(0.0, 1.0))
    def time_passes(self, seconds):
        self.now += seconds

    @invariant()
    def no_old_grant_is_used_where_new_ones_are_given(self):
        if not self.places():
            return
        for client in self.clients.values():
            for put in client.puts:
                if put.granted_by is None or put.granted_by == self.number:
                    continue
                unasked = not client.has_key and self.questions.is_anew(self.now)
                assert not put.started, "it is writing by an earlier master's leave"
                assert unasked or not put.write.may_start(TARGET), "it may still begin to"

    @invariant()
    def the_idle_are_settled_in_two_beats(self):
        if self.notes or any(client.puts or client.dead for client in self.clients.values()):
            return
        for _ in range(2):
            self.beat()
            while self.notes:
                self.notes.pop(0)()
        assert self.places()


SettlingMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=60, deadline=None
)
TestSettling = SettlingMachine.TestCase
