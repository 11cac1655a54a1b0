"""`moe-runtime launch`: this node's workers under one agent; only a worker that died restarts."""

from __future__ import annotations

import os
import socket
import sys
from typing import TYPE_CHECKING

import click

from moe_runtime.options import config_options, failures_in_one_line, load_from_options
from moe_runtime.parent import NODE_VARIABLE, die_with_parent

if TYPE_CHECKING:
    from configs.schema import RuntimeConfig
    from elastic.agent import WorkerGroup


def worker_group(
    config: RuntimeConfig,
    *,
    config_name: str,
    overrides: tuple[str, ...],
    workers: int,
    node_rank: int,
) -> WorkerGroup:
    """What the agent runs: `moe_runtime.worker` with the same configuration."""
    from elastic.agent import WorkerGroup

    command = [sys.executable, "-m", "moe_runtime.worker", "--config", config_name]
    for override in overrides:
        command += ["--set", override]
    return WorkerGroup(
        command=tuple(command),
        num_workers=workers,
        node_rank=node_rank,
        num_nodes=max(1, -(-config.cluster.workers // workers)),
        master_addr=config.cluster.membership_host,
        master_port=config.cluster.membership_port,
        environment={
            NODE_VARIABLE: os.environ.get(NODE_VARIABLE) or f"{socket.gethostname()}-{os.getpid()}",
            # One compute thread per worker unless the user says otherwise: idle OpenMP threads
            # spin, and take the cores from the other workers of the node.
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(config.model.threads)),
        },
    )


@click.command("launch")
@config_options(default_preset="example")
@click.option("--workers", type=click.IntRange(min=1), help="Workers here; default: the cluster's.")
@click.option("--node-rank", default=0, show_default=True, help="Position of this node.")
def launch_command(workers: int | None, node_rank: int, **options: object) -> None:
    """Run workers that join the cluster of the configuration."""
    from elastic import LocalAgent, TCPStoreMembership
    from moe_runtime.cluster_secret import read_secret
    from moe_runtime.logs import configure_logging

    die_with_parent()
    configure_logging("agent")
    config = load_from_options(options, for_workers=True)
    group = worker_group(
        config,
        config_name=str(options["config"]),
        overrides=tuple(options["overrides"]),  # type: ignore[arg-type]
        workers=workers or config.cluster.workers,
        node_rank=node_rank,
    )
    cluster = config.cluster
    with failures_in_one_line():
        read_secret(cluster)
        membership = TCPStoreMembership(
            cluster.membership_host,
            cluster.membership_port,
            timeout_s=config.elastic.store_timeout_s,
        )
        try:
            membership.read()  # no front, no workers: said once here instead of by each of them
            agent = LocalAgent(config.elastic, group, store=membership)
            status = agent.run_until_signal()
        finally:
            membership.close()
    sys.exit(status)
