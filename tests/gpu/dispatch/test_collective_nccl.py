"""Messages through NCCL: the bits of the reference, with as many ranks as there are GPUs."""

from __future__ import annotations

import random
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from dispatch import CollectiveDispatcher, DispatchLayout, ExpertMap
from tests.support.moe_reference import draw_tokens, reference, run_layer
from tests.support.ranks import Board, run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

LAYOUT = DispatchLayout(
    hidden=256, topk=4, num_logical=10, num_layers=1, dtype=torch.bfloat16, max_tokens=32
)


def check_bits(board: Board, seed: int) -> int:
    torch.cuda.set_device(board.rank)
    dist.init_process_group(
        "nccl",
        store=dist.FileStore(str(board.directory / "store"), board.world_size),
        rank=board.rank,
        world_size=board.world_size,
        timeout=timedelta(seconds=60),
    )
    spread = ExpertMap.even(num_layers=1, num_logical=10, ranks=range(board.world_size))
    mine = CollectiveDispatcher(layout=LAYOUT, expert_map=spread)
    generator = torch.Generator().manual_seed(seed + board.rank)
    for num_tokens in (0, 32, 1 + board.rank):
        tokens = draw_tokens(LAYOUT, num_tokens, generator)
        mine.begin_pass()
        assert torch.equal(run_layer(mine, *tokens, 0), reference(*tokens, 0)), seed
        mine.end_pass()
    dist.destroy_process_group()
    return mine.statistics().passes


def test_bits_equal_the_reference():
    num_ranks = min(4, torch.cuda.device_count())
    seed = random.randrange(1 << 32)
    assert run_ranks(num_ranks, check_bits, seed, timeout_s=180) == [3] * num_ranks
