"""The administration service of the KV store: inside `serve`, or as a process of its own."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from moe_runtime.options import (
    NO_MODEL,
    ConfigRefused,
    config_options,
    failures_in_one_line,
    load_from_options,
)
from moe_runtime.store_processes import check_masters, until_signalled

if TYPE_CHECKING:
    from collections.abc import Iterator

    from configs.schema import RuntimeConfig
    from kvstore.admin.admin_server import AdminServer


@contextmanager
def store_administration(
    config: RuntimeConfig, *, secret: bytes, embedded: str = ""
) -> Iterator[AdminServer]:
    """Serve `kvstore.admin` meanwhile.

    Args:
        config: Says where the service and the masters are.
        secret: The cluster secret.
        embedded: The address of the only master, where the configuration names none.

    Raises:
        KVStoreError: There is no usable token.
        OSError: The address can't be bound.
        ValueError: Nothing says where a master is.
    """
    from kvstore.admin.admin_server import AdminServer
    from kvstore.discovery.finding import directory_of, followed

    directory = directory_of(config.kvstore.masters, embedded=embedded)
    with followed(directory):
        server = AdminServer(config.kvstore.admin, directory, config.transfer, secret=secret)
        try:
            server.open()
            yield server
        finally:
            server.close()


@click.command("store-admin")
@config_options(default_preset="example")
@click.option("--master", "embedded", default="", help="The only master, if none is configured.")
def store_admin_command(embedded: str, **options: object) -> None:
    """Serve the administration of the KV store over HTTP (`kvstore.admin`)."""
    from moe_runtime.cluster_secret import read_secret
    from moe_runtime.logs import configure_logging

    configure_logging("store-admin")
    config = load_from_options(options, unneeded=NO_MODEL)
    if not config.kvstore.admin.enabled:
        raise ConfigRefused("kvstore.admin.enabled is false")
    check_masters(config.kvstore.masters, embedded)
    with failures_in_one_line(), until_signalled() as stack:
        secret = read_secret(config.cluster)
        server = stack.enter_context(store_administration(config, secret=secret, embedded=embedded))
        click.echo(f"store administration at {server.url}")
        sys.stdout.flush()
