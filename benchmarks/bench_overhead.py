"""What the elastic machinery costs while nothing fails.

    python -m benchmarks.bench_overhead --rounds 9

Two clusters of four workers on the 111 M checkpoint, in turns, 8 requests of 64 + 128 tokens:

    full     everything as configured by default
    plain    no KV pool (no write-through, no expert backup), and the record is never watched

Compared are the rate, and the processor time per token: with the cores saturated the two say the
same, but processor time does not count what else the machine does.

What both have cannot be switched off: epochs in every message, the request journal, and the look
for view changes between passes. The last is measured by itself, in microseconds per call.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import secrets
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.bench_serving import Ours, serving
from benchmarks.harness import Recorder
from benchmarks.serving_checkpoint import write_checkpoint
from configs.schema import ElasticConfig, TransferConfig
from elastic import Coordinator, Member, Role, TCPStoreMembership
from transfer import TransferEngine

if TYPE_CHECKING:
    from collections.abc import Mapping

    from elastic import View

REQUESTS = 8
PROMPT_TOKENS = 64
OUTPUT_TOKENS = 128
VARIANTS = {
    "full": {"cluster": {"workers": 4}},
    "plain": {
        "cluster": {"workers": 4},
        "kvstore": {"enabled": False},
        "elastic": {"watch_interval_s": 3600.0},
    },
}


class Alone:
    """A group member with nothing to do."""

    def committed(self, view: View) -> None:
        """Nobody to tell."""

    def prepare(self, view: View) -> dict[int, bytes]:
        """No windows."""
        return {}

    def load(self, view: View) -> None:
        """No experts."""

    def install(self, view: View, offers: Mapping[int, bytes]) -> None:
        """Nothing to start."""


def poll_cost_us(samples: int) -> list[float]:
    """Microseconds of one `Coordinator.poll` when nothing happened."""
    name = secrets.token_hex(8)
    store = TCPStoreMembership("127.0.0.1", is_master=True)
    engine = TransferEngine(TransferConfig(), name=name, secret=secrets.token_bytes(32))
    identity = Member(
        rank=0, incarnation=name, role=Role.BOTH, node="n", address="", pid=os.getpid()
    )
    coordinator = Coordinator(
        ElasticConfig(),
        store=store,
        engine=engine,
        member=Alone(),
        identity=identity,
        num_layers=1,
        num_logical=1,
        expected_workers=1,
    )
    costs = []
    with contextlib.closing(store), engine, contextlib.closing(coordinator):
        coordinator.join()
        for _ in range(samples):
            start = time.perf_counter()
            for _ in range(1000):
                coordinator.poll()
            costs.append((time.perf_counter() - start) * 1e3)
    return costs


@dataclass(slots=True)
class Samples:
    """One variant's figures, a round each."""

    tokens_per_s: list[float] = field(default_factory=list)
    cpu_ms_per_token: list[float] = field(default_factory=list)


async def measure(engines: list[Ours], rounds: int) -> dict[str, Samples]:
    """All rounds of all variants; the first round warms up."""
    rng = random.Random()
    samples = {engine.name: Samples() for engine in engines}
    for number in range(rounds + 1):
        prompts = [[rng.randrange(3, 4000) for _ in range(PROMPT_TOKENS)] for _ in range(REQUESTS)]
        for engine in engines if number % 2 else reversed(engines):
            before_s = engine.cpu_s()
            seconds = await engine.run(prompts, OUTPUT_TOKENS)
            used_s = engine.cpu_s() - before_s
            if number:
                tokens = REQUESTS * OUTPUT_TOKENS
                samples[engine.name].tokens_per_s.append(tokens / seconds)
                samples[engine.name].cpu_ms_per_token.append(used_s / tokens * 1e3)
    return samples


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="Where the checkpoint is, or will be written.")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    recorder = Recorder("overhead")
    recorder.add("look for view changes", "us", poll_cost_us(9))
    with contextlib.ExitStack() as stack:
        folder = options.model or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = write_checkpoint(folder)
        engines = [
            stack.enter_context(serving(name, model, sections))
            for name, sections in VARIANTS.items()
        ]
        samples = asyncio.run(measure(engines, options.rounds))
    full, plain = samples["full"], samples["plain"]
    for name, found in samples.items():
        recorder.add("output rate", "tokens/s", found.tokens_per_s, variant=name)
        recorder.add("processor time", "ms/token", found.cpu_ms_per_token, variant=name)
    rates = zip(full.tokens_per_s, plain.tokens_per_s, strict=True)
    recorder.add("output rate, full over plain", "1", [a / b for a, b in rates])
    times = zip(full.cpu_ms_per_token, plain.cpu_ms_per_token, strict=True)
    recorder.add("processor time, full over plain", "1", [a / b for a, b in times])
    recorder.write()


if __name__ == "__main__":
    main()
