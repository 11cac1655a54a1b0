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
import json
import logging
import os
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import click
import yaml

from moe_runtime.agent_process import AgentProcess
from moe_runtime.errors import MoeRuntimeError
from moe_runtime.options import config_options, failures_in_one_line, load_from_options
from moe_runtime.parent import NODE_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from types import TracebackType

    from configs.schema import RuntimeConfig
    from elastic import Member

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 180.0
WORKERS_STOP_S = 5.0
DYING_S_MAX = 5.0
_POLL_S = 0.05


class ClusterNotStarted(MoeRuntimeError):
    """The cluster did not come up."""

    problem: str

    def _message(self) -> str:
        return f"the cluster did not start: {self.problem}"


class LocalCluster:
    """Front, stores and workers of one machine; an asynchronous context manager.

    Args:
        config: The whole configuration.
        launch_workers: False starts no workers: they are started by other means, such as torchrun,
            with `config_file`.
        quiet: Whether the output of the workers is thrown away.

    Attributes:
        url: Where the HTTP front listens, once started.
        config_file: What workers are started with: `--config` of `moe_runtime.worker`.
        drained: Whether every open request ended in time.
    """

    def __init__(
        self, config: RuntimeConfig, *, launch_workers: bool = True, quiet: bool = False
    ) -> None:
        self._config = config
        self._launch_workers = launch_workers
        self._quiet = quiet
        self._stack = AsyncExitStack()
        self._agent: AgentProcess | None = None
        self._node = f"{socket.gethostname()}-{os.getpid()}"
        self.url = ""
        self.membership_port = 0
        self.config_file = Path()
        self.drained = False

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
        """Start everything and wait until generation works; without workers nothing is waited for.

        To be called once; `stop` must follow even if it fails.

        Raises:
            ClusterNotStarted: A port is taken, the workers ended, or are not ready in time.
            MoeRuntimeError: The checkpoint, its tokenizer or the secret can't be used.
        """
        self._check_checkpoint()
        folder = Path(tempfile.mkdtemp(prefix="moe-runtime-"))
        self._stack.callback(shutil.rmtree, folder, ignore_errors=True)
        await self._start_front(folder)
        # Whoever started them: without the membership store of this process they are of no use.
        self._stack.callback(self._front.stop_workers)
        if self._launch_workers:
            await self._start_agent()
            await self._wait_until_ready()

    async def stop(self) -> None:
        """Stop the workers and everything else; idempotent."""
        await self._stack.aclose()

    async def drain(self) -> bool:
        """Refuse new requests and wait for open ones; False if some did not end in time."""
        self.drained = await self._front.drain()
        return self.drained

    def cut(self) -> None:
        """End what is open with an error, and the workers at once; `stop` does the rest."""
        self._front.relay.fail_open("the server was stopped")
        if self._agent is not None:
            self._agent.kill()

    @property
    def agent_pid(self) -> int | None:
        """Process id of the agent."""
        return self._agent.pid if self._agent else None

    async def agent_ended(self) -> int:
        """Wait until the agent has ended by itself; its exit status. Without one, forever."""
        if self._agent is None:
            await asyncio.Event().wait()
        assert self._agent is not None
        return await self._agent.ended()

    def _check_checkpoint(self) -> None:
        """Find out here, on one line, what every worker would stumble over."""
        from moe_runtime.models.checkpoint import Checkpoint
        from moe_runtime.models.inventory import check_inventory

        with Checkpoint(self._config.model.path) as checkpoint:
            check_inventory(checkpoint)

    async def _start_front(self, folder: Path) -> None:
        from elastic import TCPStoreMembership
        from kvstore import MasterServer
        from moe_runtime.cluster_secret import new_secret, read_secret
        from moe_runtime.front.front import Front
        from moe_runtime.front.http_server import HttpServer
        from moe_runtime.pool_fencing import PoolFencing, RemoteMasters
        from moe_runtime.store_admin import store_administration
        from moe_runtime.worker import FRONT_KEY, MASTER_KEY

        config, cluster = self._config, self._config.cluster
        if cluster.secret_file is None:
            secret = new_secret(folder / "secret")
        else:
            secret = read_secret(cluster)
        for knob, host, port in (
            ("cluster.membership_port", cluster.membership_host, cluster.membership_port),
            ("front.port", config.front.host, config.front.port),
        ):
            _check_port(knob, host, port)
        membership = self._membership = TCPStoreMembership(
            cluster.membership_host, cluster.membership_port, is_master=True
        )
        self._stack.callback(membership.close)
        self.membership_port = membership.port
        masters = config.kvstore.masters
        master: MasterServer | RemoteMasters
        if masters.embedded:
            master = MasterServer(config.kvstore, secret=secret, host=config.transfer.host)
        else:
            master = RemoteMasters(config.kvstore, secret=secret)
        fencing = PoolFencing(master, membership)
        self._front = Front(config, secret=secret, on_view=fencing.on_view)
        self._stack.callback(master.close)
        master.open()
        if config.kvstore.admin.enabled:
            administration = store_administration(config, secret=secret, embedded=master.address)
            self._stack.enter_context(administration)
        self._stack.push_async_callback(fencing.close)
        self._stack.push_async_callback(self._front.stop)
        await self._front.start()
        membership.put(FRONT_KEY, self._front.control_address.encode())
        membership.put(MASTER_KEY, master.address.encode() if masters.embedded else b"")
        http = HttpServer(self._front.app, host=config.front.host, port=config.front.port)
        self._stack.push_async_callback(http.stop)
        await http.start()
        self.url = http.url
        self.config_file = folder / "config.yaml"
        self.config_file.write_text(yaml.safe_dump(self._effective(folder)))

    def _effective(self, folder: Path) -> dict[str, Any]:
        """What the workers read: this configuration, with what was only decided here."""
        values: dict[str, Any] = self._config.model_dump(mode="json")
        values["cluster"]["membership_port"] = self.membership_port
        secret_file = self._config.cluster.secret_file or folder / "secret"
        values["cluster"]["secret_file"] = str(secret_file.resolve())
        return values

    async def _start_agent(self) -> None:
        command = [sys.executable, "-m", "moe_runtime", "launch", "--config", str(self.config_file)]
        self._agent = AgentProcess(
            command,
            # The next agent's workers are the same node, so they get the same ranks.
            environment={NODE_VARIABLE: self._node},
            backoff_s=self._config.elastic.restart_backoff_s,
            on_killed=self._report_ends,
            quiet=self._quiet,
        )
        self._stack.push_async_callback(self._stop_agent, self._agent)
        await self._agent.start()

    async def _stop_agent(self, agent: AgentProcess) -> None:
        # Workers that are told to stop end with status 0, and the agent with the last of them.
        # Those that are just starting hear nothing yet: the agent's own way of stopping ends them.
        self._front.stop_workers()
        started = len(self._front.relay.router.workers) >= self._config.cluster.workers
        await agent.stop(patience_s=WORKERS_STOP_S if started else 0.0)

    async def _report_ends(self) -> None:
        """Say of the workers that were killed with the agent that they are dead for certain."""
        view = self._front.view
        ours = [m for m in view.members if m.node == self._node] if view is not None else []
        await asyncio.to_thread(self._report_when_ended, ours)

    def _report_when_ended(self, members: list[Member]) -> None:
        from elastic import ElasticError
        from elastic.evidence import process_ended

        deadline = time.monotonic() + DYING_S_MAX
        for member in members:
            while not process_ended(member.pid) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            if not process_ended(member.pid):
                continue  # the group will find out by itself
            try:
                self._membership.report_exit(member.incarnation, "killed with its agent")
            except ElasticError as error:
                logger.warning("the end of rank %d can't be reported: %s", member.rank, error)

    async def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while (reason := self._front.unhealthy_reason()) is not None:
            if self._agent is not None and (status := self._agent.status) is not None:
                raise ClusterNotStarted(problem=f"the agent ended with status {status}")
            if time.monotonic() > deadline:
                raise ClusterNotStarted(problem=f"{reason} after {START_TIMEOUT_S:.0f} s")
            await asyncio.sleep(_POLL_S)


