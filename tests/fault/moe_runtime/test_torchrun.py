"""Workers under torchrun, which restarts all of its workers when one dies, beside another agent."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from typing import TYPE_CHECKING, Any

import httpx

from tests.support.cluster import (
    DEADLINE_S,
    cluster_config,
    copies,
    random_prompts,
    run_all,
    served_checkpoint,
    status,
    streams,
    wait_for,
)
from tests.support.serve_process import CommandProcess, ServeProcess

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.support.cluster import Stream

MAX_TOKENS = 120
STOP_S_MAX = 120.0


def torchrun(config_file: str, folder: Path) -> CommandProcess:
    arguments = [
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("--max-restarts", "3", "-m", "moe_runtime.worker", "--config", config_file),
    ]
    return CommandProcess(arguments, folder)


def launch(config_file: str, folder: Path) -> CommandProcess:
    arguments = ["-m", "moe_runtime", "launch", "--workers", "2", "--config", config_file]
    return CommandProcess(arguments, folder)


def incarnations(answer: dict[str, Any]) -> dict[int, str]:
    return {m["rank"]: m["incarnation"] for m in answer["members"] if m["said_hello"]}


def test_streams_survive_when_torchrun_restarts_its_workers(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    checkpoint = served_checkpoint(tmp_path / f"checkpoint-{seed}", seed=seed)
    config = cluster_config(checkpoint, cluster={"workers": 2})
    with ServeProcess(config, tmp_path / "front", "--no-workers") as served:
        served.wait_until_serving()
        config_file = served.wait_for_line(r"torchrun .* -m moe_runtime.worker --config (\S+)")[1]
        with torchrun(config_file, tmp_path / "torchrun") as first:
            wanted = streams(
                checkpoint.name,
                random_prompts(random.Random(seed), 8),
                max_tokens=MAX_TOKENS,
                seed=seed,
            )
            undisturbed = asyncio.run(served_by_torchrun(served, wanted))
            with launch(config_file, tmp_path / "launch") as second:
                try:
                    asyncio.run(torchrun_restarts(served, first, wanted, undisturbed))
                    served.send(signal.SIGTERM)
                    assert served.wait(STOP_S_MAX) == 0
                    # The workers were told, so no agent takes it for a failure.
                    assert first.process.wait(timeout=STOP_S_MAX) == 0
                    assert second.process.wait(timeout=STOP_S_MAX) == 0
                except BaseException:
                    for process in (served, first, second):
                        print(process.story())  # pytest shows it
                    raise
                for process in (served, first, second):
                    process.assert_all_gone()


async def served_by_torchrun(served: ServeProcess, wanted: Sequence[Stream]) -> list[str]:
    """The texts of the streams on torchrun's two workers alone."""
    async with httpx.AsyncClient(base_url=served.url, timeout=DEADLINE_S) as client:
        await wait_for(client, lambda answer: set(incarnations(answer)) == {0, 1}, "two ranks")
        return await run_all(client, copies(wanted))


async def torchrun_restarts(
    served: ServeProcess,
    torchrun: CommandProcess,
    wanted: Sequence[Stream],
    undisturbed: list[str],
) -> None:
    async with httpx.AsyncClient(base_url=served.url, timeout=DEADLINE_S) as client:
        whole = await wait_for(
            client, lambda answer: set(incarnations(answer)) == {0, 1, 2, 3}, "four ranks joined"
        )
        nodes = {member["rank"]: member["node"] for member in whole["members"]}
        assert nodes[0] == nodes[1] != nodes[2] == nodes[3], "each agent is a node of its own"
        ours = [member for member in whole["members"] if member["rank"] in (0, 1)]
        workers = {process.pid for process in torchrun.descendants("moe_runtime.worker")}
        assert {member["pid"] for member in ours} == workers
        disturbed = copies(wanted)
        running = asyncio.create_task(run_all(client, disturbed))
        while sum(len(stream.arrivals) for stream in disturbed) < len(wanted) * MAX_TOKENS / 4:
            await asyncio.sleep(0.01)
        owned = {m["pid"]: m["open_requests"] for m in (await status(client))["members"]}
        victim = max(workers, key=lambda pid: owned[pid])
        assert owned[victim] > 0, "the fault would hit nobody's stream"
        os.kill(victim, signal.SIGKILL)
        assert await running == undisturbed
        before = incarnations(whole)

        def is_back(answer: dict[str, Any]) -> bool:
            now = incarnations(answer)
            new = {rank for rank in now if now[rank] != before.get(rank)}
            return set(now) == {0, 1, 2, 3} and new == {0, 1}

        back = await wait_for(client, is_back, "torchrun's workers joined again at their ranks")
        assert {member["rank"]: member["node"] for member in back["members"]} == nodes
        assert await run_all(client, copies(wanted)) == undisturbed
        assert (await status(client))["open_requests"] == 0
