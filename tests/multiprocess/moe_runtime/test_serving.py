"""A served checkpoint answers as transformers does, on one worker as on four, and leaks nothing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from moe_runtime.sampling import SamplingParams
from tests.support.checkpoints import make_tiny_checkpoint, reference_model
from tests.support.cluster import VOCABULARY, cluster_config, random_prompts, wait_for
from tests.support.generation import single_rank
from tests.support.serving import (
    ClusterForTests,
    greedy_by_transformers,
    running_cluster,
    sampled_by_one_rank,
)
from tests.support.tokenizer import write_tokenizer

MAX_TOKENS = 40
LEAD_MIN = 1e-3  # of the chosen logit: closer ones may change places by rounding alone
PAGE_TOKENS = 16
LONG_PROMPT = 6 * PAGE_TOKENS + 5
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"temperature": 1.2, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 12},
]


@dataclass(frozen=True)
class Truth:
    """A checkpoint, and answers that were computed without serving it."""

    directory: Path
    seed: int
    greedy: list[tuple[list[int], list[int]]]
    messages: list[dict[str, str]]
    chat: list[int]
    sampled: list[tuple[list[int], dict[str, Any], list[list[int]]]]


def make_checkpoint(directory: Path, seed: int) -> Tokenizer:
    make_tiny_checkpoint(directory, seed=seed, num_experts=7, vocab_size=VOCABULARY)
    return write_tokenizer(directory)


def sampled_answers(directory: Path, prompts: list[list[int]], seed: int) -> list[Any]:
    rank = single_rank(directory, dtype=torch.float32)
    answers = []
    for prompt, options in zip(prompts, SAMPLING, strict=True):
        several = [
            SamplingParams(seed=seed + choice, max_tokens=MAX_TOKENS, **options)
            for choice in range(3)
        ]
        made = [sampled_by_one_rank(rank, prompt, params) for params in several]
        answers.append((prompt, options, made))
    return answers


def chat_answer(
    model: Any, tokenizer: Tokenizer, rng: random.Random
) -> tuple[list[dict[str, str]], list[int]]:
    """A conversation, and the greedy answer to it."""
    while True:
        words = " ".join(rng.choices(["fox", "dog", "quick", "lazy", "beginning"], k=6))
        messages = [
            {"role": "system", "content": "You are brief."},
            {"role": "user", "content": f"Tell me of {words}."},
        ]
        text = "".join(f"<|turn|>{m['role']}\n{m['content']}<|end|>\n" for m in messages)
        prompt = tokenizer.encode(text + "<|turn|>assistant\n", add_special_tokens=False).ids
        answer = greedy_by_transformers(model, prompt, MAX_TOKENS)
        if answer.lead > LEAD_MIN:
            return messages, answer.token_ids


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    seed = random.SystemRandom().randrange(1 << 30)
    rng = random.Random(seed)
    directory = tmp_path_factory.mktemp(f"checkpoint-{seed}")
    tokenizer = make_checkpoint(directory, seed)
    model = reference_model(directory)
    greedy: list[tuple[list[int], list[int]]] = []
    while len(greedy) < 8:
        (prompt,) = random_prompts(rng, 1)
        expected = greedy_by_transformers(model, prompt, MAX_TOKENS)
        if expected.lead > LEAD_MIN:
            greedy.append((prompt, expected.token_ids))
    messages, chat = chat_answer(model, tokenizer, rng)
    return Truth(
        directory=directory,
        seed=seed,
        greedy=greedy,
        messages=messages,
        chat=chat,
        sampled=sampled_answers(directory, random_prompts(rng, len(SAMPLING)), seed),
    )


@pytest.fixture(scope="module", params=[1, 3, 4])
def cluster(request: pytest.FixtureRequest, truth: Truth) -> Iterator[ClusterForTests]:
    """One worker has so few pages that requests push each other out."""
    workers: int = request.param
    scheduler = {"token_budget": 48, "num_pages": 16 if workers == 1 else 128}
    config = cluster_config(truth.directory, cluster={"workers": workers}, scheduler=scheduler)
    with running_cluster(config) as running:
        yield running


def test_greedy_is_what_transformers_generates(cluster: ClusterForTests, truth: Truth) -> None:
    async def ask() -> None:
        asked = [
            cluster.tokens(prompt, max_tokens=MAX_TOKENS, temperature=0)
            for prompt, _ in truth.greedy
        ]
        together = await asyncio.gather(*asked)
        assert together == [tokens for _, tokens in truth.greedy], f"seed {truth.seed}"
        prompt, tokens = truth.greedy[0]
        assert await cluster.tokens(prompt, max_tokens=MAX_TOKENS, temperature=0) == tokens
        stopped = await cluster.complete(
            prompt, max_tokens=MAX_TOKENS, temperature=0, stop_token_ids=[tokens[20]]
        )
        (choice,) = stopped["choices"]
        assert choice["finish_reason"] == "stop"
        assert choice["token_ids"] == tokens[: tokens.index(tokens[20]) + 1]
        preemptions = await cluster.counters("preemptions")
        await cluster.until_everything_is_back()
        if len(preemptions) == 1:
            preemptions = await cluster.counters("preemptions")
            assert sum(preemptions.values()) > 0, "the pages were meant to be too few"

    cluster.run(ask())


def test_sampled_tokens_depend_on_seed_and_prompt_only(
    cluster: ClusterForTests, truth: Truth
) -> None:
    async def ask() -> None:
        answers = await asyncio.gather(
            *(
                cluster.complete(prompt, n=3, seed=truth.seed, max_tokens=MAX_TOKENS, **options)
                for prompt, options, _ in truth.sampled
            )
        )
        found = [[choice["token_ids"] for choice in answer["choices"]] for answer in answers]
        assert found == [expected for _, _, expected in truth.sampled], f"seed {truth.seed}"
        for answer, (prompt, _, _) in zip(answers, truth.sampled, strict=True):
            assert answer["usage"]["prompt_tokens"] == len(prompt)
            assert answer["usage"]["completion_tokens"] == 3 * MAX_TOKENS

    cluster.run(ask())


def test_chat(cluster: ClusterForTests, truth: Truth) -> None:
    async def ask() -> None:
        answer = await cluster.post(
            "/v1/chat/completions",
            messages=truth.messages,
            temperature=0,
            max_tokens=MAX_TOKENS,
            ignore_eos=True,
            return_token_ids=True,
        )
        (choice,) = answer["choices"]
        assert choice["token_ids"] == truth.chat, f"seed {truth.seed}"
        assert choice["message"]["role"] == "assistant"

    cluster.run(ask())


def test_a_prefix_is_computed_once(cluster: ClusterForTests) -> None:
    """Again on the worker that computed it, then on all the others, which copy it from the pool."""
    prompt = [random.SystemRandom().randrange(10, VOCABULARY) for _ in range(LONG_PROMPT)]
    full = LONG_PROMPT // PAGE_TOKENS

    async def answer() -> tuple[int, list[int]]:
        body = await cluster.complete(prompt, max_tokens=4, temperature=0)
        cached: int = body["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached, body["choices"][0]["token_ids"]

    async def total(name: str) -> float:
        return sum((await cluster.counters(name)).values())

    async def ask() -> None:
        await cluster.until_everything_is_back()
        stored, fetched = await total("pool_blocks_stored"), await total("pool_blocks_fetched")
        first, tokens = await answer()
        assert first == 0
        assert await answer() == (full * PAGE_TOKENS, tokens)

        def is_stored(report: dict[str, Any]) -> bool:
            counts = [m["counters"].get("pool_blocks_stored", 0) for m in report["members"]]
            return sum(counts) >= stored + full

        await wait_for(cluster.client, is_stored, "the prompt's blocks are in the pool")
        assert await total("pool_blocks_fetched") == fetched, "the same worker had them"
        before = await cluster.counters("pool_blocks_fetched")
        # In one request, so that none is over before the next is given to a worker.
        together = await cluster.complete([prompt] * len(before), max_tokens=4, temperature=0)
        assert [choice["token_ids"] for choice in together["choices"]] == [tokens] * len(before)
        details = together["usage"]["prompt_tokens_details"]
        assert details["cached_tokens"] == len(before) * full * PAGE_TOKENS
        expected = [0] + [full] * (len(before) - 1)

        def copied(report: dict[str, Any]) -> list[float]:
            now = {m["incarnation"]: m["counters"] for m in report["members"]}
            return sorted(now[name].get("pool_blocks_fetched", 0) - before[name] for name in now)

        await wait_for(cluster.client, lambda report: copied(report) == expected, "told of")
        assert copied(await cluster.until_everything_is_back()) == expected

    cluster.run(ask())


def test_clients_that_hang_up_leave_nothing_behind(cluster: ClusterForTests, truth: Truth) -> None:
    async def hang_up(prompt: list[int], events: int, n: int) -> None:
        body = {
            "model": cluster.model,
            "prompt": prompt,
            "max_tokens": 180,
            "ignore_eos": True,
            "stream": True,
            "n": n,
        }
        async with cluster.client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                events -= line.startswith("data: ")
                if events <= 0:
                    return

    async def ask() -> None:
        rng = random.Random(truth.seed)
        before = (await cluster.until_everything_is_back())["journal"]
        prompts = random_prompts(rng, 6)
        await asyncio.gather(
            *(
                hang_up(prompt, rng.randint(1, 20), 1 + number % 2)
                for number, prompt in enumerate(prompts)
            )
        )
        after = (await cluster.until_everything_is_back())["journal"]
        assert after["cancelled"] - before.get("cancelled", 0) == 9
        prompt, tokens = truth.greedy[1]
        assert await cluster.tokens(prompt, max_tokens=MAX_TOKENS, temperature=0) == tokens

    cluster.run(ask())
