"""`moe-runtime serve` as its user meets it: started, drained, interrupted, killed."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import time
from typing import TYPE_CHECKING

import httpx
import pytest

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
from tests.support.serve_process import ServeProcess

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.support.cluster import Stream

MAX_TOKENS = 200
STOP_S_MAX = 120.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    seed = random.SystemRandom().randrange(1 << 30)
    return served_checkpoint(tmp_path_factory.mktemp(f"checkpoint-{seed}"), seed=seed)


def serve(checkpoint: Path, tmp_path: Path) -> ServeProcess:
    return ServeProcess(cluster_config(checkpoint, cluster={"workers": 2}), tmp_path)


def client_of(served: ServeProcess) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=served.url, timeout=DEADLINE_S)


def fresh_streams(checkpoint: Path, count: int, max_tokens: int = MAX_TOKENS) -> list[Stream]:
    seed = random.SystemRandom().randrange(1 << 30)
    prompts = random_prompts(random.Random(seed), count)
    return streams(checkpoint.name, prompts, max_tokens=max_tokens, seed=seed)


async def under_way(running: Sequence[Stream], each: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while min(len(stream.arrivals) for stream in running) < each:
            await asyncio.sleep(0.01)


def assert_nothing_left(served: ServeProcess) -> None:
    served.assert_all_gone()
    assert list(served.temporary.iterdir()) == []


def run_printed_command(served: ServeProcess) -> str:
    """Run the command that `serve` prints; the text of the answer."""
    line = served.wait_for_line(r"^\s+curl ")[0] and served.lines[-1].strip()
    if shutil.which("curl"):
        command = ["bash", "-c", f"{line} --silent --show-error --fail"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout
    words = shlex.split(line)
    name, _, value = words[words.index("-H") + 1].partition(": ")
    url = next(word for word in words if word.startswith("http"))
    content = words[words.index("-d") + 1]
    return httpx.post(url, content=content, headers={name: value}, timeout=60).text


def test_the_printed_command_works_and_sigterm_drains(checkpoint: Path, tmp_path: Path) -> None:
    with serve(checkpoint, tmp_path) as served:
        served.wait_until_serving()
        events = [line for line in run_printed_command(served).splitlines() if line]
        assert events[-1] == "data: [DONE]"
        first = json.loads(events[0].removeprefix("data: "))
        assert (first["object"], first["model"]) == ("text_completion", checkpoint.name)
        served.assert_no_shared_memory_files()
        asyncio.run(drained_by_sigterm(served, checkpoint))
        assert served.wait(STOP_S_MAX) == 0, served.story()
        assert served.lines[-1] == "moe-runtime: stopped"
        assert_nothing_left(served)


async def drained_by_sigterm(served: ServeProcess, checkpoint: Path) -> None:
    async with client_of(served) as client:
        running = fresh_streams(checkpoint, 2, max_tokens=450)
        ending = asyncio.create_task(run_all(client, running))
        await under_way(running, 5)
        served.send(signal.SIGTERM)
        while not (await status(client))["draining"]:
            await asyncio.sleep(0.01)
        late = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
        assert late.status_code == 503
        assert late.json()["error"]["message"] == "the server is shutting down"
        assert not ending.done(), "the streams were over before the new request was refused"
        await ending
        assert [(stream.usage or {})["completion_tokens"] for stream in running] == [450] * 2
        assert [stream.finish_reason for stream in running] == ["length"] * 2


def test_a_second_ctrl_c_stops_at_once(checkpoint: Path, tmp_path: Path) -> None:
    with serve(checkpoint, tmp_path) as served:
        served.wait_until_serving()
        asyncio.run(cut_by_sigint(served, checkpoint))
        assert served.wait(STOP_S_MAX) == 0, served.story()
        assert served.lines[-1] == "moe-runtime: stopped, requests were cut"
        assert_nothing_left(served)


async def cut_by_sigint(served: ServeProcess, checkpoint: Path) -> None:
    async with client_of(served) as client:
        (stream,) = fresh_streams(checkpoint, 1, max_tokens=450)
        running = asyncio.create_task(stream.run(client))
        await under_way([stream], 5)
        served.send(signal.SIGINT)
        await asyncio.to_thread(served.wait_for_line, "draining")
        served.send(signal.SIGINT)
        with pytest.raises(AssertionError, match="the server was stopped"):
            await running
        assert served.process.wait(timeout=STOP_S_MAX) == 0


def test_ctrl_c_while_the_workers_start(checkpoint: Path, tmp_path: Path) -> None:
    with serve(checkpoint, tmp_path) as served:
        deadline = time.monotonic() + DEADLINE_S
        while len(served.descendants("moe_runtime.worker")) < 2:
            assert time.monotonic() < deadline, served.story()
            time.sleep(0.02)
        served.send(signal.SIGINT)
        assert served.wait(STOP_S_MAX) == 0, served.story()
        assert served.lines == ["moe-runtime: stopped before it was ready"]
        assert_nothing_left(served)


def test_streams_survive_the_agent_and_nothing_survives_serve(
    checkpoint: Path, tmp_path: Path
) -> None:
    with serve(checkpoint, tmp_path) as served:
        served.wait_until_serving()
        asyncio.run(agent_killed(served, checkpoint))
        everybody = served.descendants()
        assert len(everybody) >= 3
        served.send(signal.SIGKILL)
        assert served.wait(STOP_S_MAX) == -signal.SIGKILL
        served.assert_all_gone()


async def agent_killed(served: ServeProcess, checkpoint: Path) -> None:
    async with client_of(served) as client:
        wanted = fresh_streams(checkpoint, 4)
        undisturbed = await run_all(client, wanted)
        disturbed = copies(wanted)
        ending = asyncio.create_task(run_all(client, disturbed))
        await under_way(disturbed, 10)
        before = await status(client)
        first, old = served.agent, served.descendants("moe_runtime.worker")
        assert len(old) == 2
        os.kill(first.pid, signal.SIGKILL)
        assert await ending == undisturbed
        assert served.agent.pid != first.pid
        names = {member["incarnation"] for member in before["members"]}

        def is_whole(answer: dict[str, list[dict[str, object]]]) -> bool:
            return {m["rank"] for m in answer["members"] if m["incarnation"] not in names} == {0, 1}

        await wait_for(client, is_whole, "the ranks are back under the new agent")
        assert not any(worker.is_running() for worker in old)
        assert (await status(client))["open_requests"] == 0


def test_an_agent_that_is_stopped_ends_serve(checkpoint: Path, tmp_path: Path) -> None:
    with serve(checkpoint, tmp_path) as served:
        served.wait_until_serving()
        os.kill(served.agent.pid, signal.SIGTERM)
        assert served.wait(2 * STOP_S_MAX) == 1, served.story()
        said = served.log.read_text()
        assert "moe-runtime: the agent ended with status 0\n" in said
        assert "Error" not in said
        assert_nothing_left(served)
