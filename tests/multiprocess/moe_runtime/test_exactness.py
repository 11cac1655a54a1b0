"""A token's logits are the same bits on one rank and on a group, however it is made up.

Four real processes with engines, dispatchers and models go from epoch to epoch and lose members on
the way: 4 ranks, 3, 2, 1. In each epoch every rank computes sequences of its own in several ways,
and compares all logits with those of one rank that had all experts to itself.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from configs.schema import TransferBackend
from dispatch import CollectiveDispatcher, Dispatcher, ExpertMap, LocalDispatcher
from elastic.plan import cover_orphans
from tests.support.model_rank import LoadedModel, ModelRank, Schedule, mixed, same_bits, whole
from tests.support.moe_reference import draw_map
from tests.support.ranks import Board, run_ranks

GROUPS = ([0, 1, 2, 3], [0, 2, 3], [2, 3], [3])
VOCABULARY = 200
WAYS = ("alone", "batches", "decoded")


def schedule_of(way: str, lengths: Sequence[int], rng: random.Random) -> Schedule:
    if way == "alone":
        return whole(lengths)
    if way == "batches":
        return mixed(lengths, rng, sizes=[1, 1, 2, 7, 20], together=4)
    return mixed(lengths, rng, sizes=[1], together=4)


def maps_of(loaded: LoadedModel, seed: int) -> list[ExpertMap]:
    """A map for each group: even, what is left with the orphans covered, uneven with replicas."""
    layout = loaded.layout
    first = ExpertMap.even(
        num_layers=layout.num_layers, num_logical=layout.num_logical, ranks=GROUPS[0]
    )
    second = cover_orphans(first, GROUPS[1])
    third = draw_map(layout, GROUPS[2], torch.Generator().manual_seed(seed))
    return [first, second, third, cover_orphans(third, GROUPS[3])]


class Comparison:
    """What one rank computes, and what it compares it with."""

    def __init__(self, loaded: LoadedModel, reference: Path, board: Board, seed: int) -> None:
        saved = torch.load(reference)
        self.sequences: list[list[int]] = saved["sequences"]
        self.logits: list[torch.Tensor] = saved["logits"]
        self.loaded, self.board, self.seed = loaded, board, seed

    def check(self, dispatcher: Dispatcher, ranks: Sequence[int], *, ways: Sequence[str]) -> int:
        """Every member computes its share of the sequences at once; tokens compared here."""
        compared = 0
        for way in ways:
            rng = random.Random(f"{self.seed} {ranks} {way}")  # the same draws on every rank
            numbers = range(len(self.sequences))
            shares = {rank: rng.sample(numbers, rng.randint(0, 4)) for rank in ranks}
            shares[rng.choice(ranks)] = list(numbers)[:4]  # somebody has work
            schedules = {
                rank: schedule_of(way, [len(self.sequences[n]) for n in share], rng)
                for rank, share in shares.items()
            }
            mine = shares[self.board.rank]
            found = self.loaded.run(
                dispatcher,
                [self.sequences[n] for n in mine],
                schedules[self.board.rank],
                num_passes=max(map(len, schedules.values())),
            )
            expected = {n: self.logits[n] for n in mine}
            assert same_bits(dict(zip(mine, found, strict=True)), expected), (way, ranks, self.seed)
            compared += sum(map(len, found))
        return compared


def check_group(
    board: Board, directory: Path, reference: Path, dtype: torch.dtype, seed: int
) -> int:
    torch.set_num_threads(1)
    loaded = LoadedModel(directory, dtype, seed=seed + board.rank)
    comparison = Comparison(loaded, reference, board, seed)
    compared = 0
    with ModelRank(board, loaded) as rank:
        for epoch, expert_map in enumerate(maps_of(loaded, seed), start=1):
            if board.rank in expert_map.ranks:
                rank.enter_epoch(epoch, expert_map)
                compared += comparison.check(rank.dispatcher, expert_map.ranks, ways=WAYS)
        board.exchange("done", None)
    loaded.close()
    return compared


def check_collective(
    board: Board, directory: Path, reference: Path, dtype: torch.dtype, seed: int
) -> int:
    torch.set_num_threads(1)
    loaded = LoadedModel(directory, dtype, seed=seed + board.rank)
    comparison = Comparison(loaded, reference, board, seed)
    ranks = list(range(board.world_size))
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(board.directory / "store"), board.world_size),
        rank=board.rank,
        world_size=board.world_size,
        timeout=timedelta(seconds=60),
    )
    expert_map = draw_map(loaded.layout, ranks, torch.Generator().manual_seed(seed))
    loaded.hold(expert_map, board.rank)
    dispatcher = CollectiveDispatcher(layout=loaded.layout, expert_map=expert_map)
    compared = comparison.check(dispatcher, ranks, ways=["alone", "batches"])
    dist.barrier()
    dist.destroy_process_group()
    loaded.close()
    return compared


@pytest.fixture(scope="module")
def seed() -> int:
    return random.SystemRandom().randrange(1 << 30)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, seed: int) -> Path:
    """Seven experts, three chosen, odd widths: nothing divides evenly."""
    # Here, because the processes import this module and need no transformers.
    from tests.support.checkpoints import make_tiny_checkpoint

    return make_tiny_checkpoint(
        tmp_path_factory.mktemp(f"checkpoint-{seed}"),
        seed=seed,
        num_experts=7,
        hidden_size=128,
        moe_intermediate_size=72,
        vocab_size=VOCABULARY,
        num_hidden_layers=3,
        mlp_only_layers=[1],
    )


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def reference(
    request: pytest.FixtureRequest, directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[torch.dtype, Path]:
    """Token ids, and every token's logits as one rank computes them, sequence by sequence."""
    dtype: torch.dtype = request.param
    rng = random.Random(directory.name)
    sequences = [[rng.randrange(VOCABULARY) for _ in range(rng.randint(3, 28))] for _ in range(8)]
    sequences[0] = [rng.randrange(VOCABULARY) for _ in range(60)]
    loaded = LoadedModel(directory, dtype, seed=0)
    alone = LocalDispatcher(layout=loaded.layout)
    layout = loaded.layout
    loaded.hold(
        ExpertMap.even(num_layers=layout.num_layers, num_logical=layout.num_logical, ranks=[0]), 0
    )
    schedule = whole(list(map(len, sequences)))
    logits = loaded.run(alone, sequences, schedule, num_passes=len(schedule))
    loaded.close()
    path = tmp_path_factory.mktemp("reference") / "logits.pt"
    torch.save({"sequences": sequences, "logits": logits}, path)
    return dtype, path


