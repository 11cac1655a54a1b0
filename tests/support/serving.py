"""What a served model must answer, computed apart from serving, and a cluster for many tests."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import torch

from configs.schema import RuntimeConfig
from moe_runtime.models.batch import SequenceInput
from moe_runtime.sampling import SamplingParams, sample
from moe_runtime.serve import LocalCluster
from tests.support.cluster import DEADLINE_S, status, wait_for
from tests.support.generation import Rank

Result = TypeVar("Result")
#: workers report every half second; the load that is shown is of after the requests then
REPORTED_S = 1.0


@dataclass(frozen=True, slots=True)
class Expected:
    """Greedy tokens of transformers, and the least lead of a chosen token over the second."""

    token_ids: list[int]
    lead: float


def greedy_by_transformers(model: Any, prompt: Sequence[int], count: int) -> Expected:
    """Ask transformers' own `generate` for exactly `count` tokens."""
    ids = torch.tensor([list(prompt)])
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.stack(made.logits)[:, 0].topk(2).values
    tokens = made.sequences[0, len(prompt) :].tolist()
    assert len(tokens) == count
    return Expected(tokens, float((best[:, 0] - best[:, 1]).min()))


def sampled_by_one_rank(rank: Rank, prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """Generate token by token on a rank that has all experts; nothing of serving takes part."""
    tokens, computed = list(prompt), 0
    pages = rank.pages_for(len(prompt) + params.max_tokens)
    for _ in range(params.max_tokens):
        part = SequenceInput(
            token_ids=tokens[computed:], first_position=computed, block_table=pages
        )
        computed = len(tokens)
        tokens += sample(rank.step([part]), [params], [computed])
    rank.free(pages)
    return tokens[len(prompt) :]


class ClusterForTests:
    """A running cluster whose event loop runs while a test asks something of it."""

    def __init__(self, runner: asyncio.Runner, client: httpx.AsyncClient, model: str) -> None:
        self._runner = runner
        self.client = client
        self.model = model

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        async def in_time() -> Result:
            async with asyncio.timeout(DEADLINE_S):
                return await work

        return self._runner.run(in_time())

    async def post(self, path: str, **body: Any) -> dict[str, Any]:
        response = await self.client.post(path, json={"model": self.model, **body})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def complete(self, prompt: Sequence[Any], **body: Any) -> dict[str, Any]:
        options = {"ignore_eos": True, "return_token_ids": True}
        return await self.post("/v1/completions", prompt=list(prompt), **(options | body))

    async def tokens(self, prompt: Sequence[int], **body: Any) -> list[int]:
        """Token ids of the only choice."""
        (choice,) = (await self.complete(prompt, **body))["choices"]
        found: list[int] = choice["token_ids"]
        return found

    async def counters(self, name: str) -> dict[str, float]:
        """One counter by member, as they last reported it."""
        members = (await status(self.client))["members"]
        return {m["incarnation"]: m["counters"].get(name, 0.0) for m in members}

    async def until_everything_is_back(self) -> dict[str, Any]:
        """Wait until no request is open and every page of every member is available."""
        await asyncio.sleep(REPORTED_S)

        def is_back(answer: dict[str, Any]) -> bool:
            return answer["open_requests"] == 0 and all(
                m["free_pages"] == m["num_pages"] and not m["running"] and not m["waiting"]
                for m in answer["members"]
            )

        return await wait_for(self.client, is_back, "all pages are back")


@contextmanager
def running_cluster(config: RuntimeConfig) -> Iterator[ClusterForTests]:
    """Start a cluster that several tests share."""
    with asyncio.Runner() as runner:
        cluster = LocalCluster(config)
        try:
            runner.run(cluster.start())
            client = httpx.AsyncClient(base_url=cluster.url, timeout=DEADLINE_S)
            yield ClusterForTests(runner, client, Path(config.model.path).name)
            runner.run(client.aclose())
        finally:
            runner.run(cluster.stop())
