"""Output tokens per second against other engines, interleaved in one run.

    python -m benchmarks.bench_serving --vllm-python VENV/bin/python --rounds 5

Greedy, 64 prompt and 64 output tokens a request, bf16, 1, 4 and 16 requests at once. In each round
every engine runs once per concurrency; a ratio compares the medians of one run. Ours is measured
over HTTP, as a client sees it; the peers inside their own process. Peers are stopped (SIGSTOP)
while another engine runs, so that idle threads that spin cost nobody time; ours sleeps when idle.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.harness import Recorder
from benchmarks.serving_checkpoint import write_checkpoint
from configs.schema import RuntimeConfig

LENGTH = 64
CONCURRENCIES = (1, 4, 16)
PEER_SCRIPT = Path(__file__).parent / "peers" / "serving_peer.py"
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "one worker": {"model": {"threads": 2}},
    "one worker, tolerant": {"model": {"threads": 2, "exactness": "tolerant"}},
    "four workers": {"cluster": {"workers": 4}},
}


def fresh_prompts(rng: random.Random, count: int) -> list[list[int]]:
    """Prompts that no cache has seen."""
    return [[rng.randrange(3, 4000) for _ in range(LENGTH)] for _ in range(count)]


@dataclass(slots=True)
class Peer:
    """Another engine in its own process."""

    name: str
    process: subprocess.Popen[str]

    @classmethod
    def start(cls, name: str, python: str, model: Path) -> Peer:
        """Start it and wait until its model is loaded."""
        process = subprocess.Popen(
            [python, str(PEER_SCRIPT), name, str(model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        peer = cls(name, process)
        peer._line("ready")
        os.killpg(process.pid, signal.SIGSTOP)
        return peer

    async def run(self, prompts: list[list[int]]) -> float:
        """Seconds of one round."""
        os.killpg(self.process.pid, signal.SIGCONT)
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "length": LENGTH}) + "\n")
        self.process.stdin.flush()
        line = await asyncio.to_thread(self._line, "round ")
        os.killpg(self.process.pid, signal.SIGSTOP)
        return float(line.removeprefix("round "))

    def close(self) -> None:
        """End its processes; asked first, so that it removes its shared memory."""
        os.killpg(self.process.pid, signal.SIGCONT)
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _line(self, start: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(start):
                return line.strip()
        raise RuntimeError(f"{self.name} ended with status {self.process.wait()}")


@dataclass(slots=True)
class Ours:
    """Our server, reached over HTTP."""

    name: str
    client: httpx.AsyncClient
    model: str
    pid: int

    def cpu_s(self) -> float:
        """Processor seconds that the server's living processes have used, user and system."""
        root = psutil.Process(self.pid)
        times = [process.cpu_times() for process in (root, *root.children(recursive=True))]
        return sum(each.user + each.system for each in times)

    async def run(self, prompts: list[list[int]], length: int = LENGTH) -> float:
        """Seconds of one round."""
        start = time.perf_counter()
        await asyncio.gather(*(self._complete(prompt, length) for prompt in prompts))
        return time.perf_counter() - start

    async def _complete(self, prompt: list[int], length: int) -> None:
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": length,
            "temperature": 0,
            "ignore_eos": True,
        }
        answer = await self.client.post("/v1/completions", json=body)
        answer.raise_for_status()
        assert answer.json()["usage"]["completion_tokens"] == length


@contextlib.contextmanager
def serving(name: str, model: Path, sections: dict[str, dict[str, Any]]) -> Iterator[Ours]:
    """Run `moe-runtime serve` with a variant's configuration."""
    values: dict[str, Any] = {
        "model": {"path": str(model), "served_name": "bench"},
        "cluster": {"workers": 1},
        "front": {"port": 0},
        "scheduler": {"token_budget": 256, "num_pages": 512, "max_running": 16},
    }
    for section, changes in sections.items():
        values[section] = values.get(section, {}) | changes
    config = RuntimeConfig.model_validate(values)
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump(config.model_dump(mode="json"), file)  # JSON is YAML
        file.flush()
        process = subprocess.Popen(
            [sys.executable, "-m", "moe_runtime", "serve", "--config", file.name],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            welcome = process.stdout.readline().decode()
            url = welcome.rsplit(maxsplit=1)[-1]
            with contextlib.closing(process.stdout):
                client = httpx.AsyncClient(base_url=url, timeout=600)
                yield Ours(name, client, "bench", process.pid)
        finally:
            process.terminate()
            process.wait(timeout=60)


async def measure(engines: list[Peer | Ours], rounds: int) -> dict[tuple[str, int], list[float]]:
    """Tokens per second of every engine and concurrency; the first round only warms up."""
    rng = random.Random()
    rates: dict[tuple[str, int], list[float]] = {}
    for number in range(rounds + 1):
        for concurrency in CONCURRENCIES:
            prompts = fresh_prompts(rng, concurrency)
            for engine in engines:
                seconds = await engine.run(prompts)
                if number:
                    key = (engine.name, concurrency)
                    rates.setdefault(key, []).append(concurrency * LENGTH / seconds)
    return rates


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="Where the checkpoint is, or will be written.")
    parser.add_argument("--vllm-python", help="Interpreter of an environment that has vLLM.")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = options.model or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = write_checkpoint(folder)
        engines: list[Peer | Ours] = []
        peers = {"transformers": sys.executable, "vllm": options.vllm_python}
        for name, python in peers.items():
            if python:
                peer = Peer.start(name, python, model)
                stack.callback(peer.close)
                engines.append(peer)
        for name, sections in VARIANTS.items():
            engines.append(stack.enter_context(serving(name, model, sections)))
        rates = asyncio.run(measure(engines, options.rounds))
    recorder = Recorder("serving")
    for (name, concurrency), samples in rates.items():
        recorder.add("output rate", "tokens/s", samples, engine=name, requests=concurrency)
    _add_ratios(recorder, rates)
    recorder.write()


def _add_ratios(recorder: Recorder, rates: dict[tuple[str, int], list[float]]) -> None:
    """Round by round, ours over theirs."""
    names = {name for name, _ in rates}
    for ours in VARIANTS:
        for theirs in sorted(names - {ours}):
            for concurrency in CONCURRENCIES:
                pairs = zip(rates[ours, concurrency], rates[theirs, concurrency], strict=True)
                recorder.add(
                    "output rate, ratio",
                    "1",
                    [a / b for a, b in pairs],
                    engine=ours,
                    against=theirs,
                    requests=concurrency,
                )


if __name__ == "__main__":
    main()
