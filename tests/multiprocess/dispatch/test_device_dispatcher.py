"""Tensors on a "device" (here: the CPU's own memory) between processes, against one rank alone."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from configs.dispatch_options import CombineWire, DispatchWire
from configs.schema import DispatchConfig, TransferBackend, TransferConfig
from dispatch import CallOrder, ExpertMap, InputInvalid, LayoutMismatch, PassFailed, StaleEpoch
from dispatch.device_dispatcher import DeviceDispatcher
from dispatch.kernels.fp8 import dequantise
from dispatch.layout import DispatchLayout
from tests.support.device_group import CPU, by_the_cpu_path, expert
from tests.support.dispatch_rank import SECRET, DispatchRank
from tests.support.moe_reference import draw_map, draw_tokens
from tests.support.ranks import Board, run_ranks
from transfer import TransferEngine

LAYOUT = DispatchLayout(
    hidden=40, topk=3, num_logical=7, num_layers=2, dtype=torch.bfloat16, max_tokens=9,
    microbatches=2,
)  # fmt: skip
OPTIONS = {
    "bf16": {},
    "fp8": {"dispatch_wire": DispatchWire.FP8},
    "fp32 back as bf16": {"combine_wire": CombineWire.BF16},
}
GENEROUS_S = 60.0


class DeviceRank:
    """An engine and a device dispatcher, connected to the others through a board."""

    def __init__(self, board: Board, layout: DispatchLayout, backend: TransferBackend, **options):
        self.board, self.layout = board, layout
        self.engine = TransferEngine(
            TransferConfig(backend=backend), name=DispatchRank.name_of(board.rank), secret=SECRET
        )
        timeout_s = options.pop("pass_timeout_s", GENEROUS_S)
        self.dispatcher = DeviceDispatcher(
            self.engine,
            DispatchConfig(pass_timeout_s=timeout_s),
            layout=layout,
            device=CPU,
            alignment=4,
            **options,
        )

    def __enter__(self) -> DeviceRank:
        self.engine.open()
        for rank, address in self.board.exchange("address", self.engine.address).items():
            if rank != self.board.rank:
                self.engine.connect(address, timeout_s=GENEROUS_S)
        return self

    def __exit__(self, *exception: object) -> None:
        self.dispatcher.close()
        self.engine.close()

    def offers(self, epoch: int, ranks: list[int], expert_map: ExpertMap) -> dict[int, bytes]:
        self.map = expert_map
        mine = self.dispatcher.prepare(
            epoch=epoch,
            rank=self.board.rank,
            members={rank: DispatchRank.name_of(rank) for rank in ranks},
            expert_map=expert_map,
        )
        everybodys = self.board.exchange(f"offers-{epoch}", mine, ranks)
        me = self.board.rank
        return {rank: everybodys[rank][me] for rank in ranks if rank != me}

    def compute(self, received, dtype: torch.dtype) -> torch.Tensor:
        rows, bounds = received.rows, received.arranged.bounds
        if received.scales is not None:
            rows = dequantise(rows, received.scales, self.layout.dtype)
        results = torch.zeros(len(rows), self.layout.hidden, dtype=dtype)
        for index, number in enumerate(self.map.experts_of(self.board.rank, 1)):
            begin, end = bounds[index : index + 2].tolist()
            results[begin:end] = expert(rows[begin:end], number, dtype)
        return results


def check_bits(board: Board, backend: TransferBackend, option: str, seed: int) -> int:
    layout = dataclasses.replace(LAYOUT, **OPTIONS[option])
    dtype = torch.float32 if "fp32" in option else torch.bfloat16
    generator = torch.Generator().manual_seed(seed + 1 + board.rank)
    groups = [list(range(board.world_size)), [0, 2], [2]]
    compared = 0
    with DeviceRank(board, layout, backend, results_dtype=dtype) as mine:
        placing = torch.Generator().manual_seed(seed)
        maps = [draw_map(layout, ranks, placing) for ranks in groups]
        for epoch, (ranks, expert_map) in enumerate(zip(groups, maps, strict=True), start=1):
            if board.rank not in ranks:
                continue
            mine.dispatcher.install(mine.offers(epoch, ranks, expert_map))
            for number in range(4):
                mine.dispatcher.begin_pass()
                tokens = [
                    draw_tokens(layout, (number * 3 + m + board.rank) % 10, generator)
                    for m in (0, 1)
                ]
                sent = [
                    mine.dispatcher.dispatch_send(*t, layer=1, microbatch=m)
                    for m, t in enumerate(tokens)
                ]
                for m in (0, 1):
                    received = mine.dispatcher.dispatch_recv(sent[m])
                    mine.dispatcher.combine_send(mine.compute(received, dtype), received, sent[m])
                for m in (1, 0):
                    out = mine.dispatcher.combine_recv(sent[m])
                    expected = by_the_cpu_path(layout, *tokens[m], dtype)
                    assert torch.equal(out, expected), (seed, epoch, number, m)
                    compared += 1
                mine.dispatcher.end_pass()
        board.exchange("done", None)
        assert mine.dispatcher.statistics().sent_bytes > 0
    return compared


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("backend", [TransferBackend.SHARED_MEMORY, TransferBackend.TCP])
def test_the_bits_of_the_cpu_path_on_any_group(backend, option):
    seed = random.randrange(1 << 32)
    assert run_ranks(3, check_bits, backend, option, seed, timeout_s=180) == [16, 8, 24], seed


def check_refusals(board: Board) -> tuple[int, ...]:
    ranks = [0, 1]
    even = ExpertMap.even(num_layers=2, num_logical=7, ranks=ranks)
    layout = dataclasses.replace(LAYOUT, microbatches=1)
    tokens = draw_tokens(layout, 3, torch.Generator())
    with DeviceRank(board, layout, TransferBackend.AUTO, pass_timeout_s=6.0) as mine:
        dispatcher = mine.dispatcher
        with pytest.raises(CallOrder):
            dispatcher.install({})
        old = mine.offers(1, ranks, even)
        new = mine.offers(2, ranks, even)
        with pytest.raises(StaleEpoch):
            dispatcher.install(old)
        with pytest.raises(LayoutMismatch):
            dispatcher.install({})
        with pytest.raises(LayoutMismatch):
            dispatcher.install({rank: offer[:70] for rank, offer in new.items()})
        with pytest.raises(InputInvalid, match="epoch"):
            mine.offers(2, ranks, even)
        dispatcher.install(new)
        dispatcher.begin_pass()
        with pytest.raises(InputInvalid):
            dispatcher.dispatch_send(tokens[0].float(), *tokens[1:], layer=0)
        sent = dispatcher.dispatch_send(*tokens, layer=0)
        received = dispatcher.dispatch_recv(sent)
        with pytest.raises(InputInvalid, match="dtype of results"):
            dispatcher.combine_send(received.rows.float(), received, sent)
        board.exchange("in the middle", None)
        if board.rank == 1:  # stays silent: rank 0 names it
            board.read("named")
            return ()
        dispatcher.combine_send(received.rows, received, sent)
        with pytest.raises(PassFailed) as caught:
            dispatcher.combine_recv(sent)
        with pytest.raises(StaleEpoch):
            dispatcher.combine_recv(sent)
        board.post("named")
        return caught.value.suspects


def test_refusals_and_a_silent_rank():
    assert run_ranks(2, check_refusals, timeout_s=180) == [(1,), ()]
