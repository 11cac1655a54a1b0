from __future__ import annotations

import asyncio

import pytest

from moe_runtime.front.detokenizer import Detokenizer
from moe_runtime.front.errors import InvalidRequest, TooManyRequests, Unavailable
from moe_runtime.front.generation import Answer, Generation
from moe_runtime.front.journal_records import Sampling
from moe_runtime.front.metrics import Metrics
from moe_runtime.front.relay import SILENCE_S_MAX, STALL_S_MAX, Relay
from moe_runtime.front.stop_strings import StopStrings
from moe_runtime.messages import (
    Cancel,
    Goodbye,
    Hello,
    Load,
    Submit,
    TokenItem,
    Tokens,
    ViewCommitted,
)


class Letters:
    def decode(self, token_ids):
        return "".join(chr(97 + token_id) for token_id in token_ids)


class Bench:
    """A relay with a hand-set clock; `sent` is what went to workers."""

    def __init__(self):
        self.now = 0.0
        self.sent = []
        self.views = []
        self.metrics = Metrics("tiny")
        self.relay = Relay(
            max_open_requests=2,
            request_timeout_s=600.0,
            send=lambda name, message: self.sent.append((name, message)),
            on_view=self.views.append,
            metrics=self.metrics,
            clock=lambda: self.now,
        )
        self.answer = Answer(close_generation=self.relay.close)

    def hello(self, name):
        self.relay.receive(
            Hello(incarnation=name, rank=0, epoch=0, max_context_tokens=64, kv_pages=4)
        )

    def view(self, epoch, *names):
        self.relay.receive(
            ViewCommitted(incarnation="x", view=b"", members=list(names), epoch=epoch)
        )

    def load(self, name, running=0, **counters):
        self.relay.receive(
            Load(
                incarnation=name,
                running=running,
                waiting=0,
                free_pages=1,
                num_pages=4,
                epoch=1,
                counters=counters,
            )
        )

    def open(self, name="r-0-0", stops=()):
        generation = Generation(
            request_id=name,
            choice=len(self.answer.generations),
            prompt_tokens=2,
            detokenizer=Detokenizer(Letters()),
            stop_strings=StopStrings(stops),
            min_tokens=0,
            queue=self.answer.queue,
        )
        self.answer.generations.append(generation)
        self.relay.open(generation, [1, 2], Sampling(seed=0, max_tokens=10))

    def tokens(self, name, *items):
        self.relay.receive(Tokens(incarnation=name, items=list(items)))

    def submits(self):
        return [(name, m) for name, m in self.sent if isinstance(m, Submit)]

    def cancels(self):
        return [(name, m.request_id) for name, m in self.sent if isinstance(m, Cancel)]


@pytest.fixture
def bench():
    return Bench()


def item(request_id, index, *token_ids, reason=None):
    return TokenItem(
        request_id=request_id, index=index, token_ids=list(token_ids), finish_reason=reason
    )


def test_queued_requests_go_out_when_a_worker_comes(bench):
    bench.open("r-0-0")
    bench.open("r-0-1")
    assert not bench.sent
    bench.hello("a")
    assert not bench.sent
    bench.view(1, "a")
    assert [(name, m.request_id) for name, m in bench.submits()] == [
        ("a", "r-0-0.1"),
        ("a", "r-0-1.1"),
    ]
    assert len(bench.views) == 1


def test_admission(bench):
    bench.relay.check_admission(2)
    with pytest.raises(InvalidRequest):
        bench.relay.check_admission(3)
    bench.open()
    with pytest.raises(TooManyRequests):
        bench.relay.check_admission(2)
    bench.relay.draining = True
    with pytest.raises(Unavailable):
        bench.relay.check_admission(1)


@pytest.mark.parametrize("last", [None, "length"])
def test_tokens_after_a_stop_string_in_the_same_message(bench, last):
    bench.hello("a")
    bench.view(1, "a")
    bench.open(stops=["cd"])
    wire_id = "r-0-0.1"
    bench.tokens(
        "a", item(wire_id, 0, 0, 1, 2), item(wire_id, 3, 3, 4), item(wire_id, 5, 5, reason=last)
    )
    assert len(bench.relay.journal) == 0
    bench.relay.journal.check_invariants()
    # A request that the worker itself has ended needs no cancel.
    assert bench.cancels() == ([("a", wire_id)] if last is None else [])

    async def read():
        return [piece async for piece in bench.answer.pieces()]

    pieces = asyncio.run(read())
    assert "".join(piece.text for piece in pieces) == "ab"
    assert pieces[-1].finish_reason == "stop"
    assert bench.answer.usage().completion_tokens == 4


def test_work_lost_on_the_way_is_sent_again(bench):
    bench.hello("a")
    bench.view(1, "a")
    bench.open()
    bench.load("a")
    assert len(bench.submits()) == 1
    bench.now += 10
    bench.load("a", running=1)
    assert len(bench.submits()) == 1
    bench.load("a")
    assert [m.request_id for _, m in bench.submits()] == ["r-0-0.1", "r-0-0.2"]


def test_an_undelivered_submit_waits_for_a_worker_that_is_heard(bench):
    bench.hello("a")
    bench.view(1, "a")
    bench.open()
    bench.relay.undelivered("a", bench.submits()[0][1])
    assert len(bench.submits()) == 1
    bench.load("a")
    assert [m.request_id for _, m in bench.submits()] == ["r-0-0.1", "r-0-0.2"]


def test_reasons_for_ill_health(bench):
    assert "no view" in bench.relay.unhealthy_reason()
    bench.view(1, "a")
    assert "no worker" in bench.relay.unhealthy_reason()
    bench.hello("a")
    assert bench.relay.unhealthy_reason() is None
    bench.now += SILENCE_S_MAX + 1
    assert "reported" in bench.relay.unhealthy_reason()
    bench.load("a")
    assert bench.relay.unhealthy_reason() is None
    bench.open()
    bench.now += STALL_S_MAX + 1
    bench.load("a", running=1)
    assert "no token has come" in bench.relay.unhealthy_reason()
    # One that waits long behind others is no reason.
    bench.open("r-0-1")
    bench.tokens("a", item("r-0-1.1", 0, 0))
    assert bench.relay.unhealthy_reason() is None
    bench.relay.receive(Goodbye(incarnation="a"))
    assert "no worker" in bench.relay.unhealthy_reason()
    bench.relay.draining = True
    assert "shutting down" in bench.relay.unhealthy_reason()


def test_worker_counters_add_up_over_lives(bench):
    bench.hello("a")
    bench.hello("b")
    bench.view(1, "a", "b")
    bench.load("a", passes=5.0)
    bench.load("a", passes=7.0)
    bench.load("b", passes=1.0)
    bench.view(2, "b")
    bench.load("a", passes=9.0)
    assert bench.metrics.worker_totals == {"passes": 8.0}


@pytest.mark.parametrize(("reason", "text"), [("stop", "ab"), ("length", "abc")])
def test_only_a_stop_token_has_no_text(bench, reason, text):
    bench.hello("a")
    bench.view(1, "a")
    bench.open()
    bench.tokens("a", item("r-0-0.1", 0, 0, 1, 2, reason=reason))
    piece = bench.answer.queue.get_nowait()
    assert (piece.text, piece.token_ids, piece.finish_reason) == (text, (0, 1, 2), reason)
