"""A rank with a real engine, dispatcher and model, and schedules that all ranks can derive."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from configs.schema import Exactness, TransferBackend
from dispatch import Dispatcher, DispatchLayout, ExpertMap
from moe_runtime.models.batch import SequenceInput, build_batch
from moe_runtime.models.checkpoint import Checkpoint
from moe_runtime.models.experts import ExpertBank
from moe_runtime.models.paged_kv import PagedKV
from moe_runtime.models.qwen3_moe import Qwen3MoeModel
from moe_runtime.models.spec import ModelSpec
from tests.support.dispatch_rank import DispatchRank
from tests.support.ranks import Board
from transfer import allocate

PAGE_TOKENS = 16
NUM_PAGES = 48
TOKEN_BUDGET = 64


@dataclass(frozen=True)
class Part:
    """Tokens [start, start + count) of one sequence."""

    sequence: int
    start: int
    count: int


Schedule = list[list[Part]]


def whole(lengths: Sequence[int]) -> Schedule:
    """Each sequence alone and in one piece."""
    return [[Part(number, 0, length)] for number, length in enumerate(lengths)]


def mixed(
    lengths: Sequence[int], rng: random.Random, *, sizes: Sequence[int], together: int
) -> Schedule:
    """All sequences in chunks of these sizes, up to `together` of them in a batch."""
    done = [0] * len(lengths)
    schedule: Schedule = []
    while open_ones := [n for n, length in enumerate(lengths) if done[n] < length]:
        batch: list[Part] = []
        budget = TOKEN_BUDGET
        for n in rng.sample(open_ones, min(len(open_ones), rng.randint(1, together))):
            count = min(rng.choice(sizes), lengths[n] - done[n], budget)
            if count:
                batch.append(Part(n, done[n], count))
                done[n] += count
                budget -= count
        schedule.append(batch)
    return schedule


def layout_of(spec: ModelSpec, dtype: torch.dtype, microbatches: int = 1) -> DispatchLayout:
    return DispatchLayout(
        hidden=spec.hidden_size,
        topk=spec.topk,
        num_logical=spec.num_experts,
        num_layers=spec.num_moe_layers,
        dtype=dtype,
        max_tokens=TOKEN_BUDGET,
        microbatches=microbatches,
    )


class LoadedModel:
    """Model, bank and cache of one process; experts come from the checkpoint when wanted."""

    def __init__(
        self,
        directory: Path,
        dtype: torch.dtype,
        *,
        seed: int,
        microbatch_tokens: int | None = None,
    ) -> None:
        self.checkpoint = Checkpoint(directory).open()
        self.spec = self.checkpoint.spec
        self.layout = layout_of(self.spec, dtype, 1 if microbatch_tokens is None else 2)
        self.bank = ExpertBank(self.spec, dtype, allocate, slab_bytes=1 << 16)
        self.model = Qwen3MoeModel(
            self.spec,
            self.checkpoint,
            self.bank,
            dtype=dtype,
            exactness=Exactness.BITWISE,
            microbatch_tokens=microbatch_tokens,
        )
        nbytes = PagedKV.nbytes(NUM_PAGES, self.spec, PAGE_TOKENS, dtype)
        self.generator = torch.Generator().manual_seed(seed)
        # Old bytes, not zeros: nobody may depend on what a page held before.
        memory = torch.randint(0, 60, (nbytes,), dtype=torch.uint8, generator=self.generator)
        self.kv = PagedKV(memory, NUM_PAGES, self.spec, PAGE_TOKENS, dtype)

    def hold(self, expert_map: ExpertMap, rank: int) -> None:
        """Have exactly the experts that the map gives to this rank."""
        wanted = [
            (layer, expert)
            for layer in range(expert_map.num_layers)
            for expert in expert_map.experts_of(rank, layer)
        ]
        for layer, expert in self.bank.retain(wanted):
            blob = self.bank.as_matrices(self.bank.reserve(layer, expert))
            self.checkpoint.read_expert(layer, expert, blob)
            self.bank.ready(layer, expert)

    def run(
        self,
        dispatcher: Dispatcher,
        sequences: Sequence[Sequence[int]],
        schedule: Schedule,
        *,
        num_passes: int,
    ) -> list[torch.Tensor]:
        """Run `num_passes` passes, the last ones without tokens; logits by sequence [T, vocab]."""
        free = torch.randperm(NUM_PAGES, generator=self.generator).tolist()
        tables = [tuple(free.pop() for _ in range(-(-len(s) // PAGE_TOKENS))) for s in sequences]
        found: list[list[torch.Tensor]] = [[] for _ in sequences]
        assert len(schedule) <= num_passes
        for number in range(num_passes):
            parts = schedule[number] if number < len(schedule) else []
            inputs = [
                SequenceInput(
                    token_ids=sequences[part.sequence][part.start : part.start + part.count],
                    first_position=part.start,
                    block_table=tables[part.sequence],
                    logits=part.count,
                )
                for part in parts
            ]
            batch = build_batch(inputs, page_tokens=PAGE_TOKENS)
            dispatcher.begin_pass()
            logits = self.model.forward(batch, self.kv, dispatcher)
            dispatcher.end_pass()
            for part, rows in zip(parts, logits.split([p.count for p in parts]), strict=True):
                found[part.sequence].append(rows)
        return [torch.cat(rows) for rows in found]

    def close(self) -> None:
        self.bank.close()
        self.checkpoint.close()


class ModelRank(DispatchRank):
    """A rank of a real group that computes a real model."""

    def __init__(
        self, board: Board, loaded: LoadedModel, *, backend: TransferBackend = TransferBackend.AUTO
    ) -> None:
        super().__init__(board, layout=loaded.layout, backend=backend)
        self.loaded = loaded

    def enter_epoch(self, epoch: int, expert_map: ExpertMap) -> None:
        """Take part in a new epoch of the map's ranks."""
        self.loaded.hold(expert_map, self.board.rank)
        self.install(epoch, expert_map.ranks, expert_map)


def same_bits(first: Mapping[int, torch.Tensor], second: Mapping[int, torch.Tensor]) -> bool:
    """Whether logits are the same float32 bit patterns (a NaN equals itself, 0.0 is not -0.0)."""
    return first.keys() == second.keys() and all(
        torch.equal(first[n].view(torch.int32), second[n].view(torch.int32)) for n in first
    )
