"""A MoE layer on several ranks: at once, and as two microbatches that overlap.

    python -m benchmarks.bench_moe_layer_ranks                    # 2 ranks, 64 to 1024 tokens each
    python -m benchmarks.bench_moe_layer_ranks --backends tcp --rounds 5 --dry

Hidden 2048, 64 experts of width 768, top-8, bf16, over shared memory and tcp. A layer takes as long
as its slowest rank. Both ways take turns on the same tokens, fresh ones in each round; a ratio
is taken within a round, its median counts. Below one, `dispatch.microbatch_tokens` pays.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.bench_moe_layer import DTYPE, Sizes, Slab
from benchmarks.harness import Recorder
from configs.schema import DispatchConfig, Exactness, TransferBackend, TransferConfig
from dispatch import DispatchLayout, TransferDispatcher
from dispatch.deepep.carriers import ByTransfer, swap_by_group
from moe_runtime.models.elementwise import choose_experts
from moe_runtime.models.expert_exchange import ExpertRowsLike, through_experts
from moe_runtime.models.expert_mlp import ExpertMLP
from moe_runtime.models.experts import ExpertBank
from moe_runtime.models.linear import Linear
from transfer import TransferEngine

SIZES = Sizes(hidden=2048, inner=768, experts=64, topk=8)
WAIT_S = 60.0
SAMPLE_S = 0.3
WAYS = ("at once", "in halves")


def experts_of_this_rank() -> ExpertMLP:
    """Random weights of the usual scale for all experts; the map says which are used."""
    bank = ExpertBank(
        SIZES.spec(), DTYPE, lambda nbytes: Slab(torch.empty(nbytes, dtype=torch.uint8))
    )
    rank, size = dist.get_rank(), dist.get_world_size()
    for expert in range(SIZES.experts):
        if expert * size // SIZES.experts == rank:
            matrices = bank.as_matrices(bank.reserve(0, expert))
            matrices.normal_(std=SIZES.hidden**-0.5)
            bank.ready(0, expert)
    experts = ExpertMLP(bank, exactness=Exactness.BITWISE)
    experts.warm_up()
    return experts


def dispatcher_over(engine: TransferEngine, max_tokens: int) -> Any:
    """All ranks' dispatcher, in a pass that never ends."""
    names = {rank: f"{rank}" for rank in range(dist.get_world_size())}
    carrier = ByTransfer(
        engine,
        DispatchConfig(pass_timeout_s=WAIT_S, microbatches=2),
        rank=dist.get_rank(),
        members=names,
        swap=swap_by_group(),
    )
    layout = DispatchLayout(
        hidden=SIZES.hidden,
        topk=SIZES.topk,
        num_logical=SIZES.experts,
        num_layers=1,
        dtype=DTYPE,
        max_tokens=max_tokens,
        combine_dtype=DTYPE,
        microbatches=2,
    )
    dispatcher = carrier.dispatcher(layout)
    dispatcher.begin_pass()
    return dispatcher


def layer_of(
    dispatcher: TransferDispatcher, experts: ExpertMLP, router: Linear, most: int | None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The layer as the model computes it."""

    def compute(arrived: ExpertRowsLike) -> torch.Tensor:
        return experts(arrived.rows, arrived.counts, arrived.experts, moe_layer=0)

    def layer(x: torch.Tensor) -> torch.Tensor:
        ids, weights = choose_experts(router(x), SIZES.topk, renormalise=True)
        return through_experts(
            dispatcher, x, ids, weights, layer=0, experts=compute, microbatch_tokens=most
        )

    return layer


def slowest_ms(layer: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, calls: int) -> float:
    """Mean time of a call on the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        layer(x)
    taken = torch.tensor((time.perf_counter() - start) * 1e3 / calls, dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def measure(engine: TransferEngine, tokens: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of both ways, a round each."""
    dispatcher, experts = dispatcher_over(engine, tokens), experts_of_this_rank()
    torch.manual_seed(1)
    router = Linear(torch.randn(SIZES.experts, SIZES.hidden).to(DTYPE), exactness=Exactness.BITWISE)
    most: dict[str, int | None] = {"at once": None, "in halves": max(1, tokens // 2)}
    layers = {way: layer_of(dispatcher, experts, router, most[way]) for way in WAYS}
    torch.manual_seed(2 + dist.get_rank())
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    x = torch.randn(tokens, SIZES.hidden).to(DTYPE)
    if not torch.equal(*(layer(x) for layer in layers.values())):
        raise RuntimeError("the halves have other bits than the whole")
    calls = max(1, round(SAMPLE_S * 1e3 / slowest_ms(layers["at once"], x, 1)))
    for number in range(rounds):
        x = torch.randn(tokens, SIZES.hidden).to(DTYPE)
        for way in WAYS if number % 2 else reversed(WAYS):
            found[way].append(slowest_ms(layers[way], x, calls))
    dispatcher.close()
    return found


def run_rank(rank: int, folder: str, options: argparse.Namespace) -> None:
    """One process; rank 0 writes the results."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), options.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks)
    recorder = Recorder("moe_layer_ranks")
    for backend in options.backends:
        config = TransferConfig(backend=TransferBackend(backend))
        with TransferEngine(config, name=f"{rank}", secret=b"of this benchmark") as engine:
            addresses = [""] * options.ranks
            dist.all_gather_object(addresses, engine.address)
            for address in addresses[:rank]:
                engine.connect(address, timeout_s=WAIT_S)
            dist.barrier()
            for tokens in options.tokens:
                with torch.inference_mode():
                    found = measure(engine, tokens, options.rounds)
                labels = {"ranks": options.ranks, "tokens": tokens, "backend": backend}
                if rank == 0:
                    for way, samples in found.items():
                        recorder.add("layer on ranks", "ms", samples, way=way, **labels)
                    whole, halves = (found[way] for way in WAYS)
                    ratios = [b / a for a, b in zip(whole, halves, strict=True)]
                    recorder.add("in halves over at once", "1", ratios, **labels)
            dist.barrier()
    if rank == 0 and not options.dry:
        recorder.write()
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks and wait for them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--backends", nargs="+", default=["shared_memory", "tcp"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dry", action="store_true", help="Write no results.")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=run_rank, args=(rank, folder, options))
            for rank in range(options.ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit("a rank failed")


if __name__ == "__main__":
    main()
