"""A token's logits and cache entries are the same bits however they were computed."""

from __future__ import annotations

import random
import time

import pytest
import torch

from moe_runtime.models.batch import SequenceInput
from tests.support.checkpoints import make_tiny_checkpoint
from tests.support.exchange import Exchange
from tests.support.generation import NUM_PAGES, PAGE_TOKENS, Rank, run_together, single_rank

DTYPES = [torch.float32, torch.bfloat16]
NUM_TOKENS = 150


@pytest.fixture
def rng():
    seed = time.time_ns() % 1_000_000
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.fixture(
    params=[{}, {"moe_intermediate_size": 40, "mlp_only_layers": [0]}], ids=["even", "odd"]
)
def directory(request, tmp_path, rng):
    seed = rng.randrange(1000)
    return make_tiny_checkpoint(tmp_path / "model", seed=seed, attention_bias=True, **request.param)


def cut(rng, total, largest):
    sizes = []
    while sum(sizes) < total:
        sizes.append(min(rng.randint(1, largest), total - sum(sizes)))
    return sizes


def tokens_of(rng, spec, count):
    return [rng.randrange(3, spec.vocab_size) for _ in range(count)]


def among_others(rank, rng, tokens, logits):
    """Compute one sequence in random chunks, each in a batch with chunks of other sequences."""
    pages = rank.pages_for(len(tokens))
    others = [
        (tokens_of(rng, rank.spec, 60), rank.pages_for(60), [0]) for _ in range(rng.randint(1, 4))
    ]
    start, found = 0, []
    for size in cut(rng, len(tokens), 25):
        mine = SequenceInput(
            token_ids=tokens[start : start + size],
            first_position=start,
            block_table=pages,
            logits=size if logits else 0,
        )
        batch = [mine]
        for their_tokens, their_pages, done in others:
            count = min(rng.choice([0, 1, 1, 7, 20]), len(their_tokens) - done[0])
            if count:
                part = their_tokens[done[0] : done[0] + count]
                other = SequenceInput(
                    token_ids=part, first_position=done[0], block_table=their_pages, logits=0
                )
                batch.insert(rng.randint(0, len(batch)), other)
                done[0] += count
        found.append(rank.step(batch))
        start += size
    rank.free(pages)
    for _, their_pages, _ in others:
        rank.free(their_pages)
    return torch.cat(found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chunks_decoding_and_company_do_not_change_a_bit(directory, rng, dtype):
    rank = single_rank(directory, dtype=dtype)
    tokens = tokens_of(rng, rank.spec, NUM_TOKENS)
    expected = rank.logits(tokens, [NUM_TOKENS])
    assert torch.equal(rank.logits(tokens, [1] * NUM_TOKENS), expected), "token by token"
    for _ in range(2):
        chunks = cut(rng, NUM_TOKENS, rng.choice([3, 17, 70]))
        assert torch.equal(rank.logits(tokens, chunks), expected), f"chunks {chunks}"
    for _ in range(2):
        assert torch.equal(among_others(rank, rng, tokens, logits=True), expected), "in batches"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cache_entries_do_not_change_a_bit(directory, rng, dtype):
    rank = single_rank(directory, dtype=dtype)
    tokens = tokens_of(rng, rank.spec, 64)
    tables = [rank.pages_for(64) for _ in range(2)]
    for pages, chunks in zip(tables, ([64], cut(rng, 64, 9)), strict=True):
        start = 0
        for size in chunks:
            part = tokens[start : start + size]
            rank.step([SequenceInput(token_ids=part, first_position=start, block_table=pages)])
            start += size
    first, second = (rank.kv.pages[list(pages)] for pages in tables)
    assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_placement_of_experts_does_not_change_a_bit(directory, rng, dtype, num_ranks):
    whole = single_rank(directory, dtype=dtype)
    spec = whole.spec
    owner = {
        (layer, expert): rng.randrange(num_ranks)
        for layer in range(spec.num_moe_layers)
        for expert in range(spec.num_experts)
    }
    exchange = Exchange(
        num_ranks,
        lambda rank, layer: [e for e in range(spec.num_experts) if owner[layer, e] == rank],
    )
    ranks = [
        Rank(directory, exchange, index, dtype=dtype, seed=index + 1) for index in range(num_ranks)
    ]
    tokens = [tokens_of(rng, spec, 30 + 9 * index) for index in range(num_ranks)]
    # As many steps on every rank; the last rank's chunks differ from the others' throughout.
    chunks = [[1] * 11 + [len(ids) - 11] for ids in tokens]
    chunks[-1].reverse()
    expected = [whole.logits(ids, [len(ids)]) for ids in tokens]
    found = run_together(
        [
            lambda rank=rank, ids=ids, sizes=sizes: rank.logits(ids, sizes)
            for rank, ids, sizes in zip(ranks, tokens, chunks, strict=True)
        ]
    )
    for index in range(num_ranks):
        assert torch.equal(found[index], expected[index]), f"rank {index} of {num_ranks}"


def test_pages_are_enough_for_these_tests():
    assert NUM_PAGES * PAGE_TOKENS >= NUM_TOKENS + 4 * 64 + PAGE_TOKENS
