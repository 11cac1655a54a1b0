"""The loop of one rank without a group: messages in, tokens out, passes that come to nothing."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest
import torch

from dispatch import PassFailed
from moe_runtime.messages import Cancel, Drain, Load, Stop, Submit, Tokens
from moe_runtime.pages import PagePool
from moe_runtime.rank_loop import RankLoop
from moe_runtime.scheduler import Scheduler
from transfer import Interrupted

VOCABULARY, PAGE_TOKENS, NUM_PAGES, EOS = 50, 4, 16, 49


def next_token(token_ids, position):
    """Of the last token and its place alone, and never the end of sequence."""
    return (7 * int(token_ids) + 3 * int(position) + 1) % EOS


def continuation(prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens[-1], len(tokens) - 1))
    return tokens[len(prompt) :]


class Model:
    """Puts all weight on `next_token`. What `faults` holds is raised, one for each pass."""

    def __init__(self):
        self.faults = deque()
        self.poison = None
        self.batches = []

    def forward(self, batch, kv, dispatcher):
        self.batches.append(batch)
        if self.faults and (fault := self.faults.popleft()) is not None:
            raise fault
        logits = torch.zeros(len(batch.logit_rows), VOCABULARY)
        for row, at in zip(logits, batch.logit_rows.tolist(), strict=True):
            token, position = batch.token_ids[at], batch.positions[at]
            row[next_token(token, position)] = 9.0
            if (int(token), int(position)) == self.poison:
                row[3] = torch.nan
        return logits


class Coordinator:
    """A group of one that can be told of failures."""

    last_change = None

    def __init__(self):
        self.reports, self.left = [], False
        self.following = frozenset("a")  # who is in the view after a report

    def poll(self):
        return None

    def report(self, suspects, evidence):
        self.reports.append((suspects, evidence))
        return SimpleNamespace(epoch=7, incarnations=self.following)

    def leave(self):
        self.left = True


class Link:
    """Collects what is sent; what is received is put in by the test."""

    def __init__(self):
        self.incoming, self.sent = deque(), []

    def received(self):
        found = list(self.incoming)
        self.incoming.clear()
        return found

    def send(self, message):
        self.sent.append(message)


class Engine:
    """When the loop has nothing to do it waits here, which ends the test's run."""

    def __init__(self):
        self.on_idle = lambda: None
        self.wakes = 0

    def wait_any(self, keys, *, timeout_s):
        assert timeout_s == 0.5
        self.on_idle()
        return False

    def wake(self):
        self.wakes += 1


class Loop:
    """A rank loop and all it touches."""

    def __init__(self, **scheduling):
        self.model, self.coordinator = Model(), Coordinator()
        self.link, self.engine = Link(), Engine()
        self.pool = PagePool(NUM_PAGES)
        options = {"token_budget": 16, "max_running": 8} | scheduling
        self.scheduler = Scheduler(
            self.pool,
            page_tokens=PAGE_TOKENS,
            block_key=lambda parent, ids: repr((parent, list(ids))).encode(),
            fetch_from_pool=False,
            **options,
        )
        self.loop = RankLoop(
            incarnation="ab",
            view=SimpleNamespace(epoch=3, incarnations=frozenset("ab")),
            engine=self.engine,
            coordinator=self.coordinator,
            dispatcher=SimpleNamespace(
                begin_pass=lambda: None, end_pass=lambda: None, pass_started_by_peer=list
            ),
            model=self.model,
            kv=SimpleNamespace(page_tokens=PAGE_TOKENS),
            pool=self.pool,
            scheduler=self.scheduler,
            blocks=None,
            link=self.link,
            eos_token_ids=(EOS,),
            idle_interval_s=0.5,
        )

    def run(self, *messages):
        """Take these messages and run until there is nothing to do."""
        self.link.incoming.extend(messages)
        self.engine.on_idle = self.loop.request_stop
        self.loop.run()
        self.pool.check_conservation()

    def items(self, request_id):
        every = [item for m in self.link.sent if isinstance(m, Tokens) for item in m.items]
        return [item for item in every if item.request_id == request_id]

    def tokens(self, request_id):
        return [token for item in self.items(request_id) for token in item.token_ids]


def submit(name, prompt, max_tokens, *, output=(), **options):
    plain = {
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "seed": 0,
        "stop_token_ids": [],
        "ignore_eos": False,
        "min_tokens": 0,
    }
    return Submit(
        request_id=name,
        prompt_ids=list(prompt),
        output_ids=list(output),
        max_tokens=max_tokens,
        **(plain | options),
    )


