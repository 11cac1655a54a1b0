"""Command-line options that choose the configuration, the same for every command."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from configs import load_config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from configs.schema import RuntimeConfig

#: for `load_from_options`: of commands that serve no model
NO_MODEL: Final = ("model.path",)

Command = TypeVar("Command", bound="Callable[..., Any]")


class NumberRange(click.FloatRange):
    """A `FloatRange` of numbers: comparisons let `nan` through."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Read the number."""
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


def config_options(*, default_preset: str) -> Callable[[Command], Command]:
    """Add `--config` and `--set` to a command."""

    def decorate(command: Command) -> Command:
        command = click.option(
            "--set",
            "overrides",
            multiple=True,
            metavar="SECTION.KEY=VALUE",
            help="Override one key; may be given often.",
        )(command)
        return click.option(
            "--config",
            "config",
            default=default_preset,
            show_default=True,
            help="Preset name or YAML file.",
        )(command)

    return decorate


class ConfigRefused(click.ClickException):
    """A configuration that can't be used: the loader's own lines, exit code 2."""

    exit_code = 2


def load_from_options(
    options: Mapping[str, Any],
    *,
    extra: Sequence[str] = (),
    for_workers: bool = False,
    unneeded: Sequence[str] = (),
) -> RuntimeConfig:
    """Load the configuration that the options name.

    Args:
        options: The values of `config_options`.
        extra: Overrides of the command itself, stronger than the user's.
        for_workers: It must say for whom they use the pool, wherever its masters are.
        unneeded: As of `load_config`.

    Raises:
        ConfigRefused: With the loader's own message.
    """
    try:
        overrides = [*options["overrides"], *extra]
        config = load_config(options["config"], overrides=overrides, unneeded=unneeded)
        if for_workers:
            config.kvstore.tenant_of_workers()
    except ValueError as error:  # a ConfigError is one too
        raise ConfigRefused(str(error)) from error
    return config


@contextmanager
def failures_in_one_line() -> Iterator[None]:
    """Turn what can go wrong outside of this program into one line and exit status 1."""
    # Imported here: they bring torch, which `config` and `--help` do without.
    from elastic import ElasticError
    from kvstore import KVStoreError
    from moe_runtime.errors import MoeRuntimeError
    from transfer import TransferError

    try:
        yield
    except BrokenPipeError:
        raise  # who read our output went away (`| head`): click ends without a word
    except (MoeRuntimeError, ElasticError, KVStoreError, TransferError, OSError) as error:
        raise click.ClickException(" ".join(str(error).split())) from error
