"""Messages and bytes of an exchange: the formula against what the transfer engine counted."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch

from configs.dispatch_options import CombineMode, CombineWire, DispatchWire
from configs.schema import DispatchConfig, TransferBackend
from dispatch import DispatchLayout, ExpertMap, TransferDispatcher
from dispatch.traffic import even_traffic, traffic_of
from tests.support.dispatch_rank import LAYOUT, DispatchRank
from tests.support.moe_reference import draw_map, draw_tokens, run_layer
from tests.support.ranks import Board, run_ranks

OPTIONS = {
    "exact": {},
    "reduced": {"combine": CombineMode.REDUCED},
    "fp8 and bf16": {"dispatch_wire": DispatchWire.FP8, "combine_wire": CombineWire.BF16},
}


def counted(engine) -> np.ndarray:
    found = engine.statistics().backends.values()
    return np.array([[b.bytes_written, b.immediates, b.bytes_read] for b in found]).sum(0)


def check_traffic(board: Board, backend: TransferBackend, seed: int) -> int:
    ranks, exchanges = list(range(board.world_size)), 0
    with DispatchRank(board, backend=backend) as mine:
        mine.generator.manual_seed(seed + board.rank)
        for epoch, change in enumerate(OPTIONS.values(), start=1):
            mine.dispatcher.close()
            mine.layout = dataclasses.replace(LAYOUT, **change)
            mine.dispatcher = TransferDispatcher(
                mine.engine,
                DispatchConfig(pass_timeout_s=60.0, window_slack=9.0),
                layout=mine.layout,
            )
            placed = draw_map(LAYOUT, ranks, torch.Generator().manual_seed(seed + epoch))
            mine.install(epoch, ranks, placed)
            mine.dispatcher.begin_pass()
            for layer in (0, 1):
                check_exchange(mine, placed, layer, f"{epoch}-{layer}", seed)
                exchanges += 1
            mine.dispatcher.end_pass()
            board.exchange(f"done-{epoch}", None)
    return exchanges


def check_exchange(mine: DispatchRank, placed: ExpertMap, layer: int, name: str, seed: int) -> None:
    me = mine.board.rank
    x, ids, weights = draw_tokens(mine.layout, 3 * me, mine.generator)
    all_ids = mine.board.exchange(f"ids-{name}", ids.numpy())
    kind = torch.float32 if layer else None
    due = traffic_of(mine.layout, placed, layer, me, all_ids, dtype=kind)
    before, sent_before = counted(mine.engine), mine.dispatcher.statistics().sent_bytes
    run_layer(mine.dispatcher, x, ids, weights, layer, combine_dtype=kind)
    nbytes, messages, read = counted(mine.engine) - before
    assert messages == due.messages == 2 * (mine.board.world_size - 1)
    assert (nbytes, read) == (due.nbytes, 0), (seed, name)
    assert mine.dispatcher.statistics().sent_bytes - sent_before == nbytes


@pytest.mark.parametrize("backend", [TransferBackend.SHARED_MEMORY, TransferBackend.TCP])
def test_the_engine_sends_what_the_formula_says(backend):
    seed = random.randrange(1 << 32)
    assert run_ranks(3, check_traffic, backend, seed, timeout_s=180) == [6, 6, 6], seed


@pytest.mark.parametrize("change", OPTIONS.values(), ids=OPTIONS.keys())
def test_even_routing_costs_what_is_expected_on_average(change):
    layout = DispatchLayout(
        hidden=256,
        topk=8,
        num_logical=64,
        num_layers=1,
        dtype=torch.bfloat16,
        max_tokens=512,
        **change,
    )
    ranks, seed = list(range(4)), random.randrange(1 << 32)
    placed = ExpertMap.even(num_layers=1, num_logical=64, ranks=ranks)
    generator = torch.Generator().manual_seed(seed)
    ids = {
        rank: torch.rand(512, 64, generator=generator).argsort(1)[:, :8].numpy() for rank in ranks
    }
    expected = even_traffic(layout, num_ranks=4, num_tokens=512)
    exact = traffic_of(layout, placed, 0, 2, ids)
    assert exact.messages == expected.messages == 6
    for name in ("dispatch_bytes", "combine_bytes", "nbytes"):
        assert getattr(exact, name) == pytest.approx(getattr(expected, name), rel=0.1), seed
