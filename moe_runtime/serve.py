"""`moe-runtime serve`: a whole cluster on one machine.

    serve (this process)    HTTP front, request journal, membership store, store master
      └─ launch             the agent: restarts a worker that died
           ├─ worker 0      a rank: attention of its requests, its experts, pool segment
           └─ worker 1 ...

The agent dies with this process and the workers die with the agent (the kernel sees to it), so
that not even a SIGKILL leaves a process behind.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import click
import yaml

from moe_runtime.errors import MoeRuntimeError
from moe_runtime.options import config_options, load_from_options
from moe_runtime.parent import PARENT_VARIABLE

if TYPE_CHECKING:
    from types import TracebackType

    from configs.schema import RuntimeConfig

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 180.0
WORKERS_STOP_S = 5.0
AGENT_STOP_S = 20.0
_POLL_S = 0.05


class ClusterNotStarted(MoeRuntimeError):
    """The cluster did not come up."""

    def __init__(self, *, problem: str) -> None:
        super().__init__(f"the cluster did not start: {problem}", problem=problem)


class LocalCluster:
    """Front, stores and workers of one machine; an asynchronous context manager.

    Attributes:
        url: Where the HTTP front listens, once started.
    """

    def __init__(self, config: RuntimeConfig, *, quiet: bool = False) -> None:
        self._config = config
        self._quiet = quiet
        self._stack = AsyncExitStack()
        self._agent: asyncio.subprocess.Process | None = None
        self.url = ""
        self.membership_port = 0
        self.config_file = Path()

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start everything and wait until generation works.

        Raises:
            ClusterNotStarted: The workers ended, or are not ready in time.
            CheckpointError: The checkpoint can't be served.
        """
        self._check_checkpoint()
        folder = Path(tempfile.mkdtemp(prefix="moe-runtime-"))
        self._stack.callback(shutil.rmtree, folder, ignore_errors=True)
        await self._start_front(folder)
        if self._config.cluster.workers:
            await self._start_agent()
        await self._wait_until_ready()

    async def stop(self) -> None:
        """Stop the workers and everything else; idempotent."""
        await self._stack.aclose()

    async def drain(self) -> bool:
        """Refuse new requests and wait for open ones; False if some did not end in time."""
        return await self._front.drain()

    @property
    def agent_pid(self) -> int | None:
        """Process id of the agent."""
        return self._agent.pid if self._agent else None

    async def agent_ended(self) -> int:
        """Wait until the agent has ended by itself; its exit status."""
        assert self._agent is not None
        return await self._agent.wait()

    def _check_checkpoint(self) -> None:
        """Find out here, on one line, what every worker would stumble over."""
        from moe_runtime.models.checkpoint import Checkpoint

        with Checkpoint(self._config.model.path):
            pass

    async def _start_front(self, folder: Path) -> None:
        from elastic import TCPStoreMembership
        from kvstore import MasterServer
        from moe_runtime.cluster_secret import new_secret, read_secret
        from moe_runtime.front.front import Front
        from moe_runtime.front.http_server import HttpServer
        from moe_runtime.pool_fencing import PoolFencing
        from moe_runtime.worker import FRONT_KEY, MASTER_KEY

        config, cluster = self._config, self._config.cluster
        if cluster.secret_file is None:
            secret = new_secret(folder / "secret")
        else:
            secret = read_secret(cluster)
        membership = TCPStoreMembership(
            cluster.membership_host, cluster.membership_port, is_master=True
        )
        self._stack.callback(membership.close)
        self.membership_port = membership.port
        master = MasterServer(config.kvstore, secret=secret, host=config.transfer.host)
        self._stack.callback(master.close)
        master.open()
        fencing = PoolFencing(master, membership)
        self._stack.push_async_callback(fencing.close)
        self._front = Front(config, secret=secret, on_view=fencing.on_view)
        await self._front.start()
        self._stack.push_async_callback(self._front.stop)
        membership.put(FRONT_KEY, self._front.control_address.encode())
        membership.put(MASTER_KEY, master.address.encode())
        http = HttpServer(self._front.app, host=config.front.host, port=config.front.port)
        await http.start()
        self._stack.push_async_callback(http.stop)
        self.url = http.url
        self.config_file = folder / "config.yaml"
        self.config_file.write_text(yaml.safe_dump(self._effective(folder)))

    def _effective(self, folder: Path) -> dict[str, Any]:
        """What the workers read: this configuration, with what was only decided here."""
        values: dict[str, Any] = self._config.model_dump(mode="json")
        values["cluster"]["membership_port"] = self.membership_port
        secret_file = self._config.cluster.secret_file or folder / "secret"
        values["cluster"]["secret_file"] = str(secret_file)
        return values

    async def _start_agent(self) -> None:
        command = [sys.executable, "-m", "moe_runtime", "launch", "--config", str(self.config_file)]
        output = asyncio.subprocess.DEVNULL if self._quiet else None
        self._agent = await asyncio.create_subprocess_exec(
            *command,
            env=os.environ | {PARENT_VARIABLE: str(os.getpid())},
            stderr=output,
            start_new_session=True,  # Ctrl-C is for this process, which then stops the agent
        )
        self._stack.push_async_callback(self._stop_agent)

    async def _stop_agent(self) -> None:
        agent = self._agent
        if agent is None or agent.returncode is not None:
            return
        # Workers that are told to stop end with status 0, and the agent with the last of them. One
        # that is just starting hears nothing yet: the agent's own way of stopping ends it.
        self._front.stop_workers()
        for ask, patience_s in ((agent.terminate, WORKERS_STOP_S), (agent.kill, AGENT_STOP_S)):
            try:
                await asyncio.wait_for(agent.wait(), patience_s)
            except TimeoutError:
                logger.warning("still running after %.0f s: %s the agent", patience_s, ask.__name__)
                ask()
            else:
                return
        await agent.wait()

    async def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while (reason := self._front.unhealthy_reason()) is not None:
            if self._agent is not None and self._agent.returncode is not None:
                raise ClusterNotStarted(
                    problem=f"the agent ended with status {self._agent.returncode}"
                )
            if time.monotonic() > deadline:
                raise ClusterNotStarted(problem=f"{reason} after {START_TIMEOUT_S:.0f} s")
            await asyncio.sleep(_POLL_S)


