"""Workers are killed, stopped and brought back under load: no stream ends early or differs."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.cluster import (
    cluster_config,
    random_prompts,
    run_all,
    served_checkpoint,
    serving,
    status,
    streams,
    wait_for,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import httpx

    from tests.support.cluster import Stream

MAX_TOKENS = 120


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    seed = random.SystemRandom().randrange(1 << 30)
    return served_checkpoint(tmp_path_factory.mktemp(f"checkpoint-{seed}"), seed=seed)


def kill(members: Sequence[dict[str, Any]]) -> None:
    for member in members:
        os.kill(member["pid"], signal.SIGKILL)


async def disturb(
    client: httpx.AsyncClient, running: Sequence[Stream], *, victims: int
) -> list[dict[str, Any]]:
    """When the streams are well under way, choose the workers that own most of them."""
    total = sum(stream.body["max_tokens"] for stream in running)
    while sum(len(stream.arrivals) for stream in running) < total / 4:
        await asyncio.sleep(0.01)
    members = (await status(client))["members"]
    members.sort(key=lambda member: -member["open_requests"])
    assert members[victims - 1]["open_requests"] > 0, "the fault would hit nobody's stream"
    return list(members[:victims])


@pytest.mark.parametrize("victims", [1, 2])
def test_sigkill(checkpoint: Path, victims: int) -> None:
    asyncio.run(streams_survive_sigkill(checkpoint, victims))


async def streams_survive_sigkill(checkpoint: Path, victims: int) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    prompts = random_prompts(random.Random(seed), 8)
    async with serving(cluster_config(checkpoint)) as (_, client):
        name = checkpoint.name
        undisturbed = await run_all(
            client, streams(name, prompts, max_tokens=MAX_TOKENS, seed=seed)
        )
        disturbed = streams(name, prompts, max_tokens=MAX_TOKENS, seed=seed)
        running = asyncio.create_task(run_all(client, disturbed))
        before = await status(client)
        killed = await disturb(client, disturbed, victims=victims)
        kill(killed)
        texts = await running
        assert texts == undisturbed, f"seed {seed}"
        assert all(stream.usage["completion_tokens"] == MAX_TOKENS for stream in disturbed)
        names = {member["incarnation"] for member in killed}

        def is_back(answer: dict[str, Any]) -> bool:
            now = {member["incarnation"] for member in answer["members"]}
            return len(now) == 4 and not now & names

        after = await wait_for(client, is_back, "the killed workers' slots are members again")
        assert after["epoch"] > before["epoch"]
        assert {m["rank"] for m in after["members"]} == {m["rank"] for m in before["members"]}
        again = await run_all(client, streams(name, prompts, max_tokens=MAX_TOKENS, seed=seed))
        assert again == undisturbed
        assert (await status(client))["open_requests"] == 0


def test_sigstop_and_the_zombie_wakes(checkpoint: Path) -> None:
    asyncio.run(streams_survive_sigstop(checkpoint))


async def streams_survive_sigstop(checkpoint: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    prompts = random_prompts(random.Random(seed), 8)
    async with serving(cluster_config(checkpoint)) as (_, client):
        name = checkpoint.name
        undisturbed = await run_all(
            client, streams(name, prompts, max_tokens=MAX_TOKENS, seed=seed)
        )
        disturbed = streams(name, prompts, max_tokens=MAX_TOKENS, seed=seed)
        running = asyncio.create_task(run_all(client, disturbed))
        (victim,) = await disturb(client, disturbed, victims=1)
        os.kill(victim["pid"], signal.SIGSTOP)
        try:
            texts = await running
            fenced = await status(client)
            assert victim["incarnation"] not in {m["incarnation"] for m in fenced["members"]}
        finally:
            os.kill(victim["pid"], signal.SIGCONT)
        assert texts == undisturbed, f"seed {seed}"

        def is_back(answer: dict[str, Any]) -> bool:
            return any(member["pid"] == victim["pid"] for member in answer["members"])

        back = await wait_for(client, is_back, "the stopped process is a member again")
        (member,) = [m for m in back["members"] if m["pid"] == victim["pid"]]
        assert member["incarnation"] != victim["incarnation"]
        assert member["rank"] == victim["rank"]
        again = await run_all(client, streams(name, prompts, max_tokens=MAX_TOKENS, seed=seed))
        assert again == undisturbed
