"""What a streaming client feels when a worker is killed.

    python -m benchmarks.bench_pause --kills 20

The example model on four workers, four streams. In each round the worker that owns the watched
stream gets SIGKILL in mid-stream. Reported, in milliseconds:

    pause        longest gap between tokens of a stream minus its median gap, streams of the victim
    bystander    the same for the streams of the surviving workers
    detection    from the signal to the first survivor that noticed
    agreement    from there to the committed view
    installation from there to the view installed at every survivor
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import statistics
import time
from itertools import pairwise
from typing import Any

import httpx

from benchmarks.harness import Recorder
from configs import load_config
from moe_runtime.serve import LocalCluster

TOKENS = 160
STREAMS = 4


async def stream(client: httpx.AsyncClient, body: dict[str, Any], arrivals: list[float]) -> str:
    """Read one stream, noting when each piece arrives; its text."""
    text = ""
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                arrivals.append(time.monotonic())
                text += line
    return text


def pause_ms(arrivals: list[float]) -> float:
    """Longest gap minus median gap."""
    gaps = [b - a for a, b in pairwise(arrivals)]
    return (max(gaps) - statistics.median(gaps)) * 1e3


async def members(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    """The members that the front knows."""
    found: list[dict[str, Any]] = (await client.get("/status")).json()["members"]
    return found


async def settled(client: httpx.AsyncClient, count: int) -> None:
    """Wait until all workers are members and have said hello."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        now = await members(client)
        if len(now) == count and all(member["said_hello"] for member in now):
            await asyncio.sleep(1.0)  # loads settle
            return
        await asyncio.sleep(0.1)
    raise TimeoutError("the killed worker did not come back")


async def one_kill(client: httpx.AsyncClient, model: str, rng: random.Random) -> dict[str, float]:
    """Kill one worker under load; the figures."""
    bodies = [
        {
            "model": model,
            "prompt": [rng.randrange(300, 1000) for _ in range(32)],
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "temperature": 0.7,
            "seed": number,
            "stream": True,
        }
        for number in range(STREAMS)
    ]
    arrivals: list[list[float]] = [[] for _ in bodies]
    tasks = [
        asyncio.create_task(stream(client, body, times))
        for body, times in zip(bodies, arrivals, strict=True)
    ]
    while min(map(len, arrivals)) < TOKENS // 4:
        await asyncio.sleep(0.002)
    before = await members(client)
    victim = max(before, key=lambda member: member["open_requests"])
    assert victim["open_requests"] > 0, "the kill would hit nobody's stream"
    killed_at = time.monotonic()
    os.kill(victim["pid"], signal.SIGKILL)
    changes = await view_changes(client, killed_at, len(before) - 1)
    await asyncio.gather(*tasks)
    noticed = min(change["view_noticed_s"] for change in changes)
    committed = min(change["view_committed_s"] for change in changes)
    installed = max(change["view_installed_s"] for change in changes)
    pauses = sorted(map(pause_ms, arrivals))
    return {
        "pause": pauses[-1],
        "bystander": pauses[0],
        "detection": (noticed - killed_at) * 1e3,
        "agreement": (committed - noticed) * 1e3,
        "installation": (installed - committed) * 1e3,
    }


async def view_changes(
    client: httpx.AsyncClient, since: float, count: int
) -> list[dict[str, float]]:
    """When each survivor noticed, saw committed and installed its first view after `since`.

    Clocks are the machine's monotonic one. Read while the streams run: the next view change, when
    the killed worker is back, overwrites the figures.
    """
    first: dict[int, dict[str, float]] = {}
    while len(first) < count:
        for member in await members(client):
            counters = member["counters"]
            if counters.get("view_noticed_s", 0.0) >= since:
                first.setdefault(member["rank"], counters)
        await asyncio.sleep(0.05)
    return list(first.values())


async def measure(kills: int, preset: str) -> dict[str, list[float]]:
    """All kills on one cluster."""
    config = load_config(preset, overrides=["front.port=0"])
    samples: dict[str, list[float]] = {}
    async with (
        LocalCluster(config, quiet=True) as cluster,
        httpx.AsyncClient(base_url=cluster.url, timeout=120) as client,
    ):
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        rng = random.Random()
        for _ in range(kills):
            await settled(client, config.cluster.workers)
            for name, value in (await one_kill(client, model, rng)).items():
                samples.setdefault(name, []).append(value)
    return samples


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--config", default="example")
    options = parser.parse_args()
    recorder = Recorder("pause")
    for name, values in asyncio.run(measure(options.kills, options.config)).items():
        recorder.add(name, "ms", values, streams=STREAMS)
    recorder.write()


if __name__ == "__main__":
    main()
