"""`moe-runtime config show | check | schema`."""

from __future__ import annotations

import json
from typing import Any

import click

from configs import ConfigError, LoadedConfig, RuntimeConfig, load, render
from moe_runtime.options import NO_MODEL, ConfigRefused, config_options


@click.group(name="config")
def config_command() -> None:
    """Show, check or describe the configuration."""


store_only = click.option(
    "--store-only", is_flag=True, help="It is of store-master, store-node or store-admin: no model."
)


@config_command.command()
@config_options(default_preset="example")
@store_only
def show(**options: Any) -> None:
    """Print the whole configuration; comments say where a value is from."""
    click.echo(render.show(_load(options)), nl=False)


@config_command.command()
@config_options(default_preset="example")
@store_only
def check(**options: Any) -> None:
    """Exit 0 if the configuration is usable, else list all problems and exit 2."""
    config = _load(options).config
    if options["store_only"]:
        store = config.kvstore
        lent = ", ".join(f"{segment.medium} of {segment.bytes} bytes" for segment in store.lent)
        click.echo(f"ok: masters: {store.masters.num_shards}; a node lends {lent}")
        return
    if not (config.model.path / "config.json").is_file():
        raise ConfigRefused(f"model.path = {config.model.path}: no checkpoint (config.json) there")
    click.echo(f"ok: {config.model.path}, {config.cluster.workers} workers")


@config_command.command()
@click.option("--format", "form", type=click.Choice(["json", "markdown"]), default="json")
def schema(form: str) -> None:
    """Print the JSON schema, or the reference page of all settings."""
    if form == "markdown":
        click.echo(render.reference_page(), nl=False)
    else:
        click.echo(json.dumps(RuntimeConfig.model_json_schema(), indent=2))


def _load(options: dict[str, Any]) -> LoadedConfig:
    try:
        unneeded = NO_MODEL if options["store_only"] else ()
        return load(options["config"], overrides=options["overrides"], unneeded=unneeded)
    except ConfigError as error:
        raise ConfigRefused(str(error)) from error
