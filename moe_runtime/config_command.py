"""`moe-runtime config show | check | schema`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import click

from configs import render
from configs.errors import ConfigError
from configs.loader import LoadedConfig, load
from configs.schema import RuntimeConfig

EXIT_CONFIG = 2
Command = TypeVar("Command", bound=Callable[..., Any])


class ConfigFailure(click.ClickException):
    """A configuration error at the command line: its own lines, exit code 2."""

    exit_code = EXIT_CONFIG


def config_options(command: Command) -> Command:
    """Add `--preset`, `--config` and `--set` to a command; see `load_for_command`."""
    options = (
        click.option("--preset", metavar="NAME", help="Start from a preset (default: example)."),
        click.option("--config", "path", metavar="FILE", help="Start from a YAML file."),
        click.option(
            "--set",
            "overrides",
            multiple=True,
            metavar="SECTION.KEY=VALUE",
            help="Change one setting; may be repeated.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def load_for_command(
    preset: str | None, path: str | None, overrides: tuple[str, ...]
) -> LoadedConfig:
    """Load what the three options name.

    Raises:
        ConfigFailure: The configuration is wrong; click prints it and exits with 2.
        click.UsageError: Both a preset and a file were named.
    """
    if preset is not None and path is not None:
        raise click.UsageError("--preset and --config exclude each other")
    # A bare word after --config is a file too, never a preset.
    source = path if path is None or "/" in path else f"./{path}"
    try:
        return load(source or preset or "example", overrides=overrides)
    except ConfigError as error:
        raise ConfigFailure(str(error)) from error


@click.group(name="config")
def config_command() -> None:
    """Show, check or describe the configuration."""


@config_command.command()
@config_options
def show(preset: str | None, path: str | None, overrides: tuple[str, ...]) -> None:
    """Print the whole configuration; comments say where a value is from."""
    click.echo(render.show(load_for_command(preset, path, overrides)), nl=False)


@config_command.command()
@config_options
def check(preset: str | None, path: str | None, overrides: tuple[str, ...]) -> None:
    """Exit 0 if the configuration is usable, else list all problems and exit 2."""
    loaded = load_for_command(preset, path, overrides)
    click.echo(f"ok: {loaded.config.model.path}, {loaded.config.cluster.workers} workers")


@config_command.command()
@click.option("--format", "form", type=click.Choice(["json", "markdown"]), default="json")
def schema(form: str) -> None:
    """Print the JSON schema, or the reference page of all settings."""
    if form == "markdown":
        click.echo(render.reference_page(), nl=False)
    else:
        click.echo(json.dumps(RuntimeConfig.model_json_schema(), indent=2))
