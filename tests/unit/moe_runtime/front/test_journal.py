from __future__ import annotations

import pytest

from moe_runtime.front.errors import GenerationFailed, GenerationTimeout, TokenGap, TokenMismatch
from moe_runtime.front.journal import FRUITLESS_ATTEMPTS_MAX, IDLE_GRACE_S, Journal, expected_tokens
from moe_runtime.front.journal_records import (
    Accepted,
    Assigned,
    Closed,
    Deliver,
    OwnerIdle,
    OwnersLost,
    RequestState,
    Requeued,
    Sampling,
    Send,
    StreamClosed,
    SubmitUndelivered,
    Tick,
    TokensReceived,
)
from moe_runtime.messages import Cancel, Submit, TokenItem


class Bench:
    """A journal with one clock; every step is followed by a look at the invariants."""

    def __init__(self, timeout_s=60.0):
        self.journal = Journal(request_timeout_s=timeout_s)
        self.now = 100.0

    def step(self, event):
        instructions = self.journal.step(event, self.now)
        self.journal.check_invariants()
        return instructions

    def accept(self, name="r", max_tokens=10):
        sampling = Sampling(seed=1, max_tokens=max_tokens)
        assert self.step(Accepted(request_id=name, prompt_ids=(1, 2, 3), sampling=sampling)) == []

    def assign(self, worker, name="r"):
        (send,) = self.step(Assigned(request_id=name, incarnation=worker))
        assert isinstance(send, Send)
        assert send.incarnation == worker
        assert isinstance(send.message, Submit)
        return send.message

    def tokens(self, worker, wire_id, index, ids, reason=None, error=None, cached=0):
        item = TokenItem(
            request_id=wire_id,
            index=index,
            token_ids=list(ids),
            finish_reason=reason,
            error=error,
            cached_tokens=cached,
        )
        return self.step(TokensReceived(incarnation=worker, items=(item,)))


def delivered(instructions):
    return [t for i in instructions if isinstance(i, Deliver) for t in i.token_ids]


def kinds(instructions):
    return [type(i).__name__ for i in instructions]


@pytest.fixture
def bench():
    return Bench()


def test_a_request_from_acceptance_to_its_end(bench):
    bench.accept()
    assert [e.request_id for e in bench.journal.queued()] == ["r"]
    submit = bench.assign("a")
    assert (submit.prompt_ids, submit.output_ids, submit.max_tokens) == ([1, 2, 3], [], 10)
    assert delivered(bench.tokens("a", submit.request_id, 0, [7, 8], cached=2)) == [7, 8]
    deliver, closed = bench.tokens("a", submit.request_id, 2, [9], "stop")
    assert deliver == Deliver(request_id="r", token_ids=(9,), finish_reason="stop")
    assert closed.entry.state is RequestState.FINISHED
    assert closed.entry.cached_tokens == 2
    assert len(bench.journal) == 0


def test_the_next_owner_gets_prompt_and_tokens_so_far(bench):
    bench.accept()
    first = bench.assign("a")
    bench.tokens("a", first.request_id, 0, [7, 8])
    (requeued,) = bench.step(OwnersLost(incarnations=frozenset({"a", "z"})))
    assert requeued == Requeued(request_id="r", cause=None)
    second = bench.assign("b")
    assert second.output_ids == [7, 8]
    assert second.request_id != first.request_id
    assert delivered(bench.tokens("b", second.request_id, 2, [9])) == [9]


def test_losing_somebody_else_changes_nothing(bench):
    bench.accept()
    bench.assign("a")
    assert bench.step(OwnersLost(incarnations=frozenset({"b"}))) == []
    assert bench.journal.owned() == {"a": 1}


def test_a_former_owner_and_a_former_attempt_are_not_heard(bench):
    bench.accept()
    first = bench.assign("a")
    bench.step(OwnersLost(incarnations=frozenset({"a"})))
    second = bench.assign("b")
    assert bench.tokens("a", first.request_id, 0, [7]) == []
    assert bench.tokens("b", first.request_id, 0, [7]) == []
    assert bench.tokens("a", second.request_id, 0, [7]) == []
    assert bench.tokens("b", "nobody.1", 0, [7]) == []
    assert bench.journal.counts["stray_items"] == 4
    assert delivered(bench.tokens("b", second.request_id, 0, [7])) == [7]


def test_equal_overlap_is_delivered_once(bench):
    bench.accept()
    wire_id = bench.assign("a").request_id
    bench.tokens("a", wire_id, 0, [7, 8])
    assert bench.tokens("a", wire_id, 0, [7, 8]) == []
    assert delivered(bench.tokens("a", wire_id, 1, [8, 9])) == [9]


def test_a_gap_cancels_and_submits_again(bench):
    bench.accept()
    wire_id = bench.assign("a").request_id
    bench.tokens("a", wire_id, 0, [7])
    cancel, requeued = bench.tokens("a", wire_id, 2, [9])
    assert cancel == Send(incarnation="a", message=Cancel(request_id=wire_id))
    assert isinstance(requeued.cause, TokenGap)
    assert requeued.cause.fields == {"request_id": "r", "expected_index": 1, "index": 2}
    assert requeued.cause.retryable
    again = bench.assign("a")
    assert again.output_ids == [7]
    # What the first attempt has under way cannot cause another gap.
    assert bench.tokens("a", wire_id, 3, [10]) == []
    assert delivered(bench.tokens("a", again.request_id, 1, [8])) == [8]