def _check_port(knob: str, host: str, port: int) -> None:
    """Say which setting names a port that is taken, before a library says it its own way."""
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (while ")[0]  # names the address again
        problem = f"{knob}: {host}:{port}: {reason}"
        raise ClusterNotStarted(problem=problem) from error


class _Signals:
    """The first SIGTERM or SIGINT drains; the second stops at once."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        for signum in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signum, self._on_signal)

    def _on_signal(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


async def serve_until_signal(config: RuntimeConfig, *, launch_workers: bool = True) -> int:
    """Serve until SIGTERM or SIGINT, drain, stop; the exit status."""
    signals = _Signals()
    cluster = LocalCluster(config, launch_workers=launch_workers)
    try:
        if not await _done_before(cluster.start(), signals.first):
            click.echo("moe-runtime: stopped before it was ready")
            return 0
        click.echo(_welcome(config, cluster, launch_workers=launch_workers))
        if await _done_before(cluster.agent_ended(), signals.first):
            status = await cluster.agent_ended()
            click.echo(f"moe-runtime: the agent ended with status {status}", err=True)
            return 1
        click.echo("moe-runtime: draining; a second Ctrl-C stops at once")
        complete = await _done_before(cluster.drain(), signals.second) and cluster.drained
        if signals.second.is_set():
            cluster.cut()
    finally:
        await cluster.stop()
    click.echo("moe-runtime: stopped" if complete else "moe-runtime: stopped, requests were cut")
    return 0


async def _done_before(work: Coroutine[Any, Any, object], event: asyncio.Event) -> bool:
    """Run `work` until it is done, or until the event comes and it is cancelled.

    Returns:
        Whether it is done; its error is raised.
    """
    working, waiting = asyncio.ensure_future(work), asyncio.create_task(event.wait())
    try:
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
            return True
        return False
    finally:
        for task in (working, waiting):
            task.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)


def _welcome(config: RuntimeConfig, cluster: LocalCluster, *, launch_workers: bool) -> str:
    name = config.model.served_name or config.model.path.name
    body = json.dumps(
        {"model": name, "prompt": "In the beginning", "max_tokens": 64, "stream": True}
    )
    curl = (
        f"  curl -N {cluster.url}/v1/completions -H 'content-type: application/json' "
        f"-d {shlex.quote(body)}\n"
    )
    if launch_workers:
        workers = config.cluster.workers
        return f"moe-runtime: serving {name} on {workers} workers at {cluster.url}\n\n{curl}"
    return (
        f"moe-runtime: serving {name} at {cluster.url}, once {config.cluster.workers} workers "
        f"have joined:\n\n  torchrun --standalone --nproc-per-node {config.cluster.workers} "
        f"-m moe_runtime.worker --config {cluster.config_file}\n\n{curl}"
    )


@click.command("serve")
@config_options(default_preset="example")
@click.option(
    "--no-workers",
    is_flag=True,
    help="Start front and stores only; workers join from elsewhere (torchrun, launch).",
)
def serve_command(no_workers: bool, **options: object) -> None:
    """Start front, stores and workers on this machine; Ctrl-C or SIGTERM drains and stops."""
    from moe_runtime.logs import configure_logging

    configure_logging("serve")
    config = load_from_options(options, for_workers=True)
    with failures_in_one_line():
        status = asyncio.run(serve_until_signal(config, launch_workers=not no_workers))
    sys.exit(status)
