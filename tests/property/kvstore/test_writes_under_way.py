"""Who says that it is at rest writes nothing any more that an earlier master granted."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.client.writes_under_way import WritesUnderWay, WriteUnderWay

TARGETS = [("a", 0), ("a", 1), ("b", 0)]
PUT_S = 10.0
targets = st.sampled_from(TARGETS)
several = st.sets(targets, min_size=1, max_size=3)


@dataclass(eq=False)
class Asked:
    """A write as the model knows it; `grants`: target -> the master that granted it."""

    write: WriteUnderWay
    since: int
    grants: dict | None = None


class WriterMachine(RuleBasedStateMachine):
    """Masters come one after the other; their replies come late, and some places are kept."""

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.books = WritesUnderWay(lambda: self.now)
        self.books.on_question(self.let_go)
        self.master = 0
        self.writes: list[Asked] = []
        self.kept: list[tuple] = []  # (target, master)
        self.doubts: list[tuple] = []  # (target, master, until)
        self.asked: dict = {}  # target -> master that the node registered with
        self.at_rest: dict = {}  # target -> the same, as it was told

    def let_go(self, target):
        self.kept = [(t, master) for t, master in self.kept if t != target]

    @rule()
    def begin(self):
        self.writes.append(Asked(self.books.begin(), self.master))

    @precondition(lambda self: self.writes)
    @rule(data=st.data(), places=several)
    def granted(self, data, places):
        """By any master that led while the request was on its way."""
        asked = data.draw(st.sampled_from(self.writes))
        if asked.grants is not None:
            return
        master = data.draw(st.integers(asked.since, self.master))
        asked.grants = dict.fromkeys(places, master)
        self.check_new(asked)
        asked.write.granted(places, put_s=PUT_S)

    @precondition(lambda self: self.writes)
    @rule(data=st.data(), where=targets)
    def keep(self, data, where):
        """A reply brings places for later; nothing is written."""
        asked = data.draw(st.sampled_from(self.writes))
        if asked.grants is not None:
            return
        self.kept.append((where, data.draw(st.integers(asked.since, self.master))))
        self.writes.remove(asked)
        asked.write.end()

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def take(self, data):
        """Write where a place was kept."""
        asked = Asked(self.books.begin(), self.master)
        target, master = data.draw(st.sampled_from(self.kept))
        self.kept.remove((target, master))
        asked.grants = {target: master}
        self.check_new(asked)
        asked.write.granted([target], put_s=PUT_S)
        self.writes.append(asked)

    @precondition(lambda self: self.writes)
    @rule(data=st.data(), doubtful=st.sets(targets))
    def end(self, data, doubtful):
        asked = data.draw(st.sampled_from(self.writes))
        self.writes.remove(asked)
        doubtful &= set(asked.grants or ())
        until = asked.write.until_s
        self.doubts += [(target, asked.grants[target], until) for target in doubtful]
        asked.write.end(doubtful)
        asked.write.end()  # once more means nothing

    @precondition(lambda self: self.writes)
    @rule(data=st.data())
    def fail(self, data):
        """It is left by an exception: what was granted is in doubt."""
        asked = data.draw(st.sampled_from(self.writes))
        self.writes.remove(asked)
        grants, until = asked.grants or {}, asked.write.until_s
        self.doubts += [(target, master, until) for target, master in grants.items()]
        asked.write.__exit__(None, None, None)

    @rule(where=targets)
    def new_master(self, where):
        self.master += 1
        self.ask(where, self.master)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def ask_again(self, data):
        target = data.draw(st.sampled_from(sorted(self.asked)))
        self.ask(target, self.asked[target])

    @rule(seconds=st.floats(0.0, PUT_S))
    def time_passes(self, seconds):
        self.now += seconds

    def ask(self, target, master):
        self.asked[target] = master
        self.books.when_at_rest(target, master, lambda: self.told(target, master))

    def told(self, target, master):
        for asked in self.writes:
            granted_by = (asked.grants or {}).get(target, master)
            assert granted_by >= master, "an old write is under way"
        for where, granted_by, until in self.doubts:
            assert where != target or granted_by >= master or until <= self.now, "in doubt"
        self.at_rest[target] = max(master, self.at_rest.get(target, 0))

    def check_new(self, asked):
        for target, master in asked.grants.items():
            assert master >= self.at_rest.get(target, 0), "a write begins with an old grant"

    @invariant()
    def the_idle_answer(self):
        if self.writes:
            return
        for target, master in self.asked.items():
            doubted = any(w == target and until > self.now for w, _, until in self.doubts)
            if not doubted and self.at_rest.get(target, 0) < master:
                self.ask(target, master)
                assert self.at_rest[target] == master


WriterMachine.TestCase.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)
TestWritesUnderWay = WriterMachine.TestCase


def test_one_that_goes_on_writing_answers_all_the_same():
    """What begins after the question does not count, however much of it there is."""
    books, told = WritesUnderWay(), []
    first = books.begin()
    first.granted([("a", 0)], put_s=PUT_S)
    books.when_at_rest(("a", 0), 1, lambda: told.append(1))
    writes = [first]
    for _ in range(50):
        later = books.begin()
        later.granted([("a", 0)], put_s=PUT_S)
        assert told == ([] if first in writes else [1])
        writes.pop(0).end()
        writes.append(later)
    assert told == [1]
    assert books.num_live() == 1


def test_elsewhere_nobody_waits():
    books, told = WritesUnderWay(), []
    write = books.begin()
    books.when_at_rest(("a", 0), 1, lambda: told.append("a"))
    assert told == []
    write.granted([("b", 0)], put_s=PUT_S)
    assert told == ["a"]
