"""Epochs, offers and interruptions of the transfer dispatcher, with real engines in threads."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch

from configs.schema import MissingExperts
from dispatch import (
    CallOrder,
    ExpertMap,
    InputInvalid,
    LayoutMismatch,
    MessageMismatch,
    PassFailed,
    StaleEpoch,
    TransferDispatcher,
)
from tests.support.dispatch_pair import EVEN, LAYOUT, NAMES, both, install, pair, prepared
from tests.support.moe_reference import draw_tokens, reference, run_layer
from transfer import Interrupted


def checked_pass(dispatcher: TransferDispatcher, num_tokens: int) -> bool:
    dispatcher.begin_pass()
    for layer in range(2):
        x, ids, weights = draw_tokens(LAYOUT, num_tokens, torch.Generator())
        out = run_layer(dispatcher, x, ids, weights, layer)
        assert torch.equal(out, reference(x, ids, weights, layer))
    dispatcher.end_pass()
    return True


def run_both(dispatchers) -> None:
    outcomes = both(*(lambda d=d, t=t: checked_pass(d, t) for t, d in enumerate(dispatchers)))
    assert outcomes == (True, True), outcomes


def test_epoch_after_epoch_in_every_state():
    with pair() as dispatchers:
        with pytest.raises(CallOrder):
            dispatchers[0].begin_pass()
        with pytest.raises(CallOrder):
            dispatchers[0].install({})
        assert dispatchers[0].pass_started_by_peer() == []
        prepared(dispatchers, 3)  # prepared, never installed
        with pytest.raises(CallOrder):
            dispatchers[0].begin_pass()
        install(dispatchers, 4)
        assert [d.epoch for d in dispatchers] == [4, 4]
        run_both(dispatchers)
        dispatchers[0].begin_pass()  # left in the middle of a pass
        install(dispatchers, 9)
        run_both(dispatchers)
        assert dispatchers[0].statistics().passes == 2


def test_an_epoch_that_is_not_newer_is_refused_and_changes_nothing():
    with pair() as dispatchers:
        install(dispatchers, 4)
        for epoch in (4, 3):
            with pytest.raises(InputInvalid, match="epoch"):
                prepared(dispatchers, epoch)
        other_map = ExpertMap.even(num_layers=2, num_logical=6, ranks=[0, 1])
        for options in ({"expert_map": other_map}, {"rank": 7}):
            fields = {"epoch": 5, "rank": 0, "members": NAMES, "expert_map": EVEN, **options}
            with pytest.raises(InputInvalid):
                dispatchers[0].prepare(**fields)
        run_both(dispatchers)


def test_offers_of_another_epoch_or_layout_are_refused():
    narrow = dataclasses.replace(LAYOUT, max_tokens=5)
    with pair(layouts=(LAYOUT, narrow)) as dispatchers:
        old = prepared(dispatchers, 1)
        new = prepared(dispatchers, 2)
        with pytest.raises(StaleEpoch):
            dispatchers[0].install({1: old[1][0]})
        with pytest.raises(LayoutMismatch) as caught:
            dispatchers[0].install({1: new[1][0]})
        assert (caught.value.name, caught.value.observed, caught.value.expected) == (
            "max_tokens",
            5,
            6,
        )
        for offers in ({}, {1: b"short"}):
            with pytest.raises(LayoutMismatch):
                dispatchers[0].install(offers)
        with pytest.raises(CallOrder):
            dispatchers[0].begin_pass()


def test_an_interrupt_passes_through_and_ends_the_pass():
    with pair() as (first, second):
        install((first, second), 1)
        first.begin_pass()
        timer = threading.Timer(0.1, first._engine.interrupt, ["abort of epoch 1"])
        timer.start()
        with pytest.raises(Interrupted):
            first.dispatch(*draw_tokens(LAYOUT, 1, torch.Generator()), layer=0)
        timer.join()
        first._engine.resume()
        with pytest.raises(CallOrder):
            first.begin_pass()
        install((first, second), 2)
        run_both((first, second))


def test_silence_is_named():
    with pair(timeout_s=6.0) as (first, second):
        install((first, second), 1)
        first.begin_pass()
        with pytest.raises(PassFailed) as caught:
            first.dispatch(*draw_tokens(LAYOUT, 1, torch.Generator()), layer=0)
        assert caught.value.suspects == (1,)
        install((first, second), 2)
        run_both((first, second))


def test_a_rank_that_has_left_the_epoch_is_not_accused():
    with pair() as (first, second):
        install((first, second), 1)
        second.prepare(epoch=2, rank=1, members=NAMES, expert_map=EVEN)
        first.begin_pass()
        with pytest.raises(PassFailed) as caught:
            first.dispatch(*draw_tokens(LAYOUT, 1, torch.Generator()), layer=0)
        assert caught.value.suspects == ()
        assert "RegionUnknown" in caught.value.evidence
        install((first, second), 3)
        run_both((first, second))


def test_ranks_in_different_layers_find_out():
    with pair() as dispatchers:
        install(dispatchers, 1)

        def start(rank: int) -> None:
            dispatchers[rank].begin_pass()
            dispatchers[rank].dispatch(*draw_tokens(LAYOUT, 1, torch.Generator()), layer=rank)

        outcomes = both(lambda: start(0), lambda: start(1))
        assert all(isinstance(outcome, MessageMismatch) for outcome in outcomes), outcomes
        assert outcomes[0].name == "layer"
        with pytest.raises(CallOrder):
            dispatchers[0].begin_pass()


def test_experts_of_absent_ranks_are_left_out_under_degrade():
    with pair() as dispatchers:
        beyond = ExpertMap.even(num_layers=2, num_logical=5, ranks=[0, 1, 8])
        offers = [
            dispatcher.prepare(
                epoch=1,
                rank=rank,
                members=NAMES,
                expert_map=beyond,
                missing_experts=MissingExperts.DEGRADE,
            )
            for rank, dispatcher in enumerate(dispatchers)
        ]
        for rank, dispatcher in enumerate(dispatchers):
            dispatcher.install({1 - rank: offers[1 - rank][rank]})
        (lost,) = {e for e in range(5) if beyond.owners(0, e) == (8,)}
        ids = torch.tensor([[lost, 0], [0, 1]])

        def run(dispatcher: TransferDispatcher) -> torch.Tensor:
            dispatcher.begin_pass()
            x, weights = torch.ones(2, 24).bfloat16(), torch.full((2, 2), 0.5)
            return run_layer(dispatcher, x, ids, weights, 0)

        outs = both(*(lambda d=d: run(d) for d in dispatchers))
        want = reference(torch.ones(1, 24).bfloat16(), torch.tensor([[0]]), torch.ones(1, 1), 0)
        for out in outs:
            assert torch.equal(out[:1], want), "the other choice has the whole weight"
        assert dispatchers[0].statistics().degraded_choices == 1


def test_nothing_is_left_offered_after_close():
    with pair() as dispatchers:
        install(dispatchers, 1)
        install(dispatchers, 2)
        engines = [dispatcher._engine for dispatcher in dispatchers]
        assert [engine.statistics().offers for engine in engines] == [1, 1]
        for dispatcher in dispatchers:
            dispatcher.close()
        assert [engine.statistics().offers for engine in engines] == [0, 0]
