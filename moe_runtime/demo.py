"""`moe-runtime demo`: kill a worker under load and watch the streams go on.

    1. start the cluster (as `serve` does)     3. the same streams again; kill -9 their worker
    2. run the streams undisturbed             4. wait until it is back; compare every stream

The exit status is 0 only if every disturbed stream equals its undisturbed run.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click
import httpx
from rich.console import Console
from rich.live import Live
from rich.table import Table

from moe_runtime.options import config_options, failures_in_one_line, load_from_options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moe_runtime.serve import LocalCluster

PROMPTS = (
    "In the beginning",
    "And it came to pass",
    "The voice of the people",
    "Now these are the names of",
    "He said unto them",
    "There was a man in the land",
)
POLL_INTERVAL_S = 0.1
WAIT_S_MAX = 120.0


@dataclass(slots=True, kw_only=True)
class Stream:
    """One streaming completion and what arrived of it."""

    prompt: str
    seed: int
    temperature: float
    max_tokens: int
    text: str = ""
    tokens: int = 0
    finish_reason: str | None = None
    gap_s_max: float = 0.0

    def body(self, model: str) -> dict[str, object]:
        """The request, the same in both runs."""
        return {
            "model": model,
            "prompt": self.prompt,
            "seed": self.seed,
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }

    async def run(self, client: httpx.AsyncClient, model: str) -> None:
        """Read the stream to its end."""
        last = time.monotonic()
        async with client.stream("POST", "/v1/completions", json=self.body(model)) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                data = line.removeprefix("data: ")
                if not line.startswith("data: ") or data == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise click.ClickException(f"stream failed: {event['error']}")
                now = time.monotonic()
                if self.tokens:
                    self.gap_s_max = max(self.gap_s_max, now - last)
                last = now
                for choice in event["choices"]:
                    self.text += choice["text"]
                    self.tokens += len(choice["token_ids"])
                    self.finish_reason = choice["finish_reason"] or self.finish_reason


@dataclass(slots=True)
class Story:
    """What the table shows below the streams."""

    console: Console
    start: float = field(default_factory=time.monotonic)
    events: list[str] = field(default_factory=list)
    epoch: int | None = None
    ranks: tuple[int, ...] = ()

    def tell(self, event: str) -> None:
        """Add a line with its time."""
        self.events.append(f"{time.monotonic() - self.start:6.2f} s  {event}")

    def observe(self, status: dict[str, Any]) -> None:
        """Tell of a view that is new."""
        epoch, ranks = status["epoch"], tuple(m["rank"] for m in status["members"])
        if self.epoch is not None and epoch != self.epoch:
            self.tell(f"view {self.epoch} -> {epoch}: ranks {list(ranks)}")
        self.epoch, self.ranks = epoch, ranks

    def table(self, streams: Sequence[Stream], title: str) -> Table:
        """The live picture."""
        table = Table(title=f"{title}   view {self.epoch}, ranks {list(self.ranks)}")
        table.add_column("stream", width=28, no_wrap=True)
        table.add_column("tokens", justify="right")
        table.add_column("longest gap", justify="right")
        table.add_column("text", no_wrap=True, width=60)
        for stream in streams:
            table.add_row(
                stream.prompt,
                f"{stream.tokens}/{stream.max_tokens}",
                f"{stream.gap_s_max * 1e3:.0f} ms",
                stream.text[-58:].replace("\n", " "),
            )
        table.caption = "\n".join(self.events[-6:])
        table.caption_justify = "left"
        return table


def make_streams(count: int, max_tokens: int) -> list[Stream]:
    """Half greedy, half sampled with a seed."""
    return [
        Stream(
            prompt=PROMPTS[number % len(PROMPTS)],
            seed=number,
            temperature=0.8 * (number % 2),
            max_tokens=max_tokens,
        )
        for number in range(count)
    ]


async def run_streams(
    client: httpx.AsyncClient, model: str, streams: Sequence[Stream], story: Story, title: str
) -> None:
    """Run all streams at once under a live table."""
    tasks = [asyncio.create_task(stream.run(client, model)) for stream in streams]
    with Live(console=story.console, refresh_per_second=8) as live:
        while not all(task.done() for task in tasks):
            story.observe((await client.get("/status")).json())
            live.update(story.table(streams, title))
            await asyncio.sleep(POLL_INTERVAL_S)
        live.update(story.table(streams, title))
    await asyncio.gather(*tasks)


async def kill_busiest_worker(
    client: httpx.AsyncClient, streams: Sequence[Stream], story: Story
) -> int:
    """When a third of the tokens are out, kill -9 the busiest worker; returns its rank."""
    total = sum(stream.max_tokens for stream in streams)
    while sum(stream.tokens for stream in streams) < total / 3:
        await asyncio.sleep(POLL_INTERVAL_S / 4)
    members = (await client.get("/status")).json()["members"]
    victim = max(members, key=lambda member: member["open_requests"])
    os.kill(victim["pid"], signal.SIGKILL)
    story.tell(
        f"kill -9 {victim['pid']}: rank {victim['rank']} with {victim['open_requests']} streams"
    )
    return int(victim["rank"])


async def wait_for_rank(client: httpx.AsyncClient, rank: int, story: Story) -> None:
    """Wait until the killed rank is a member again."""
    deadline = time.monotonic() + WAIT_S_MAX
    while time.monotonic() < deadline:
        story.observe((await client.get("/status")).json())
        if rank in story.ranks:
            story.tell(f"rank {rank} is back")
            return
        await asyncio.sleep(POLL_INTERVAL_S)
    raise click.ClickException(f"rank {rank} did not come back within {WAIT_S_MAX:.0f} s")


async def run_demo(cluster: LocalCluster, *, num_streams: int, max_tokens: int) -> bool:
    """The whole demonstration on a running cluster; True if every stream is identical."""
    console = Console()
    story = Story(console)
    limits = httpx.Limits(max_connections=num_streams + 4)
    async with httpx.AsyncClient(base_url=cluster.url, timeout=WAIT_S_MAX, limits=limits) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        undisturbed = make_streams(num_streams, max_tokens)
        await run_streams(client, model, undisturbed, story, "undisturbed")
        disturbed = make_streams(num_streams, max_tokens)
        kill = asyncio.create_task(kill_busiest_worker(client, disturbed, story))
        await run_streams(client, model, disturbed, story, "with a kill")
        await wait_for_rank(client, await kill, story)
    for line in story.events:
        console.print(line, highlight=False)
    same = [a.text == b.text and bool(a.text) for a, b in zip(undisturbed, disturbed, strict=True)]
    gap_ms = max(stream.gap_s_max for stream in disturbed) * 1e3
    console.print(
        f"{sum(same)} of {len(same)} streams identical to the undisturbed run; "
        f"longest gap {gap_ms:.0f} ms"
    )
    return all(same)


@click.command("demo")
@config_options(default_preset="example")
@click.option(
    "--streams", type=click.IntRange(1, 256), default=6, show_default=True, help="Streams at once."
)
@click.option(
    "--tokens", type=click.IntRange(16), default=200, show_default=True, help="Tokens per stream."
)
def demo_command(streams: int, tokens: int, **options: object) -> None:
    """Kill a worker in mid-stream and compare every stream with its undisturbed run."""
    from moe_runtime.serve import LocalCluster

    config = load_from_options(options, extra=("front.port=0",), for_workers=True)

    async def main() -> bool:
        async with LocalCluster(config) as cluster:
            return await run_demo(cluster, num_streams=streams, max_tokens=tokens)

    with failures_in_one_line():
        same = asyncio.run(main())
    if not same:
        raise click.ClickException("a stream differs from its undisturbed run")
