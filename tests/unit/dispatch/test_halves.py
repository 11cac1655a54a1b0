"""Sending and receiving on their own, and two exchanges in flight."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch

from dispatch import (
    CallOrder,
    DispatchLayout,
    InputInvalid,
    LocalDispatcher,
    PassFailed,
    StaleEpoch,
)
from tests.support.dispatch_pair import LAYOUT, both, install, pair
from tests.support.moe_reference import draw_tokens, reference, run_experts

TWO = dataclasses.replace(LAYOUT, microbatches=2)


def started(layout: DispatchLayout = TWO) -> LocalDispatcher:
    dispatcher = LocalDispatcher(layout=layout)
    dispatcher.begin_pass()
    return dispatcher


def experts(arrived, layer):
    return run_experts(arrived.rows, arrived.counts, arrived.experts, layer)


def two_in_flight(dispatcher, seed: int, *, swapped: bool) -> bool:
    """Both microbatches through both layers; the receives in either order."""
    generator = torch.Generator().manual_seed(seed)
    dispatcher.begin_pass()
    order = (1, 0) if swapped else (0, 1)
    for layer in (0, 1):
        tokens = [draw_tokens(TWO, n, generator) for n in (seed % 7, 6)]
        sent = [
            dispatcher.dispatch_send(*mine, layer=layer, microbatch=m)
            for m, mine in enumerate(tokens)
        ]
        returning = {}
        for m in order:
            arrived, handle = dispatcher.dispatch_recv(sent[m])
            returning[m] = dispatcher.combine_send(experts(arrived, layer), handle)
        for m in order:
            out = dispatcher.combine_recv(returning[m])
            assert torch.equal(out, reference(*tokens[m], layer))
    dispatcher.end_pass()
    return True


def test_two_microbatches_keep_their_bits_whatever_is_received_first(seed):
    with pair(layouts=(TWO, TWO)) as (first, second):
        install((first, second), 1)
        for number in range(4):
            outcomes = both(
                lambda n=number: two_in_flight(first, seed + n, swapped=False),
                lambda n=number: two_in_flight(second, seed ^ n, swapped=n % 2 == 1),
            )
            assert outcomes == (True, True), outcomes


def test_work_between_the_halves_meets_messages_that_are_here(seed):
    with pair() as dispatchers:
        install(dispatchers, 1)

        def run(rank: int) -> bool:
            dispatcher, generator = dispatchers[rank], torch.Generator().manual_seed(seed + rank)
            tokens = draw_tokens(LAYOUT, 5, generator)
            dispatcher.begin_pass()
            outgoing = dispatcher.dispatch_send(*tokens, layer=0)
            shared = tokens[0] * 2  # what a shared expert would do meanwhile
            arrived, handle = dispatcher.dispatch_recv(outgoing)
            returning = dispatcher.combine_send(experts(arrived, 0), handle)
            out = dispatcher.combine_recv(returning) + shared
            dispatcher.end_pass()
            return torch.equal(out, reference(*tokens, 0) + shared)

        assert both(lambda: run(0), lambda: run(1)) == (True, True)


def test_each_half_takes_only_what_the_one_before_returned():
    dispatcher = started()
    tokens = draw_tokens(TWO, 3, torch.Generator())
    first = dispatcher.dispatch_send(*tokens, layer=0)
    with pytest.raises(CallOrder, match="microbatch 0 waits for its dispatch_recv"):
        dispatcher.dispatch_send(*tokens, layer=0)
    for microbatch in (-1, 2):
        with pytest.raises(InputInvalid, match="microbatch"):
            dispatcher.dispatch_send(*tokens, layer=0, microbatch=microbatch)
    second = dispatcher.dispatch_send(*tokens, layer=0, microbatch=1)
    with pytest.raises(CallOrder):
        dispatcher.end_pass()
    arrived, handle = dispatcher.dispatch_recv(second)
    with pytest.raises(StaleEpoch, match="next is combine_send"):
        dispatcher.dispatch_recv(second)
    returning = dispatcher.combine_send(arrived.rows, handle)
    with pytest.raises(StaleEpoch):
        dispatcher.combine_send(arrived.rows, handle)
    dispatcher.combine_recv(returning)
    with pytest.raises(StaleEpoch):
        dispatcher.combine_recv(returning)
    rows, handle = dispatcher.dispatch_recv(first)
    dispatcher.combine(rows.rows, handle)
    dispatcher.end_pass()


def test_nothing_of_an_earlier_epoch_is_accepted(seed):
    generator = torch.Generator().manual_seed(seed)
    with pair(layouts=(TWO, TWO)) as (first, second):
        install((first, second), 1)
        first.begin_pass()
        sent = [
            first.dispatch_send(*draw_tokens(TWO, 2, generator), layer=0, microbatch=m)
            for m in (0, 1)
        ]
        install((first, second), 2)
        first.begin_pass()
        for outgoing in sent:
            with pytest.raises(StaleEpoch, match="epoch 1"):
                first.dispatch_recv(outgoing)
        install((first, second), 3)
        outcomes = both(
            lambda: two_in_flight(first, seed, swapped=False),
            lambda: two_in_flight(second, seed, swapped=True),
        )
        assert outcomes == (True, True), "the messages of epoch 1 count for nothing"


def test_the_deadline_of_a_call_names_who_is_silent():
    with pair(timeout_s=60.0) as (first, second):
        install((first, second), 1)
        first.begin_pass()
        outgoing = first.dispatch_send(*draw_tokens(LAYOUT, 1, torch.Generator()), layer=1)
        start = time.monotonic()
        with pytest.raises(PassFailed) as caught:
            first.dispatch_recv(outgoing, timeout_s=0.2)
        assert 0.15 < time.monotonic() - start < 50
        assert (caught.value.suspects, caught.value.layer) == ((1,), 1)
        with pytest.raises(CallOrder):
            first.begin_pass()


def test_more_microbatches_than_an_immediate_can_tell_apart_are_refused():
    for microbatches in (0, 5):
        with pytest.raises(InputInvalid, match="microbatches"):
            dataclasses.replace(LAYOUT, microbatches=microbatches)
