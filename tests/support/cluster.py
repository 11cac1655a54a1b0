"""A real cluster for tests: `LocalCluster` on a small random checkpoint, and streams against it."""

from __future__ import annotations

import asyncio
import json
import random
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
import torch

from configs.schema import RuntimeConfig
from moe_runtime.serve import LocalCluster
from tests.support.checkpoints import make_tiny_checkpoint
from tests.support.tokenizer import write_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

DEADLINE_S = 120.0
VOCABULARY = 384


def served_checkpoint(directory: Path, *, seed: int) -> Path:
    """A small random checkpoint with a tokenizer, ready to be served."""
    make_tiny_checkpoint(directory, seed=seed, dtype=torch.bfloat16, vocab_size=VOCABULARY)
    write_tokenizer(directory)
    return directory


def cluster_config(model: Path, **sections: dict[str, Any]) -> RuntimeConfig:
    """A configuration for tests: free ports, small pools."""
    values: dict[str, Any] = {
        "model": {"path": str(model)},
        "cluster": {"workers": 4},
        "front": {"port": 0},
        "kvstore": {"segment_bytes": 8 << 20},
        "scheduler": {"num_pages": 256, "token_budget": 64, "max_running": 16},
    }
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    return RuntimeConfig.model_validate(values)


@dataclass(slots=True, kw_only=True)
class Stream:
    """One streaming completion."""

    body: dict[str, Any]
    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    arrivals: list[float] = field(default_factory=list)

    async def run(self, client: httpx.AsyncClient) -> None:
        """Read the stream to its end; every error is an assertion."""
        body = self.body | {"stream": True, "stream_options": {"include_usage": True}}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            done = False
            async for line in response.aiter_lines():
                if not line:
                    continue
                assert line.startswith("data: ")
                if line == "data: [DONE]":
                    done = True
                    break
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                self.arrivals.append(time.monotonic())
                for choice in event["choices"]:
                    self.text += choice["text"]
                    self.finish_reason = choice["finish_reason"] or self.finish_reason
                self.usage = event.get("usage") or self.usage
            assert done, "the stream ended without [DONE]"


def random_prompts(rng: random.Random, count: int, *, longest: int = 60) -> list[list[int]]:
    """Token ids of fresh prompts."""
    return [
        [rng.randrange(10, VOCABULARY) for _ in range(rng.randint(4, longest))]
        for _ in range(count)
    ]


def streams(
    model: str, prompts: Sequence[list[int]], *, max_tokens: int, seed: int
) -> list[Stream]:
    """One stream per prompt; every second one is sampled, with its own seed."""
    return [
        Stream(
            body={
                "model": model,
                "prompt": prompt,
                "max_tokens": max_tokens,
                "ignore_eos": True,
                "temperature": 0.9 * (number % 2),
                "seed": seed + number,
            }
        )
        for number, prompt in enumerate(prompts)
    ]


def copies(wanted: Sequence[Stream]) -> list[Stream]:
    """The same requests, not sent yet."""
    return [Stream(body=stream.body) for stream in wanted]


async def run_all(client: httpx.AsyncClient, wanted: Sequence[Stream]) -> list[str]:
    """Run the streams at once; their texts."""
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*(stream.run(client) for stream in wanted))
    return [stream.text for stream in wanted]


async def status(client: httpx.AsyncClient) -> dict[str, Any]:
    """The front's /status."""
    answer: dict[str, Any] = (await client.get("/status")).json()
    return answer


async def wait_for(client: httpx.AsyncClient, condition: Any, what: str) -> dict[str, Any]:
    """Poll /status until `condition(status)` holds."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        answer = await status(client)
        if condition(answer):
            return answer
        await asyncio.sleep(0.05)
    raise AssertionError(f"{what}: not within {DEADLINE_S:.0f} s; last status {answer}")


@asynccontextmanager
async def serving(
    config: RuntimeConfig,
) -> AsyncIterator[tuple[LocalCluster, httpx.AsyncClient]]:
    """A running cluster and a client for it."""
    async with (
        LocalCluster(config) as cluster,
        httpx.AsyncClient(base_url=cluster.url, timeout=DEADLINE_S) as client,
    ):
        yield cluster, client
