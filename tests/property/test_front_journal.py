"""Random histories of the journal against workers that are honest, late, dead or confused.

The reference is a pure function: token `i` of request `r` is `reference(r, i)`. Whatever happens,
what is delivered of a request is a prefix of its reference, nothing is delivered twice, every
accepted request is closed exactly once, and no living worker is left with work nobody wants.
"""

from __future__ import annotations

import random
import secrets

import pytest

from moe_runtime.front.journal import Journal
from moe_runtime.front.journal_records import (
    Accepted,
    Assigned,
    Closed,
    Deliver,
    OwnerIdle,
    OwnersLost,
    RequestState,
    Sampling,
    Send,
    StreamClosed,
    SubmitUndelivered,
    Tick,
    TokensReceived,
)
from moe_runtime.messages import Cancel, Submit, TokenItem

TIMEOUT_S = 200.0
STEPS = 600


def reference(request_id, index):
    return random.Random(f"{request_id}/{index}").randrange(1000)


class History:
    def __init__(self, seed):
        self.random = random.Random(seed)
        self.journal = Journal(request_timeout_s=TIMEOUT_S)
        self.now = 0.0
        self.started = 0
        self.lives = 0
        #: incarnation -> wire id -> [request id, next index, budget]
        self.workers = {}
        self.zombies = {}
        self.budgets = {}
        self.delivered = {}
        self.closed = {}
        for _ in range(3):
            self.start_worker()

    def start_worker(self):
        self.lives += 1
        self.workers[f"w{self.lives}"] = {}

    def step(self, event):
        for instruction in self.journal.step(event, self.now):
            self.perform(instruction)
        self.journal.check_invariants()

    def perform(self, instruction):
        match instruction:
            case Send(incarnation=name, message=Submit() as submit):
                request_id = submit.request_id.rpartition(".")[0]
                expected = [reference(request_id, i) for i in range(len(submit.output_ids))]
                assert submit.output_ids == expected
                assert request_id not in self.closed
                work = [request_id, len(submit.output_ids), submit.max_tokens]
                self.workers[name][submit.request_id] = work
            case Send(incarnation=name, message=Cancel(request_id=wire_id)):
                self.workers.get(name, {}).pop(wire_id, None)
            case Deliver(request_id=request_id, token_ids=token_ids):
                assert request_id not in self.closed
                self.delivered[request_id].extend(token_ids)
                so_far = self.delivered[request_id]
                assert so_far == [reference(request_id, i) for i in range(len(so_far))]
            case Closed(entry=entry):
                assert entry.request_id not in self.closed, "closed twice"
                self.closed[entry.request_id] = entry.state

    def act(self):
        self.now += self.random.random()
        action = self.random.choice(
            [self.accept] * 3
            + [self.assign] * 4
            + [self.honest_tokens] * 12
            + [self.lose_tokens, self.repeat_tokens, self.wrong_tokens, self.zombie_tokens]
            + [self.lose_owner, self.client_gone, self.forget, self.tick]
        )
        action()

    def accept(self):
        self.started += 1
        name, budget = f"r{self.started}", self.random.randint(1, 12)
        self.budgets[name], self.delivered[name] = budget, []
        prompt = tuple(range(self.random.randint(1, 5)))
        sampling = Sampling(seed=0, max_tokens=budget)
        self.step(Accepted(request_id=name, prompt_ids=prompt, sampling=sampling))

    def assign(self):
        for entry in self.journal.queued()[:2]:
            name = self.random.choice(sorted(self.workers))
            wire_before = entry.wire_id
            self.step(Assigned(request_id=entry.request_id, incarnation=name))
            if self.random.random() < 0.05:
                self.workers[name].pop(entry.wire_id)
                self.step(SubmitUndelivered(wire_id=entry.wire_id))
                self.step(SubmitUndelivered(wire_id=wire_before))

    def pick(self, workers=None):
        workers = self.workers if workers is None else workers
        busy = [(name, wire_id) for name in workers for wire_id in workers[name]]
        return self.random.choice(busy) if busy else None

    def item(self, wire_id, start, stop, reason=None, corrupt=False):
        request_id = wire_id.rpartition(".")[0]
        ids = [reference(request_id, i) + corrupt for i in range(start, stop)]
        return TokenItem(request_id=wire_id, index=start, token_ids=ids, finish_reason=reason)

    def report(self, name, *items):
        self.step(TokensReceived(incarnation=name, items=items))

    def honest_tokens(self):
        if picked := self.pick():
            name, wire_id = picked
            _, start, budget = self.workers[name][wire_id]
            stop = self.random.randint(start + 1, min(budget, start + 3))
            reason = "length" if stop == budget else None
            if reason is None and self.random.random() < 0.1:
                reason = "stop"
            self.workers[name][wire_id][1] = stop
            if reason is not None:
                del self.workers[name][wire_id]
            self.report(name, self.item(wire_id, start, stop, reason))

    def lose_tokens(self):
        if picked := self.pick():
            name, wire_id = picked
            work = self.workers[name][wire_id]
            if work[1] + 1 < work[2]:
                work[1] += 1

    def repeat_tokens(self):
        if picked := self.pick():
            name, wire_id = picked
            stop = self.workers[name][wire_id][1]
            start = self.random.randint(0, stop)
            self.report(name, self.item(wire_id, start, stop), self.item(wire_id, start, stop))

    def wrong_tokens(self):
        if picked := self.pick():
            name, wire_id = picked
            stop = self.workers[name][wire_id][1]
            request_id = wire_id.rpartition(".")[0]
            # Only tokens that the journal already has can be seen to be wrong.
            if 0 < stop <= len(self.delivered[request_id]):
                self.report(name, self.item(wire_id, 0, stop, corrupt=True))
                assert wire_id not in self.workers[name]

    def zombie_tokens(self):
        if picked := self.pick(self.zombies):
            name, wire_id = picked
            start = self.zombies[name][wire_id][1]
            self.report(name, self.item(wire_id, start, start + 2, "stop"))

    def lose_owner(self):
        name = self.random.choice(sorted(self.workers))
        self.zombies[name] = self.workers.pop(name)
        self.start_worker()
        self.step(OwnersLost(incarnations=frozenset({name})))

    def client_gone(self):
        if self.delivered and self.random.random() < 0.5:
            request_id = self.random.choice(sorted(self.delivered))
            state = self.random.choice([RequestState.CANCELLED, RequestState.FINISHED])
            self.step(StreamClosed(request_id=request_id, state=state))

    def forget(self):
        name = self.random.choice(sorted(self.workers))
        if not self.workers[name]:
            self.step(OwnerIdle(incarnation=name))

    def tick(self):
        self.step(Tick())

    def settle(self):
        """No more faults: everything that is open comes to its end."""
        for _ in range(10_000):
            if not len(self.journal):
                return
            self.now += 0.01
            self.assign()
            self.honest_tokens()
            self.forget()
            if not self.pick():
                self.now += 5.0
        raise AssertionError("requests are stuck")


@pytest.mark.parametrize("seed", [secrets.randbits(32) for _ in range(12)])
def test_no_history_loses_repeats_or_changes_a_token(seed):
    history = History(seed)
    for _ in range(STEPS):
        history.act()
    history.settle()
    counts = history.journal.counts
    assert set(history.closed) == set(history.delivered)
    assert counts["accepted"] == history.started
    assert counts["accepted"] == counts["finished"] + counts["cancelled"] + counts["failed"]
    assert not history.journal.outstanding_tokens()
    for work in history.workers.values():
        assert not work, "a worker is left with work that nobody wants"