def test_groups_of_four_to_one(directory: Path, reference: tuple[torch.dtype, Path], seed: int):
    dtype, path = reference
    compared = run_ranks(4, check_group, directory, path, dtype, seed, timeout_s=180)
    assert all(compared[rank] for rank in GROUPS[-1]), f"seed {seed}"


def test_tcp(directory: Path, reference: tuple[torch.dtype, Path], seed: int):
    dtype, path = reference
    compared = run_ranks(3, check_tcp, directory, path, dtype, seed, timeout_s=180)
    assert sum(compared), f"seed {seed}"


def check_tcp(board: Board, directory: Path, reference: Path, dtype: torch.dtype, seed: int) -> int:
    torch.set_num_threads(1)
    loaded = LoadedModel(directory, dtype, seed=seed + board.rank)
    comparison = Comparison(loaded, reference, board, seed)
    ranks = list(range(board.world_size))
    with ModelRank(board, loaded, backend=TransferBackend.TCP) as rank:
        assert {peer.backend for peer in rank.engine.peers()} == {"tcp"}
        rank.enter_epoch(1, draw_map(loaded.layout, ranks, torch.Generator().manual_seed(seed)))
        compared = comparison.check(rank.dispatcher, ranks, ways=["alone", "batches"])
        board.exchange("done", None)
    loaded.close()
    return compared


def test_two_microbatches(directory: Path, reference: tuple[torch.dtype, Path], seed: int):
    """Ranks with many tokens make all others take part in their second half."""
    dtype, path = reference
    found = run_ranks(3, check_halves, directory, path, dtype, seed, timeout_s=180)
    assert sum(compared for compared, _, _ in found), f"seed {seed}"
    assert len({(whole, halves) for _, whole, halves in found}) == 1, "all make the same calls"
    _, num_whole, num_halves = found[0]
    assert num_whole > num_halves > 0, "some passes were cut, and some were not"


def check_halves(
    board: Board, directory: Path, reference: Path, dtype: torch.dtype, seed: int
) -> tuple[int, int, int]:
    torch.set_num_threads(1)
    loaded = LoadedModel(directory, dtype, seed=seed + board.rank, microbatch_tokens=5)
    comparison = Comparison(loaded, reference, board, seed)
    ranks = list(range(board.world_size))
    with ModelRank(board, loaded) as rank:
        rank.enter_epoch(1, draw_map(loaded.layout, ranks, torch.Generator().manual_seed(seed)))
        send, calls = rank.dispatcher.dispatch_send, [0, 0]

        def counted(*tokens, microbatch: int = 0, **options):
            calls[microbatch] += 1
            return send(*tokens, microbatch=microbatch, **options)

        rank.dispatcher.dispatch_send = counted
        compared = comparison.check(rank.dispatcher, ranks, ways=WAYS)
        board.exchange("done", None)
    loaded.close()
    return compared, calls[0], calls[1]


def test_collective_on_gloo(directory: Path, reference: tuple[torch.dtype, Path], seed: int):
    dtype, path = reference
    compared = run_ranks(3, check_collective, directory, path, dtype, seed, timeout_s=180)
    assert sum(compared), f"seed {seed}"
