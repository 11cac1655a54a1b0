"""Two microbatches on real processes of uneven speed, received in different orders."""

from __future__ import annotations

import dataclasses
import random
import time

import pytest
import torch

from configs.schema import TransferBackend
from tests.support.dispatch_rank import LAYOUT, DispatchRank
from tests.support.moe_reference import draw_map, draw_tokens, reference, run_experts
from tests.support.ranks import Board, run_ranks

TWO = dataclasses.replace(LAYOUT, microbatches=2)


def check_overlap(board: Board, backend: TransferBackend, slack: float, seed: int) -> int:
    ranks = list(range(board.world_size))
    chance = random.Random(seed + board.rank)
    with DispatchRank(board, layout=TWO, backend=backend, window_slack=slack) as mine:
        mine.generator.manual_seed(seed + 1 + board.rank)
        mine.install(1, ranks, draw_map(TWO, ranks, torch.Generator().manual_seed(seed)))
        dispatcher, exchanges = mine.dispatcher, 0
        for number in range(20):
            dispatcher.begin_pass()
            for layer in (0, 1):
                tokens = [draw_tokens(TWO, chance.randrange(13), mine.generator) for _ in "AB"]
                sent = [
                    dispatcher.dispatch_send(*t, layer=layer, microbatch=m)
                    for m, t in enumerate(tokens)
                ]
                order = chance.sample((0, 1), 2)
                returning = {}
                for m in order:
                    if chance.random() < 0.1:
                        time.sleep(chance.random() * 0.02)
                    arrived, handle = dispatcher.dispatch_recv(sent[m])
                    result = run_experts(arrived.rows, arrived.counts, arrived.experts, layer)
                    returning[m] = dispatcher.combine_send(result, handle)
                for m in order:
                    out = dispatcher.combine_recv(returning[m])
                    assert torch.equal(out, reference(*tokens[m], layer)), (seed, number)
                    exchanges += 1
            dispatcher.end_pass()
        board.exchange("done", None)
        assert (dispatcher.statistics().grown_windows > 0) is (slack < 1)
        return exchanges


@pytest.mark.parametrize("slack", [4.0, 0.1], ids=["wide windows", "windows that grow"])
@pytest.mark.parametrize("backend", [TransferBackend.SHARED_MEMORY, TransferBackend.TCP])
def test_microbatches_overlap_and_keep_their_bits(backend, slack):
    seed = random.randrange(1 << 32)
    assert run_ranks(3, check_overlap, backend, slack, seed, timeout_s=180) == [80, 80, 80], seed