@pytest.mark.parametrize(
    ("index", "ids", "reason"), [(0, [7, 99], None), (1, [99, 9], None), (0, [7], "stop")]
)
def test_a_difference_is_a_typed_error_and_submits_again(bench, index, ids, reason):
    bench.accept()
    wire_id = bench.assign("a").request_id
    bench.tokens("a", wire_id, 0, [7, 8])
    cancel, requeued = bench.tokens("a", wire_id, index, ids, reason)
    assert cancel.message == Cancel(request_id=wire_id)
    assert isinstance(requeued.cause, TokenMismatch)
    assert bench.assign("b").output_ids == [7, 8]
    assert bench.journal.counts["token_mismatches"] == 1


def test_the_budget_ends_a_request_even_if_its_owner_does_not(bench):
    bench.accept(max_tokens=2)
    wire_id = bench.assign("a").request_id
    instructions = bench.tokens("a", wire_id, 0, [7, 8, 9])
    assert kinds(instructions) == ["Deliver", "Send", "Closed"]
    assert instructions[0] == Deliver(request_id="r", token_ids=(7, 8), finish_reason="length")


def test_a_client_that_is_gone_frees_the_worker(bench):
    bench.accept()
    wire_id = bench.assign("a").request_id
    send, closed = bench.step(StreamClosed(request_id="r"))
    assert send == Send(incarnation="a", message=Cancel(request_id=wire_id))
    assert closed.entry.state is RequestState.CANCELLED
    assert bench.step(StreamClosed(request_id="r")) == []
    assert bench.tokens("a", wire_id, 0, [7]) == []


def test_a_client_that_leaves_the_queue_needs_no_cancel(bench):
    bench.accept()
    assert kinds(bench.step(StreamClosed(request_id="r"))) == ["Closed"]


def test_an_error_of_the_worker_fails_the_request(bench):
    bench.accept()
    wire_id = bench.assign("a").request_id
    (closed,) = bench.tokens("a", wire_id, 0, [], "error", error="no pages")
    assert isinstance(closed.error, GenerationFailed)
    assert "no pages" in str(closed.error)


def test_the_deadline_counts_from_the_last_token(bench):
    bench.accept()
    wire_id = bench.assign("a").request_id
    bench.now += 50
    bench.tokens("a", wire_id, 0, [7])
    bench.now += 50
    assert bench.step(Tick()) == []
    bench.now += 11
    send, closed = bench.step(Tick())
    assert send.message == Cancel(request_id=wire_id)
    assert isinstance(closed.error, GenerationTimeout)
    assert closed.error.fields == {"waited_s": 61.0, "num_generated": 1}


def test_a_request_without_any_worker_waits_to_its_deadline(bench):
    bench.accept()
    bench.now += 59
    assert bench.step(Tick()) == []
    bench.now += 2
    assert kinds(bench.step(Tick())) == ["Closed"]


def test_a_request_that_takes_every_owner_down_is_given_up(bench):
    bench.accept()
    for number in range(FRUITLESS_ATTEMPTS_MAX):
        bench.assign(f"w{number}")
        instructions = bench.step(OwnersLost(incarnations=frozenset({f"w{number}"})))
    (closed,) = instructions
    assert isinstance(closed, Closed)
    assert isinstance(closed.error, GenerationFailed)


def test_progress_forgives_lost_owners(bench):
    bench.accept(max_tokens=100)
    for number in range(3 * FRUITLESS_ATTEMPTS_MAX):
        wire_id = bench.assign(f"w{number}").request_id
        bench.tokens(f"w{number}", wire_id, number, [number])
        instructions = bench.step(OwnersLost(incarnations=frozenset({f"w{number}"})))
        assert kinds(instructions) == ["Requeued"]


def test_an_idle_owner_has_lost_what_it_was_given_long_ago(bench):
    bench.accept()
    bench.assign("a")
    assert bench.step(OwnerIdle(incarnation="a")) == []
    bench.now += IDLE_GRACE_S + 1
    assert bench.step(OwnerIdle(incarnation="b")) == []
    assert kinds(bench.step(OwnerIdle(incarnation="a"))) == ["Requeued"]


def test_an_undelivered_submit_is_queued_again_unless_it_is_old(bench):
    bench.accept()
    first = bench.assign("a")
    assert kinds(bench.step(SubmitUndelivered(wire_id=first.request_id))) == ["Requeued"]
    bench.assign("b")
    assert bench.step(SubmitUndelivered(wire_id=first.request_id)) == []


def test_queue_keeps_the_order_of_acceptance_over_owner_losses(bench):
    for name in ("r1", "r2", "r3"):
        bench.accept(name)
    for name in ("r1", "r2", "r3"):
        bench.assign("a" if name != "r2" else "b", name)
    bench.accept("r4")
    bench.step(OwnersLost(incarnations=frozenset({"a"})))
    assert [e.request_id for e in bench.journal.queued()] == ["r1", "r3", "r4"]


def test_outstanding_tokens_count_prefill_until_the_first_token(bench):
    bench.accept(max_tokens=10)
    wire_id = bench.assign("a").request_id
    assert bench.journal.outstanding_tokens() == {"a": 13}
    bench.tokens("a", wire_id, 0, [7, 8])
    assert bench.journal.outstanding_tokens() == {"a": 8}
    bench.step(OwnersLost(incarnations=frozenset({"a"})))
    assert not bench.journal.outstanding_tokens()
    (entry,) = bench.journal.queued()
    assert expected_tokens(entry) == 3 + 2 + 8
