"""`serve` whose pool has masters of its own: they are killed and come back, and nobody notices."""

from __future__ import annotations

import asyncio
import random
import secrets
import signal
import time
from typing import TYPE_CHECKING

import httpx
import pytest
import yaml

from kvstore.client.master_map import MasterMap
from kvstore.discovery.directory import StaticMasters
from kvstore.wire import messages as m
from tests.support.cluster import (
    DEADLINE_S,
    cluster_config,
    copies,
    random_prompts,
    run_all,
    served_checkpoint,
    streams,
)
from tests.support.etcd_server import free_ports
from tests.support.serve_process import CommandProcess, ServeProcess

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from configs.schema import RuntimeConfig
    from tests.support.cluster import Stream

MAX_TOKENS = 300  # so many that none is over when the masters are killed
SHARDS = 2


class Masters:
    """`moe-runtime store-master` per shard, at addresses of their own."""

    def __init__(self, config: RuntimeConfig, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "masters.yaml"
        self.file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
        self.addresses = config.kvstore.masters.addresses
        self.running: dict[int, CommandProcess] = {}
        self.started = 0

    def start(self) -> None:
        command = ["-m", "moe_runtime", "store-master", "--config", str(self.file)]
        for shard in range(SHARDS):
            self.started += 1
            folder = self.folder / f"master{self.started}"
            self.running[shard] = CommandProcess([*command, "--shard", str(shard)], folder)
        for shard, process in self.running.items():
            found = process.wait_for_line(rf"store master of shard {shard} at (\S+)")
            assert found.group(1) == self.addresses[shard]

    def kill(self, shard: int) -> None:
        process = self.running.pop(shard)
        process.process.kill()
        assert process.process.wait(DEADLINE_S) == -9
        process.__exit__()

    def close(self) -> None:
        for shard in list(self.running):
            process = self.running.pop(shard)
            process.process.terminate()
            status = process.process.wait(DEADLINE_S)
            process.__exit__()
            assert status == 0, process.story()


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


async def disturbed(url: str, running: list[Stream], masters: Masters) -> list[str]:
    """Run streams; in their midst kill all masters, and start others."""
    async with httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as client:
        ending = asyncio.create_task(run_all(client, running))
        async with asyncio.timeout(DEADLINE_S):
            while min(len(stream.arrivals) for stream in running) < 5:
                await asyncio.sleep(0.01)
        for shard in range(SHARDS):
            masters.kill(shard)
        assert not ending.done(), "the streams were over before the masters were killed"
        await asyncio.to_thread(masters.start)
        return await ending


async def run(url: str, wanted: list[Stream]) -> list[str]:
    async with httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as client:
        return await run_all(client, wanted)


@pytest.mark.timeout(600)  # three runs of a served model, and eight processes to start
def test_masters_elsewhere_are_killed_and_come_back(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    checkpoint = served_checkpoint(tmp_path_factory.mktemp("checkpoint"), seed=seed)
    secret = secrets.token_hex(16).encode()
    (tmp_path / "secret").touch(mode=0o600)
    (tmp_path / "secret").write_bytes(secret)
    addresses = [f"127.0.0.1:{port}" for port in free_ports(SHARDS)]
    config = cluster_config(
        checkpoint,
        cluster={"workers": 2, "secret_file": str(tmp_path / "secret")},
        kvstore={"masters": {"addresses": addresses}},
    )
    masters = Masters(config, tmp_path)
    pool = MasterMap(StaticMasters(addresses), config.kvstore, secret=secret, identity="test")

    def figures() -> m.MasterStatistics:
        return pool.ask(m.Observe(), m.MasterStatistics, timeout_s=DEADLINE_S)

    try:
        masters.start()
        with ServeProcess(config, tmp_path) as served:
            served.wait_until_serving()
            until(lambda: figures().nodes == 2, "both workers lend to the masters elsewhere")
            prompts = random_prompts(random.Random(seed), 4)
            first = streams(checkpoint.name, prompts, max_tokens=MAX_TOKENS, seed=seed)
            again, third = copies(first), copies(first)
            texts = asyncio.run(run(served.url, first))
            until(lambda: figures().blocks > 0, "full blocks are written through")
            before = figures().blocks
            assert asyncio.run(disturbed(served.url, again, masters)) == texts
            until(lambda: figures().nodes == 2, "the workers found the new masters")
            until(lambda: figures().blocks >= before, "what the pool held is known again")
            assert asyncio.run(run(served.url, third)) == texts
            served.send(signal.SIGTERM)
            assert served.wait(DEADLINE_S) == 0, served.story()
            served.assert_all_gone()
        until(lambda: figures().nodes == 0, "the workers took leave")
    finally:
        pool.close()
        masters.close()
