"""Lost ranks where nobody agrees about them, and where membership cannot change."""

from __future__ import annotations

import os
import random
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from configs.schema import DispatchConfig
from dispatch import CallOrder, CollectiveDispatcher, ExpertMap, PassFailed
from dispatch.deepep import Buffer, ByTransfer
from tests.support.dispatch_rank import LAYOUT, DispatchRank
from tests.support.moe_reference import draw_tokens
from tests.support.ranks import Board, run_ranks

VICTIM = 1
GENEROUS_S = 60.0


def fail(call) -> PassFailed:
    with pytest.raises(PassFailed) as caught:
        call()
    return caught.value


def gloo_without_a_rank(board: Board, when: str) -> tuple[tuple[int, ...], float]:
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(board.directory / "store"), board.world_size),
        rank=board.rank,
        world_size=board.world_size,
        timeout=timedelta(seconds=2 * GENEROUS_S),
    )
    spread = ExpertMap.even(num_layers=2, num_logical=9, ranks=range(board.world_size))
    mine = CollectiveDispatcher(layout=LAYOUT, expert_map=spread)
    tokens = draw_tokens(LAYOUT, 6, torch.Generator())
    mine.begin_pass()
    arrived, handle = mine.dispatch(*tokens, layer=0)
    if when == "combine":
        if board.rank == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        failure = fail(lambda: mine.combine(arrived.rows, handle))
    else:
        mine.combine(arrived.rows, handle)
        if board.rank == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        failure = fail(lambda: mine.dispatch(*tokens, layer=1))
    seconds = time.monotonic() - start
    assert failure.phase == when
    for refused in (mine.begin_pass, lambda: mine.dispatch(*tokens, layer=0)):
        with pytest.raises(CallOrder):
            refused()
    return failure.suspects, seconds


@pytest.mark.parametrize("when", ["dispatch", "combine"])
def test_case_21_a_process_group_ends_with_its_first_loss(when: str):
    results = run_ranks(3, gloo_without_a_rank, when, exits={VICTIM: -signal.SIGKILL})
    found = [results[rank] for rank in (0, 2)]
    assert [suspects for suspects, _ in found] == [(), ()], "gloo does not say who"
    assert all(seconds < GENEROUS_S for _, seconds in found), "seen by the lost connection"


def different_views(board: Board, seed: int) -> tuple[int, ...]:
    """Rank 0 misses both others, rank 1 only rank 2; all of them are alive."""
    ranks = list(range(board.world_size))
    spread = ExpertMap.even(num_layers=2, num_logical=9, ranks=ranks)
    suspects: tuple[int, ...] = ()
    with DispatchRank(board, pass_timeout_s=GENEROUS_S) as mine:
        mine.generator.manual_seed(seed + board.rank)
        mine.install(1, ranks, spread)
        tokens = draw_tokens(LAYOUT, 4, mine.generator)
        mine.dispatcher.begin_pass()
        if board.rank == 1:
            board.read("rank 0 gave up")  # too late for rank 0, whose message is here
        if board.rank < 2:
            failure = fail(lambda: mine.dispatcher.dispatch(*tokens, layer=0, timeout_s=3.0))
            suspects = failure.suspects
        if board.rank == 0:
            board.post("rank 0 gave up")
        board.exchange("observed", suspects)
        # Nobody drew a conclusion: the next epoch has all of them, as whoever decides has said.
        mine.install(2, ranks, spread)
        for num_tokens in (0, 5, 12):
            mine.check_pass(num_tokens)
        board.exchange("done", None)
    return suspects


def test_case_23_what_ranks_observe_is_not_membership():
    results = run_ranks(3, different_views, random.randrange(1 << 32), timeout_s=180)
    assert results == [(1, 2), (2,), ()], "they saw different things"


def buffer_without_a_rank(board: Board) -> tuple[tuple[int, ...], float]:
    with DispatchRank(board, pass_timeout_s=GENEROUS_S) as mine:
        names = {rank: mine.name_of(rank) for rank in range(board.world_size)}
        rounds = iter(range(100))

        def swap(offers):
            given = board.exchange(f"offers-{next(rounds)}", offers)
            return {r: given[r][board.rank] for r in given if r != board.rank}

        carrier = ByTransfer(
            mine.engine,
            DispatchConfig(pass_timeout_s=GENEROUS_S),
            rank=board.rank,
            members=names,
            swap=swap,
        )
        buffer = Buffer(carrier)
        x, ids = torch.ones(4, 128).bfloat16(), torch.arange(8).view(4, 2).contiguous()
        weights = torch.full((4, 2), 0.5)
        recv_x, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, 4, 9, use_fp8=False)
        out, _, _ = buffer.low_latency_combine(recv_x, ids, weights, handle)
        assert torch.equal(out, x)
        if board.rank == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        failure = fail(lambda: buffer.low_latency_dispatch(x, ids, 4, 9, use_fp8=False))
        with pytest.raises(CallOrder):
            buffer.low_latency_dispatch(x, ids, 4, 9, use_fp8=False)
        buffer.destroy()
        return failure.suspects, time.monotonic() - start


def test_case_21_a_buffer_names_the_rank_that_was_lost():
    results = run_ranks(3, buffer_without_a_rank, timeout_s=180, exits={VICTIM: -signal.SIGKILL})
    found = [results[rank] for rank in (0, 2)]
    assert all(seconds < GENEROUS_S for _, seconds in found), found
    assert [suspects for suspects, _ in found] == [(VICTIM,), (VICTIM,)]
