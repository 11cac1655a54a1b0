"""Runs a model over token ids in any way that serving may: whole, in chunks, among others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from configs.schema import Exactness
from moe_runtime.models.batch import SequenceInput, build_batch
from moe_runtime.models.checkpoint import Checkpoint
from moe_runtime.models.experts import ExpertBank
from moe_runtime.models.paged_kv import PagedKV
from moe_runtime.models.qwen3_moe import Qwen3MoeModel
from tests.support.exchange import Exchange

PAGE_TOKENS = 16
NUM_PAGES = 64


@dataclass
class PlainMemory:
    """Stands in for `transfer.Memory`."""

    tensor: torch.Tensor


def allocate(nbytes: int) -> PlainMemory:
    return PlainMemory(torch.zeros(nbytes, dtype=torch.uint8))


def load_bank(
    checkpoint: Checkpoint, dtype: torch.dtype, experts_of: Callable[[int], Iterable[int]]
) -> ExpertBank:
    bank = ExpertBank(checkpoint.spec, dtype, allocate, slab_bytes=1 << 18)
    for layer in range(checkpoint.spec.num_moe_layers):
        for expert in experts_of(layer):
            blob = bank.as_matrices(bank.reserve(layer, expert))
            checkpoint.read_expert(layer, expert, blob)
            bank.ready(layer, expert)
    return bank


class Rank:
    """One rank: a model, its bank and its own cache, whose pages are handed out in any order."""

    def __init__(
        self,
        directory: Path,
        exchange: Exchange,
        rank: int,
        *,
        dtype: torch.dtype,
        exactness: Exactness = Exactness.BITWISE,
        seed: int = 0,
    ) -> None:
        with Checkpoint(directory) as checkpoint:
            self.spec = checkpoint.spec
            bank = load_bank(checkpoint, dtype, lambda layer: exchange.experts_of(rank, layer))
            self.model = Qwen3MoeModel(
                self.spec, checkpoint, bank, dtype=dtype, exactness=exactness
            )
        self.dispatcher = exchange.dispatcher(rank)
        nbytes = PagedKV.nbytes(NUM_PAGES, self.spec, PAGE_TOKENS, dtype)
        # Old bytes, not zeros: nobody may depend on what a page held before.
        generator = torch.Generator().manual_seed(seed)
        memory = torch.randint(0, 60, (nbytes,), dtype=torch.uint8, generator=generator)
        self.kv = PagedKV(memory, NUM_PAGES, self.spec, PAGE_TOKENS, dtype)
        self._free = torch.randperm(NUM_PAGES, generator=generator).tolist()

    def pages_for(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(self._free.pop() for _ in range(-(-num_tokens // PAGE_TOKENS)))

    def free(self, pages: Iterable[int]) -> None:
        self._free.extend(pages)

    def step(self, sequences: Sequence[SequenceInput]) -> torch.Tensor:
        batch = build_batch(sequences, page_tokens=PAGE_TOKENS)
        return self.model.forward(batch, self.kv, self.dispatcher)

    def logits(self, token_ids: Sequence[int], chunks: Sequence[int]) -> torch.Tensor:
        """Logits of every token of one sequence, computed in chunks of these sizes: [T, vocab]."""
        assert sum(chunks) == len(token_ids)
        pages, start, outputs = self.pages_for(len(token_ids)), 0, []
        for size in chunks:
            part = token_ids[start : start + size]
            outputs.append(self.step([_input(part, start, pages, logits=size)]))
            start += size
        self.free(pages)
        return torch.cat(outputs)

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        pages = self.pages_for(len(prompt) + count)
        logits = self.step([_input(prompt, 0, pages, logits=1)])
        generated = [int(logits[-1].argmax())]
        while len(generated) < count:
            position = len(prompt) + len(generated) - 1
            logits = self.step([_input(generated[-1:], position, pages, logits=1)])
            generated.append(int(logits[-1].argmax()))
        self.free(pages)
        return generated


def _input(
    token_ids: Sequence[int], start: int, pages: tuple[int, ...], *, logits: int
) -> SequenceInput:
    return SequenceInput(
        token_ids=token_ids, first_position=start, block_table=pages, logits=logits
    )


def single_rank(directory: Path, *, dtype: torch.dtype, **options: object) -> Rank:
    """A rank that holds every expert."""
    with Checkpoint(directory) as checkpoint:
        everything = range(checkpoint.spec.num_experts)
    exchange = Exchange(1, lambda rank, layer: everything)
    return Rank(directory, exchange, 0, dtype=dtype, **options)


def run_together(works: Sequence[Callable[[], object]]) -> list[object]:
    """Run one function per simulated rank at once; the first error is raised."""
    results: list[object] = [None] * len(works)
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = works[index]()
        except BaseException as error:  # noqa: BLE001 - carried to the caller
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive(), "a simulated rank hangs"
    if errors:
        raise errors[0]
    return results
