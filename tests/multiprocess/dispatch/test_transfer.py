"""The transfer dispatcher on real processes: same bits whatever the routing and the backend."""

from __future__ import annotations

import dataclasses
import random
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from configs.dispatch_options import CombineMode, CombineWire, DispatchWire
from configs.schema import TransferBackend
from dispatch import CollectiveDispatcher, ExpertMap
from tests.support.dispatch_rank import LAYOUT, DispatchRank
from tests.support.moe_reference import draw_map, draw_tokens, reference, run_experts
from tests.support.ranks import Board, run_ranks


def check_bits(board: Board, backend: TransferBackend, seed: int) -> tuple[int, int]:
    ranks = list(range(board.world_size))
    placing = torch.Generator().manual_seed(seed)
    maps = [
        ExpertMap.even(num_layers=2, num_logical=9, ranks=ranks),
        draw_map(LAYOUT, ranks, placing),  # uneven, with replicas
        ExpertMap.even(num_layers=2, num_logical=9, ranks=ranks[-1:]),  # ranks without experts
    ]
    with DispatchRank(board, backend=backend) as mine:
        mine.generator.manual_seed(seed + 1 + board.rank)
        for epoch, expert_map in enumerate(maps, start=1):
            mine.install(epoch, ranks, expert_map)
            mine.check_pass(0)
            mine.check_pass(board.rank)
            mine.check_pass(0 if board.rank else LAYOUT.max_tokens)
            mine.check_pass(LAYOUT.max_tokens, hot=seed % 9, masked=0.0)
            mine.check_pass(5, masked=1.0)
            mine.check_pass(LAYOUT.max_tokens - board.rank, combine_dtype=torch.float32)
        board.exchange("done", None)
        counted = mine.dispatcher.statistics()
        assert counted.passes == 18
        return int(counted.routed.sum()), int(counted.received.sum())


@pytest.mark.parametrize("backend", [TransferBackend.SHARED_MEMORY, TransferBackend.TCP])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_bits_equal_the_reference(world_size, backend):
    seed = random.randrange(1 << 32)
    results = run_ranks(world_size, check_bits, backend, seed, timeout_s=180)
    assert sum(routed for routed, _ in results) == sum(got for _, got in results) > 0, seed


OPTIONS = {
    "exact": {},
    "reduced": {"combine": CombineMode.REDUCED},
    "fp8 and bf16": {"dispatch_wire": DispatchWire.FP8, "combine_wire": CombineWire.BF16},
}


def check_backends_agree(board: Board, change: dict[str, object], seed: int) -> None:
    layout = dataclasses.replace(LAYOUT, microbatches=2, **change)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(board.directory / "store"), board.world_size),
        rank=board.rank,
        world_size=board.world_size,
        timeout=timedelta(seconds=120),
    )
    ranks = list(range(board.world_size))
    expert_map = draw_map(layout, ranks, torch.Generator().manual_seed(seed))
    collective = CollectiveDispatcher(layout=layout, expert_map=expert_map)
    with DispatchRank(board, layout=layout, window_slack=9.0) as mine:
        mine.install(1, ranks, expert_map)
        for dispatcher in (collective, mine.dispatcher):
            dispatcher.begin_pass()
        generator = torch.Generator().manual_seed(seed + 1 + board.rank)
        for _ in range(3):
            x, ids, weights = draw_tokens(layout, 7 + board.rank, generator)
            rows, handles = [], []
            for dispatcher in (collective, mine.dispatcher):
                arrived, handle = dispatcher.dispatch(x, ids, weights, layer=1)
                rows.append(arrived)
                handles.append(handle)
            assert rows[0].counts == rows[1].counts
            assert torch.equal(rows[0].rows, rows[1].rows), "also the order of the rows"
            outs = [
                dispatcher.combine(arrived.rows * 3, handle)
                for dispatcher, arrived, handle in zip(
                    (collective, mine.dispatcher), rows, handles, strict=True
                )
            ]
            assert torch.equal(*outs)
        check_two_in_flight(collective, mine.dispatcher, draw_tokens(layout, 9, generator))
        assert collective.statistics().sent_bytes == mine.dispatcher.statistics().sent_bytes > 0
        board.exchange("done", None)
    dist.destroy_process_group()


@pytest.mark.parametrize("change", OPTIONS.values(), ids=OPTIONS.keys())
def test_collective_and_transfer_agree_in_rows_bits_and_bytes(change):
    run_ranks(3, check_backends_agree, change, random.randrange(1 << 32), timeout_s=180)


def check_two_in_flight(collective, transfer, tokens) -> None:
    """Both microbatches of both dispatchers at once: the second half of the tokens, the first."""
    outs = []
    for dispatcher in (collective, transfer):
        sent = [
            dispatcher.dispatch_send(
                *(part[half] for part in tokens), layer=0, microbatch=microbatch
            )
            for microbatch, half in enumerate((slice(4, 9), slice(0, 4)))
        ]
        returning = []
        for outgoing in sent:
            arrived, handle = dispatcher.dispatch_recv(outgoing)
            returning.append(dispatcher.combine_send(arrived.rows * 3, handle))
        outs.append([dispatcher.combine_recv(each) for each in returning])
    for first, second in zip(*outs, strict=True):
        assert torch.equal(first, second)


def check_idle_ranks_are_woken(board: Board) -> int:
    """Rank 0 has work; the others sleep until its first message and take part with T = 0."""
    ranks = list(range(board.world_size))
    with DispatchRank(board) as mine:
        mine.install(1, ranks, ExpertMap.even(num_layers=2, num_logical=9, ranks=ranks))
        woken = 0
        for _ in range(5):
            keys = mine.dispatcher.pass_started_by_peer()
            assert len(keys) == board.world_size - 1
            if board.rank:
                assert mine.engine.wait_any(keys, timeout_s=60)
                woken += 1
            mine.check_pass(0 if board.rank else 4)
        mine.dispatcher.begin_pass()
        assert mine.dispatcher.pass_started_by_peer() == []
        board.exchange("done", None)
        return woken


def test_idle_ranks_are_woken_by_the_first_message():
    assert run_ranks(3, check_idle_ranks_are_woken, timeout_s=180) == [0, 5, 5]


def check_uneven_speed(board: Board, seed: int) -> None:
    """Ranks pause at different points: nobody may overwrite a window that is still being read."""
    ranks = list(range(board.world_size))
    pause = random.Random(seed + board.rank)
    with DispatchRank(board) as mine:
        mine.install(1, ranks, ExpertMap.even(num_layers=2, num_logical=9, ranks=ranks))
        mine.dispatcher.begin_pass()
        for number in range(60):
            x, ids, weights = draw_tokens(LAYOUT, pause.randrange(13), mine.generator)
            arrived, handle = mine.dispatcher.dispatch(x, ids, weights, layer=number % 2)
            if pause.random() < 0.2:
                time.sleep(pause.random() * 0.02)
            result = run_experts(arrived.rows, arrived.counts, arrived.experts, number % 2)
            out = mine.dispatcher.combine(result, handle)
            if pause.random() < 0.2:
                time.sleep(pause.random() * 0.02)
            assert torch.equal(out, reference(x, ids, weights, number % 2))
        mine.dispatcher.end_pass()
        board.exchange("done", None)


def test_ranks_of_uneven_speed_keep_their_bits():
    run_ranks(3, check_uneven_speed, random.randrange(1 << 32), timeout_s=180)