class _Signals:
    """The first SIGTERM or SIGINT drains; the second stops at once."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        for signum in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signum, self._on_signal)

    def _on_signal(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


async def serve_until_signal(config: RuntimeConfig) -> int:
    """Serve until SIGTERM or SIGINT, drain, stop; the exit status."""
    signals = _Signals()
    async with LocalCluster(config) as cluster:
        click.echo(_welcome(config, cluster))
        stopping = asyncio.create_task(signals.first.wait())
        ended = asyncio.create_task(cluster.agent_ended())
        await asyncio.wait({stopping, ended}, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            stopping.cancel()
            click.echo(f"moe-runtime: the agent ended with status {ended.result()}", err=True)
            return 1
        ended.cancel()
        click.echo("moe-runtime: draining; a second Ctrl-C stops at once")
        draining = asyncio.create_task(cluster.drain())
        at_once = asyncio.create_task(signals.second.wait())
        await asyncio.wait({draining, at_once}, return_when=asyncio.FIRST_COMPLETED)
        drained = draining.done() and draining.result()
        draining.cancel()
        at_once.cancel()
    click.echo("moe-runtime: stopped" if drained else "moe-runtime: stopped, requests were cut")
    return 0


def _welcome(config: RuntimeConfig, cluster: LocalCluster) -> str:
    name = config.model.served_name or config.model.path.name
    body = f'{{"model": "{name}", "prompt": "In the beginning", "max_tokens": 64}}'
    return (
        f"moe-runtime: serving {name} on {config.cluster.workers} workers at {cluster.url}\n\n"
        f"  curl -N {cluster.url}/v1/completions -H 'content-type: application/json' "
        f"-d '{body[:-1]}, \"stream\": true}}'\n"
    )


@click.command("serve")
@config_options(default_preset="example")
def serve_command(**options: object) -> None:
    """Start front, stores and workers on this machine; Ctrl-C or SIGTERM drains and stops."""
    from moe_runtime.logs import configure_logging

    configure_logging("serve")
    config = load_from_options(options)
    try:
        status = asyncio.run(serve_until_signal(config))
    except (MoeRuntimeError, OSError) as error:
        raise click.ClickException(str(error)) from error
    sys.exit(status)
