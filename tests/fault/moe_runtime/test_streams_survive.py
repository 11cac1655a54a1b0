"""Workers are killed, stopped and brought back under load: no stream ends early or differs.

MOE_RUNTIME_KILL_ROUNDS=50 repeats every scenario on one cluster, with fresh prompts each time.
"""

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

ROUNDS = int(os.environ.get("MOE_RUNTIME_KILL_ROUNDS", "1"))
MAX_TOKENS = 120
NUM_STREAMS = 8

pytestmark = pytest.mark.timeout(420 + 180 * ROUNDS)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    seed = random.SystemRandom().randrange(1 << 30)
    return served_checkpoint(tmp_path_factory.mktemp(f"checkpoint-{seed}"), seed=seed)


async def choose_victims(
    client: httpx.AsyncClient, running: Sequence[Stream], count: int
) -> list[dict[str, Any]]:
    """When the streams are well under way, the workers that own most of them.

    None if they are over already, so that the fault would hit nobody's stream.
    """
    total = sum(stream.body["max_tokens"] for stream in running)
    while sum(len(stream.arrivals) for stream in running) < total / 4:
        await asyncio.sleep(0.01)
    members = (await status(client))["members"]
    members.sort(key=lambda member: -member["open_requests"])
    return list(members[:count]) if members[count - 1]["open_requests"] > 0 else []


async def all_back(client: httpx.AsyncClient, without: set[str]) -> dict[str, Any]:
    """Wait until four workers are members and ready, none of them of the old incarnations."""

    def complete(answer: dict[str, Any]) -> bool:
        members = answer["members"]
        names = {member["incarnation"] for member in members if member["said_hello"]}
        return len(names) == len(members) == 4 and not names & without

    return await wait_for(client, complete, "all four slots are members again")


def ranks_of(answer: dict[str, Any]) -> set[int]:
    """Ranks of the current members."""
    return {member["rank"] for member in answer["members"]}


class Scenario:
    """One cluster, and streams run with and without a fault."""

    def __init__(self, client: httpx.AsyncClient, model: str) -> None:
        self.client = client
        self.seed = random.SystemRandom().randrange(1 << 30)
        self.model = model
        self.prompts = random_prompts(random.Random(self.seed), NUM_STREAMS)

    def fresh(self) -> list[Stream]:
        """The streams of this scenario, not started."""
        return streams(self.model, self.prompts, max_tokens=MAX_TOKENS, seed=self.seed)

    async def begin(
        self, victims: int
    ) -> tuple[list[Stream], asyncio.Task[list[str]], list[dict[str, Any]]]:
        """Streams that are under way, who reads them, and members that own some of them."""
        while True:
            disturbed = self.fresh()
            running = asyncio.create_task(run_all(self.client, disturbed))
            if found := await choose_victims(self.client, disturbed, victims):
                return disturbed, running, found
            await running

    async def undisturbed(self) -> list[str]:
        """Their texts when nothing happens."""
        return await run_all(self.client, self.fresh())

    async def finish(self, texts: list[str], expected: list[str], disturbed: list[Stream]) -> None:
        """Every stream is whole and the same, and nothing of it is left at the front."""
        assert texts == expected, f"seed {self.seed}"
        for stream in disturbed:
            assert stream.usage is not None
            assert stream.usage["completion_tokens"] == MAX_TOKENS
        assert (await status(self.client))["open_requests"] == 0


def test_streams_survive_kills_and_a_stop(checkpoint: Path) -> None:
    """One cluster for all scenarios: starting one takes longer than a scenario."""
    asyncio.run(survive_all(checkpoint))


async def survive_all(checkpoint: Path) -> None:
    async with serving(cluster_config(checkpoint)) as (_, client):
        for _ in range(ROUNDS):
            for victims in (1, 2):
                await survive_sigkill(Scenario(client, checkpoint.name), victims)
            await survive_sigstop(Scenario(client, checkpoint.name))


async def survive_sigkill(scenario: Scenario, victims: int) -> None:
    client = scenario.client
    expected = await scenario.undisturbed()
    before = await status(client)
    disturbed, running, killed = await scenario.begin(victims)
    for member in killed:
        os.kill(member["pid"], signal.SIGKILL)
    await scenario.finish(await running, expected, disturbed)
    after = await all_back(client, {member["incarnation"] for member in killed})
    assert after["epoch"] > before["epoch"]
    assert ranks_of(after) == ranks_of(before)
    assert await scenario.undisturbed() == expected


async def survive_sigstop(scenario: Scenario) -> None:
    """A member is stopped and fenced, and the zombie wakes."""
    client = scenario.client
    expected = await scenario.undisturbed()
    disturbed, running, (victim,) = await scenario.begin(1)
    os.kill(victim["pid"], signal.SIGSTOP)
    try:
        texts = await running
        fenced = {m["incarnation"] for m in (await status(client))["members"]}
        assert victim["incarnation"] not in fenced
    finally:
        os.kill(victim["pid"], signal.SIGCONT)
    await scenario.finish(texts, expected, disturbed)
    back = await all_back(client, {victim["incarnation"]})
    # The process that was stopped is the one that is back: it was fenced, not killed.
    assert victim["pid"] in {member["pid"] for member in back["members"]}
    assert await scenario.undisturbed() == expected
