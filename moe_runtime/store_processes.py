"""`moe-runtime store-master` and `store-node`: parts of the KV store as processes of their own.

store-master --shard 0 ─┐                        ┌─ store-node
store-master --shard 0 ─┤ one leads, one stands  ├─ store-node         and the workers of `serve`
store-master --shard 1 ─┘ by (with etcd)         └─ ...
"""

from __future__ import annotations

import logging
import secrets
import signal
import sys
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import click

from configs.addresses import check_address
from moe_runtime.options import (
    NO_MODEL,
    config_options,
    failures_in_one_line,
    load_from_options,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from configs.kvstore_masters import KVMastersConfig
    from configs.schema import KVStoreConfig
    from kvstore import MasterServer, StoreNode
    from transfer import TransferEngine

logger = logging.getLogger(__name__)


def _address(context: click.Context, parameter: click.Parameter, value: str) -> str:
    try:
        return check_address(value) if value else value
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@click.command("store-master")
@config_options(default_preset="example")
@click.option("--shard", default=0, show_default=True, help="Which part of the keys it has.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Where it listens.")
@click.option(
    "--port",
    default=0,
    show_default=True,
    type=click.IntRange(0, 65535),
    help="0: as `kvstore.masters.addresses` says, else any that is free.",
)
def store_master_command(shard: int, host: str, port: int, **options: object) -> None:
    """Run one master of the KV store. With etcd configured it leads when it is elected."""
    from kvstore import MasterServer
    from moe_runtime.cluster_secret import read_secret
    from moe_runtime.logs import configure_logging

    configure_logging(f"store-master-{shard}")
    config = load_from_options(options, unneeded=NO_MODEL)
    masters = config.kvstore.masters
    if not 0 <= shard < masters.num_shards:
        raise click.BadParameter(f"there are {masters.num_shards}", param_hint="--shard")
    if masters.addresses and not port:
        host, _, text = masters.addresses[shard].rpartition(":")
        port = int(text)
    with failures_in_one_line(), until_signalled() as stack:
        server = MasterServer(
            config.kvstore,
            secret=read_secret(config.cluster),
            host=host,
            port=port,
            standby=masters.etcd.enabled,
            rebuild_s=masters.rebuild_s,
            shard=shard,
        )
        stack.enter_context(server)
        if masters.etcd.enabled:
            _stand_for_election(stack, config.kvstore, shard, server)
        click.echo(f"store master of shard {shard} at {server.address}")
        sys.stdout.flush()


@click.command("store-node")
@config_options(default_preset="example")
@click.option("--master", "embedded", default="", help="The only master, if none is configured.")
@click.option("--slot", default=0, show_default=True, type=click.IntRange(0),
              help="What `{slot}` in the paths of segments is.")  # fmt: skip
@click.option("--metrics", default="", metavar="HOST:PORT", callback=_address,
              help="Tell Prometheus what this node counts, there; nobody is asked for a"
              " token.")  # fmt: skip
def store_node_command(embedded: str, slot: int, metrics: str, **options: object) -> None:
    """Lend memory and disks of this machine to the KV store (`kvstore.segments`)."""
    from kvstore import StoreNode
    from kvstore.discovery.finding import directory_of, followed
    from moe_runtime.cluster_secret import read_secret
    from moe_runtime.integrations.deepnvme import slab_for
    from moe_runtime.logs import configure_logging
    from transfer import TransferEngine

    configure_logging("store-node")
    config = load_from_options(options, unneeded=NO_MODEL)
    check_masters(config.kvstore.masters, embedded)
    directory = directory_of(config.kvstore.masters, embedded=embedded)
    lent = config.kvstore.for_slot(slot)
    with failures_in_one_line(), until_signalled() as stack:
        secret = read_secret(config.cluster)
        engine = TransferEngine(config.transfer, name=secrets.token_hex(8), secret=secret)
        make_slab = slab_for(lent.lent)
        node = StoreNode(engine, directory, lent, secret=secret, make_slab=make_slab)

        engine.on_notify(node.on_notify)
        stack.enter_context(followed(directory))
        stack.enter_context(engine)
        stack.enter_context(node)
        if metrics:
            _serve_metrics(stack, metrics, engine, node)
        click.echo(f"store node {engine.name} at {engine.address}")
        sys.stdout.flush()


def check_masters(config: KVMastersConfig, embedded: str) -> None:
    """Refuse a command that no option and no setting tells where a master is."""
    if config.addresses or config.etcd.enabled:
        return
    if not embedded:
        raise click.UsageError(
            "kvstore.masters: neither addresses nor etcd.endpoints are set; or give --master"
        )
    try:
        check_address(embedded)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--master") from error


def _serve_metrics(stack: ExitStack, address: str, engine: TransferEngine, node: StoreNode) -> None:
    from prometheus_client import CollectorRegistry, start_http_server

    from kvstore.admin.metrics import NodeCollector
    from transfer.metrics import TransferCollector

    registry = CollectorRegistry()
    registry.register(NodeCollector(node.statistics))
    registry.register(TransferCollector(engine.statistics))
    host, _, port = address.rpartition(":")
    try:
        server, thread = start_http_server(int(port), host.strip("[]"), registry)
    except OSError as error:
        raise OSError(error.errno, f"metrics at {address}: {error.strerror}") from error
    stack.callback(thread.join)
    stack.callback(server.server_close)
    stack.callback(server.shutdown)


def _stand_for_election(
    stack: ExitStack, config: KVStoreConfig, shard: int, server: MasterServer
) -> None:
    from kvstore.discovery.candidacy import Candidacy

    candidacy = Candidacy(config.masters.etcd, shard, config.masters.num_shards, server)
    stack.callback(candidacy.close)
    candidacy.open()


@contextmanager
def until_signalled() -> Iterator[ExitStack]:
    """Open what the block enters into the stack, wait for SIGINT or SIGTERM, and close it."""
    from kvstore import KVStoreError

    # Blocked before any thread starts, so that none of them gets what is waited for below.
    asked = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, asked)
    try:
        with ExitStack() as stack:
            yield stack
            logger.info("asked to stop by %s", signal.Signals(signal.sigwait(asked)).name)
    except KVStoreError as error:
        raise click.ClickException(str(error)) from error