def test_tokens_of_several_requests():
    rank = Loop()
    prompts = {"a": [1, 2, 3], "b": [9] * 21, "c": [30]}
    rank.run(*(submit(name, prompt, 6) for name, prompt in prompts.items()))
    for name, prompt in prompts.items():
        assert rank.tokens(name) == continuation(prompt, 6)
        items = rank.items(name)
        assert [item.index for item in items] == list(range(6))
        assert [item.finish_reason for item in items] == [None] * 5 + ["length"]
    assert rank.pool.num_available == NUM_PAGES
    assert max(batch.num_tokens for batch in rank.model.batches) <= 16


def test_a_continuation_goes_on_where_the_other_worker_ended():
    rank, prompt = Loop(), [4, 5, 6]
    whole = continuation(prompt, 8)
    rank.run(submit("a", prompt, 8, output=whole[:5]))
    assert rank.tokens("a") == whole[5:]
    assert [item.index for item in rank.items("a")] == [5, 6, 7]


def test_a_stop_token_ends_a_request():
    rank, prompt = Loop(), [4, 5, 6]
    whole = continuation(prompt, 8)
    rank.run(submit("a", prompt, 8, stop_token_ids=[whole[3]]))
    assert rank.tokens("a") == whole[: whole.index(whole[3]) + 1]
    assert rank.items("a")[-1].finish_reason == "stop"


def lost():
    return PassFailed(
        epoch=3, pass_id=0, layer=1, phase="combine", suspects=(2,), evidence="it is gone"
    )


@pytest.mark.parametrize("faults", [[lost], [lambda: Interrupted("view")], [lost, lost, lost]])
def test_a_pass_that_fails_has_no_effect(faults):
    rank, prompts = Loop(), {"a": [1, 2, 3], "b": [8] * 30}
    for fault in faults:
        rank.model.faults.extend([None, fault()])
    rank.run(*(submit(name, prompt, 6) for name, prompt in prompts.items()))
    for name, prompt in prompts.items():
        assert rank.tokens(name) == continuation(prompt, 6)
    failures = [fault for fault in faults if fault is lost]
    assert rank.coordinator.reports == [((2,), "it is gone")] * len(failures)
    if failures:
        loads = [m for m in rank.link.sent if isinstance(m, Load)]
        assert [load.epoch for load in loads][:2] == [3, 7], "told at once of the new view"


@pytest.mark.parametrize(
    ("following", "level"), [("a", "WARNING"), ("ab", "INFO"), ("abc", "INFO")]
)
def test_a_pass_that_a_planned_change_ends_is_nothing_to_warn_of(caplog, following, level):
    rank = Loop()
    rank.coordinator.following = frozenset(following)
    rank.model.faults.extend([None, lost()])
    with caplog.at_level("INFO", logger="moe_runtime.rank_loop"):
        rank.run(submit("a", [1, 2, 3], 6))
    assert rank.tokens("a") == continuation([1, 2, 3], 6)
    found = [r.levelname for r in caplog.records if "pass given up" in r.getMessage()]
    assert found == [level]


def test_logits_without_a_distribution_end_one_request_only():
    rank = Loop()
    rank.model.poison = (33, 9)
    rank.run(submit("good", [1, 2, 3], 6), submit("bad", [5] * 9 + [33], 6), submit("too", [7], 6))
    assert rank.tokens("good") == continuation([1, 2, 3], 6)
    assert rank.tokens("too") == continuation([7], 6)
    (item,) = rank.items("bad")
    assert (item.index, item.token_ids, item.finish_reason) == (0, [], "error")
    assert "NaN" in item.error
    assert rank.pool.num_available == NUM_PAGES


def test_cancel_and_unknown_ids():
    rank = Loop(max_running=1)
    rank.link.incoming.append(Cancel(request_id="nobody"))
    rank.run(
        submit("a", [1, 2], 5),
        submit("b", [3, 4], 5),
        Cancel(request_id="b"),
        submit("c", [5, 6], 5),
    )
    assert rank.tokens("a") == continuation([1, 2], 5)
    assert rank.tokens("c") == continuation([5, 6], 5)
    assert rank.items("b") == []
    assert rank.pool.num_available == NUM_PAGES


def test_drain_leaves_and_stop_ends():
    rank = Loop()
    rank.link.incoming.append(Drain())
    rank.loop.run()
    assert rank.coordinator.left
    rank = Loop()
    rank.link.incoming.append(Stop())
    rank.loop.run()
    assert rank.engine.wakes == 1, "it does not sleep on"
    assert not rank.coordinator.left


def test_what_is_reported():
    rank = Loop(max_running=2)
    rank.run(*(submit(name, [1, 2, 3, 4, 5], 3) for name in "abc"))
    first = next(m for m in rank.link.sent if isinstance(m, Load))
    assert (first.incarnation, first.epoch, first.num_pages) == ("ab", 3, NUM_PAGES)
    assert (first.running, first.waiting, first.free_pages) == (0, 3, NUM_PAGES)
    assert first.counters["preemptions"] == 0.0
