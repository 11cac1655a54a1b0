"""Decayed loads: what is kept, what is summed, what is refused, and what counting costs."""

from __future__ import annotations

import random
import struct
import time

import numpy as np
import pytest
import torch

from dispatch import (
    DispatchLayout,
    ExpertLoad,
    ExpertMap,
    GroupLoad,
    InputInvalid,
    LoadWindow,
    LocalDispatcher,
)
from dispatch.statistics import Counters
from tests.support.exchange_group import ExchangeGroup
from tests.support.moe_reference import draw_map, draw_tokens

LAYOUT = DispatchLayout(
    hidden=8, topk=3, num_logical=6, num_layers=2, dtype=torch.bfloat16, max_tokens=16
)


def load_of(rank: int, rows) -> ExpertLoad:
    return ExpertLoad(rank=rank, half_life_s=10.0, rows=np.array(rows, np.float32))


def test_what_is_a_half_life_old_counts_half():
    dispatcher, window = LocalDispatcher(layout=LAYOUT), LoadWindow(3, half_life_s=10.0)

    def exchange(expert: int, num_tokens: int) -> None:
        x = torch.zeros(num_tokens, 8).bfloat16()
        ids = torch.full((num_tokens, 3), -1)
        ids[:, 1] = expert
        dispatcher.begin_pass()
        rows, handle = dispatcher.dispatch(x, ids, torch.ones(num_tokens, 3), layer=1)
        dispatcher.combine(rows.rows, handle)
        dispatcher.end_pass()

    exchange(4, 8)
    load = window.update(dispatcher.statistics(), now=100.0)
    assert (load.rank, load.half_life_s) == (3, 10.0)
    assert load.rows.tolist() == [[0] * 6, [0, 0, 0, 0, 8, 0]]
    exchange(0, 5)
    assert window.update(dispatcher.statistics(), 110.0).rows[1].tolist() == [5, 0, 0, 0, 4, 0]
    load = window.update(dispatcher.statistics(), 130.0)
    assert load.rows[1].tolist() == [1.25, 0, 0, 0, 1, 0]
    assert window.update(dispatcher.statistics(), 129.0).rows[1, 4] == 1, "a clock that went back"
    assert load.rows_per_s() == pytest.approx(2.25 * np.log(2) / 10)
    assert load.hottest_ratio() == pytest.approx(1.25 / 1.125)


def test_a_group_by_instance_by_expert_and_by_rank():
    group = GroupLoad([load_of(5, [[4, 0, 2], [0, 1, 0]]), load_of(2, [[0, 2, 4], [0, 3, 0]])])
    assert group.logical().tolist() == [[4, 2, 6], [0, 4, 0]]
    assert group.instances(0, 2) == {2: 4.0, 5: 2.0}
    assert group.instances(1, 0) == {}
    assert group.ranks() == {2: 9.0, 5: 7.0}
    assert group.imbalance() == (6 + 3) * 2 / 16
    assert GroupLoad([load_of(0, [[0, 0]])]).imbalance() == 1.0
    assert GroupLoad([load_of(0, [[7, 7]]), load_of(1, [[0, 0]])]).imbalance() == 2.0


def test_all_ranks_loads_add_up_to_what_was_routed():
    seed = random.randrange(1 << 32)
    generator = torch.Generator().manual_seed(seed)
    ranks = [1, 4, 6]
    group = ExchangeGroup(LAYOUT, draw_map(LAYOUT, ranks, generator), ranks)
    for _ in range(3):
        for layer in range(2):
            group.run([draw_tokens(LAYOUT, 9, generator) for _ in ranks], layer)
    snapshots = [counters.snapshot() for counters in group.counters]
    loads = [
        LoadWindow(rank).update(found, 0.0) for rank, found in zip(ranks, snapshots, strict=True)
    ]
    routed = sum(found.routed for found in snapshots)
    assert np.array_equal(GroupLoad(loads).logical(), routed), seed


def test_a_load_survives_the_way_to_another_process():
    load = load_of(7, np.random.default_rng().random((48, 128)))
    data = load.encode()
    assert len(data) == 24 + 4 * 48 * 128
    back = ExpertLoad.decode(data)
    assert (back.rank, back.half_life_s) == (7, 10.0)
    assert np.array_equal(back.rows, load.rows)


def test_what_is_not_a_load_is_refused():
    data = load_of(0, [[1, 2]]).encode()
    spoilt = [b"", data[:-1], data + b"\0", b"\0" + data[1:], data[:24]]
    spoilt += [data[:24] + struct.pack("<ff", 1, worth) for worth in (-1.0, np.inf, np.nan)]
    spoilt.append(data[:4] + struct.pack("<i", -1) + data[8:])
    for each in spoilt:
        with pytest.raises(InputInvalid):
            ExpertLoad.decode(each)
    with pytest.raises(InputInvalid):
        GroupLoad([])
    with pytest.raises(InputInvalid):
        GroupLoad([load_of(0, [[1]]), load_of(0, [[1]])])
    with pytest.raises(InputInvalid):
        GroupLoad([load_of(0, [[1]]), load_of(1, [[1, 2]])])
    with pytest.raises(InputInvalid):
        LoadWindow(0, half_life_s=0)


def test_counting_costs_microseconds_and_no_work_per_token():
    layout = DispatchLayout(
        hidden=8, topk=8, num_logical=128, num_layers=1, dtype=torch.bfloat16, max_tokens=4096
    )
    spread = ExpertMap.even(num_layers=1, num_logical=128, ranks=[0])
    counters = Counters(layout)
    group = ExchangeGroup(layout, spread, [0])
    counters.adopt([0], 0, group.exchanges[0].routes)
    route = group.exchanges[0].routes[0]
    costs = {}
    for num_tokens in (1, 4096):
        ids = torch.randint(0, 128, (num_tokens, 8)).numpy()
        routing = route.route(route.slots(ids), num_tokens, 8)
        best = np.inf
        for _ in range(20):
            start = time.perf_counter()
            for _ in range(100):
                counters.routed(0, routing, num_tokens, 0)
                counters.received(0, routing.counts)
            best = min(best, (time.perf_counter() - start) / 100)
        costs[num_tokens] = best
    print(f"counting costs {costs[4096] * 1e6:.2f} us an exchange")
    assert costs[4096] < 200e-6, "generous: it takes two"
    assert costs[4096] < costs[1] * 20, "it does not grow with the tokens"
