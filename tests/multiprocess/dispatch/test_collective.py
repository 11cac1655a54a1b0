"""The torch.distributed reference on real gloo processes."""

from __future__ import annotations

import random
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from configs.schema import MissingExperts
from dispatch import CollectiveDispatcher, DispatchLayout
from tests.support.moe_reference import draw_map, draw_tokens, reference, run_layer
from tests.support.ranks import Board, run_ranks

LAYOUT = DispatchLayout(
    hidden=40, topk=4, num_logical=9, num_layers=2, dtype=torch.bfloat16, max_tokens=12
)


def check_bits(board: Board, seed: int) -> int:
    store = dist.FileStore(str(board.directory / "store"), board.world_size)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=board.rank,
        world_size=board.world_size,
        timeout=timedelta(seconds=20),
    )
    ranks = [3 * r for r in range(board.world_size)]
    expert_map = draw_map(LAYOUT, ranks, torch.Generator().manual_seed(seed))
    mine = torch.Generator().manual_seed(seed + 1 + board.rank)
    dispatcher = CollectiveDispatcher(
        layout=LAYOUT, expert_map=expert_map, ranks=ranks, missing_experts=MissingExperts.DEGRADE
    )
    tokens = 0
    for number in range(4):
        dispatcher.begin_pass()
        for layer in range(2):
            num_tokens = [0, 12, board.rank, 5 * (board.rank % 2)][number]
            x, ids, weights = draw_tokens(LAYOUT, num_tokens, mine)
            kind = torch.float32 if number % 2 else None
            out = run_layer(dispatcher, x, ids, weights, layer, combine_dtype=kind)
            assert torch.equal(out, reference(x, ids, weights, layer, combine_dtype=kind))
            tokens += num_tokens
        dispatcher.end_pass()
    assert dispatcher.statistics().tokens == tokens
    dist.barrier()
    dist.destroy_process_group()
    return tokens


@pytest.mark.parametrize("world_size", [2, 3])
def test_bits_equal_the_reference(world_size):
    seed = random.randrange(1 << 32)
    results = run_ranks(world_size, check_bits, seed, timeout_s=180)
    assert all(results), f"seed {seed}"
